"""The operations behind the routes, in two modes: default, which fixes the Atropos server's data loss, and
strict, which responds exactly as that server. They join the parts: the taker in its own thread, posts and
remote environments in the event loop.
"""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

from shmbridge import Run
from shmbridge.consumers.gateway.batch_server import Batch, Taker
from shmbridge.consumers.gateway.decode import Posted
from shmbridge.consumers.gateway.delivery import ProvingConnection
from shmbridge.consumers.gateway.options import GatewayOptions
from shmbridge.consumers.gateway.posts import Outcomes, Places, PostLedger, RemoteLane
from shmbridge.consumers.gateway.remote_envs import RemoteEnvs
from shmbridge.consumers.gateway.saved_state import StateFile
from shmbridge.consumers.gateway.strict_batch_server import StrictTaker

log = logging.getLogger(__name__)

T = TypeVar("T")
_LOOK_EVERY_S = 1.0
_SHARED = 1  # the lane of environments that are unknown or have no lane


@dataclass(eq=False, slots=True)
class _Handed:
    """A batch in delivery; reports the outcome to the hub's thread."""

    mode: Mode
    number: int

    def read(self) -> None:
        """Releases its records."""
        self.mode.tell(self.mode.taker.proven, self.number)

    def unread(self) -> None:
        """Makes it the next batch to hand out."""
        self.mode.tell(self.mode.taker.lost, self.number)


class Mode(ABC):
    """The common part of both modes. `outcomes` is PostLedger's. All calls are made in one event loop."""

    taker: Taker

    def __init__(
        self, options: GatewayOptions, outcomes: Callable[[Places], Awaitable[Outcomes]] | None = None
    ) -> None:
        self.options = options
        self.state = StateFile(options.bridge)
        self.ledger = PostLedger(options.post_deadline_s, outcomes)
        self._thread = ThreadPoolExecutor(1, "shmbridge-gateway-hub")
        self._tasks: set[asyncio.Task[None]] = set()

    async def open(self) -> None:
        """Continues where an earlier gateway stopped. Raises ConsumerTaken in strict mode."""
        self.state.open()
        if self.state.saved.compat != self.options.compat:
            self.state.update(compat=self.options.compat, envs=[], started=False)
        await self.hub(self.taker.restore)
        self._tasks.add(asyncio.get_running_loop().create_task(self._look_after()))

    async def _look_after(self) -> None:
        while True:
            await asyncio.sleep(_LOOK_EVERY_S)
            try:
                self.ledger.forget_old()
                await self.let_the_silent_go()
            except Exception:
                log.exception("old posts or silent environments were not removed")

    async def hub(self, work: Callable[..., T], *arguments: Any) -> T:
        """Runs a call in the hub's thread and awaits it."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, work, *arguments)

    def tell(self, work: Callable[..., object], *arguments: Any) -> None:
        """Queues a call in the hub's thread, after earlier ones."""

        def do() -> None:
            try:
                work(*arguments)
            except Exception:
                log.exception("a call in the hub's thread failed")

        self._thread.submit(do)

    async def batch(self, connection: ProvingConnection, gzip: bool) -> Batch | None:
        """Returns the next batch, in delivery on this connection. Raises as Taker.next_batch."""
        batch = await self.hub(self.taker.next_batch, gzip, lambda: connection.gone)
        if batch is not None:
            connection.carry(_Handed(self, batch.number))
        return batch

    async def register(self, run: Run) -> None:
        """Announces a trainer's run. Raises ConsumerTaken."""
        await self.hub(self.taker.register, run)

    async def let_the_silent_go(self) -> None:
        """Does nothing: the original waits for silent environments for ever."""
        return

    @abstractmethod
    def close_lanes(self) -> None:
        """Closes all lanes; what is in them stays."""

    def stats(self) -> dict[str, float]:
        """Returns the counters, flat."""
        return {**self.ledger.counts, "posts_waiting": self.ledger.waiting, **self.taker.stats()}

    def end(self) -> None:
        """Refuses posts that wait for room, and closes all lanes; what is in them stays."""
        self.ledger.end()
        self.close_lanes()

    async def close(self) -> None:
        """Leaves the bridge; the next gateway goes on from here."""
        for task in self._tasks:
            task.cancel()
        self.end()
        await self.ledger.settled(2.0)
        await self.hub(self.taker.close)
        self._thread.shutdown()
        self.state.close()


class DefaultMode(Mode):
    """Works beside any hub; becomes the hub once a trainer registers here."""

    def __init__(self, options: GatewayOptions) -> None:
        super().__init__(options)
        self.taker = Taker(options, self.state, lambda: self.ledger.waiting > 0)
        self.envs = RemoteEnvs(options, self.state, lambda lane: self.tell(self.taker.look))
        self._latest: dict[str, Any] | None = None

    async def open(self) -> None:
        """Continues an earlier gateway's run and environments."""
        await super().open()
        self.envs.restore()

    async def let_the_silent_go(self) -> None:
        """Releases weight and lane of environments that have been silent for long."""
        await self.envs.let_the_silent_go()

    async def register(self, run: Run) -> None:
        """Announces a trainer's run. Raises ConsumerTaken."""
        await super().register(run)
        self.envs.hub_came()

    async def post(self, posted: Posted, connection: ProvingConnection, waited_s: float) -> Outcomes:
        """Puts the groups of a body that has waited for `waited_s` already. Raises as PostLedger.take."""
        last = posted.groups[-1] if posted.groups else None
        outcomes = await self.ledger.take(posted, self._lane_of, connection, waited_s)
        self._latest = last or self._latest
        return outcomes

    def _lane_of(self, group: dict[str, Any]) -> RemoteLane:
        return self.envs.lane_of(group.get("env_id"))

    async def register_env(self, wish: dict[str, Any]) -> dict[str, Any]:
        """Returns the response to /register-env. Raises RequestRefused, Refused."""
        return await self.envs.register(wish)

    async def disconnect_env(self, number: int) -> dict[str, Any]:
        """Returns the response to /disconnect-env."""
        return await self.envs.disconnect(number)

    async def env_status(self, number: int) -> dict[str, Any]:
        """Returns the response to /status-env."""
        return await self.envs.status(number)

    async def status(self) -> dict[str, int]:
        """Returns the response to /status."""
        consumer = self.taker.consumer
        if consumer is not None and self.taker.run is not None:
            return {"current_step": consumer.current_step, "queue_size": consumer.queue.groups()}
        info = await self.envs.run_info()
        return {"current_step": info.current_step if info is not None else 0, "queue_size": 0}

    async def run(self) -> Run | None:
        """Returns the run of this gateway, else of the hub; None if there is none."""
        if self.taker.run is not None:
            return self.taker.run
        info = await self.envs.run_info()
        return info.run if info is not None else None

    async def latest(self) -> dict[str, Any] | None:
        """Returns the last group posted here, or else of a batch in delivery; None if there is none."""
        return self._latest if self._latest is not None else await self.hub(self.taker.latest)

    async def reset(self) -> None:
        """Clears registrations and queue. Raises ConsumerTaken if the queue is another hub's."""
        await self.hub(self.taker.reset)
        self.envs.forget()
        self.ledger.forget()
        self.state.forget()

    def close_lanes(self) -> None:
        """Closes all lanes; what is in them stays."""
        self.envs.close_lanes()

    async def close(self) -> None:
        """Leaves the bridge; the next gateway goes on from here."""
        await super().close()
        self.envs.close()

    def stats(self) -> dict[str, float]:
        """Returns the counters, flat."""
        return {**super().stats(), "environments": len(self.envs)}


class StrictMode(Mode):
    """The hub from the beginning, with the original's queue."""

    taker: StrictTaker

    def __init__(self, options: GatewayOptions) -> None:
        super().__init__(options, self._outcomes)
        self.taker = StrictTaker(options, self.state)
        self._lanes: dict[int | None, RemoteLane] = {}

    async def post(self, posted: Posted, connection: ProvingConnection, waited_s: float) -> Outcomes:
        """Puts the groups of a body that has waited for `waited_s` already. Raises as PostLedger.take."""
        return await self.ledger.take(posted, self._lane_of, connection, waited_s)

    async def _outcomes(self, places: Places) -> Outcomes:
        return await self.hub(self.taker.posted, places)

    def _lane_of(self, group: dict[str, Any]) -> RemoteLane:
        number = group.get("env_id")
        known = number if number is not None and number < len(self.taker.upstream.envs) else None
        if known not in self._lanes and len(self._lanes) + _SHARED >= self.options.lanes:
            known = None  # no consumer would take from another lane
        lane = self._lanes.get(known)
        if lane is None:
            name = "gateway" if known is None else self.taker.upstream.envs[known].desired_name
            lane = self._lanes[known] = RemoteLane(self.options, name, self.taker.own)
        return lane

    async def register_env(self, wish: dict[str, Any]) -> dict[str, Any]:
        """Returns the response to /register-env."""
        return await self.hub(self.taker.register_env, wish)

    async def disconnect_env(self, number: int) -> dict[str, Any]:
        """Returns the response to /disconnect-env."""
        return await self.hub(self.taker.disconnect_env, number)

    async def env_status(self, number: int) -> dict[str, Any]:
        """Returns the response to /status-env. Raises as Upstream.env_status."""
        return await self.hub(self.taker.env_status, number)

    async def status(self) -> dict[str, int]:
        """Returns the response to /status."""
        return await self.hub(self.taker.status)

    async def run(self) -> Run | None:
        """Returns the run; after a reset its numbers are -1 and its names gone, as in the original."""
        return await self.hub(self.taker.said_run)

    async def latest(self) -> dict[str, Any] | None:
        """Returns the group that was queued last; None before the first."""
        return await self.hub(self.taker.latest)

    async def reset(self) -> None:
        """Clears registrations and queue."""
        await self.hub(self.taker.reset)
        lanes, self._lanes = self._lanes, {}
        for lane in lanes.values():
            lane.close()
        self.ledger.forget()
        self.state.forget()

    def close_lanes(self) -> None:
        """Closes all lanes; what is in them stays."""
        for lane in self._lanes.values():
            lane.close()
