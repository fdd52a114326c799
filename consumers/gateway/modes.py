"""The operations behind the routes, in two modes: default, which fixes the Atropos server's data loss, and
strict, which responds exactly as that server. It joins the parts: the taker in its own thread, posts and
remote environments in the event loop.
"""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

from shmbridge import Run
from shmbridge.consumers.gateway.batch_server import Batch, Taker
from shmbridge.consumers.gateway.decode import Posted
from shmbridge.consumers.gateway.delivery import Carrier
from shmbridge.consumers.gateway.options import GatewayOptions
from shmbridge.consumers.gateway.posts import Outcomes, Places, PostLedger, RemoteLane
from shmbridge.consumers.gateway.remote_envs import RemoteEnvs
from shmbridge.consumers.gateway.saved_state import StateFile
from shmbridge.consumers.gateway.strict_batch_server import StrictTaker

log = logging.getLogger(__name__)

T = TypeVar("T")
_LOOK_EVERY_S = 1.0
_SHARED = 1  # the lane of those who are not known, or have none


@dataclass(eq=False, slots=True)
class _Handed:
    """A batch in delivery; reports the outcome to the hub's thread."""

    mode: Mode
    number: int

    def read(self) -> None:
        """Its records are released."""
        self.mode.tell(self.mode.taker.proven, self.number)

    def unread(self) -> None:
        """It is the next to be served."""
        self.mode.tell(self.mode.taker.lost, self.number)


class Mode(ABC):
    """One gateway's operations. All are called in one event loop."""

    taker: Taker

    def __init__(self, options: GatewayOptions) -> None:
        self.options = options
        self.state = StateFile(options.bridge)
        self.ledger = PostLedger(options.post_deadline_s, self._outcomes)
        self._thread = ThreadPoolExecutor(1, "shmbridge-gateway-hub")
        self._tasks: set[asyncio.Task[None]] = set()

    async def open(self) -> None:
        """Takes up what an earlier gateway left. Raises ConsumerTaken in strict mode."""
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
                log.exception("what is over could not be let go")

    async def hub(self, work: Callable[..., T], *arguments: Any) -> T:
        """Runs a call in the hub's thread and awaits it."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, work, *arguments)

    def tell(self, work: Callable[..., object], *arguments: Any) -> None:
        """Queues a call in the hub's thread, after earlier ones."""

        def do() -> None:
            try:
                work(*arguments)
            except Exception:
                log.exception("the hub's thread stumbled")

        self._thread.submit(do)

    async def batch(self, carrier: Carrier, gzip: bool) -> Batch | None:
        """The next batch, out until the carrier's fate is known. Raises as Taker.next_batch."""
        batch = await self.hub(self.taker.next_batch, gzip, lambda: carrier.gone)
        if batch is not None:
            carrier.carry(_Handed(self, batch.number))
        return batch

    async def register(self, run: Run) -> None:
        """A trainer announces its run. Raises ConsumerTaken."""
        await self.hub(self.taker.register, run)

    @abstractmethod
    async def post(self, posted: Posted, carrier: Carrier, waited_s: float) -> Outcomes:
        """Puts a body's groups; it has waited for so long already.

        Per group: None for queued, or how many sequences of its environment are buffered. Raises HttpError.
        """

    async def _outcomes(self, places: Places) -> Outcomes:
        """What became of groups that are in the lanes."""
        return [None] * len(places)

    async def let_the_silent_go(self) -> None:
        """Releases the weight of environments that have been silent for long; the original waits for ever."""
        return

    @abstractmethod
    async def register_env(self, wish: dict[str, Any]) -> dict[str, Any]:
        """The answer to /register-env."""

    @abstractmethod
    async def disconnect_env(self, number: int) -> dict[str, Any]:
        """The answer to /disconnect-env."""

    @abstractmethod
    async def env_status(self, number: int) -> dict[str, Any]:
        """The answer to /status-env."""

    @abstractmethod
    async def status(self) -> dict[str, int]:
        """The answer to /status."""

    @abstractmethod
    async def run(self) -> Run | None:
        """What is trained."""

    @abstractmethod
    async def latest(self) -> dict[str, Any] | None:
        """The group of /latest_example."""

    @abstractmethod
    async def reset(self) -> None:
        """Forgets registrations and queue."""

    @abstractmethod
    def close_lanes(self) -> None:
        """The gateway ends: posts that wait for room are refused, what is in the lanes stays."""

    def stats(self) -> dict[str, float]:
        """Counters, flat."""
        return {**self.ledger.counts, "posts_waiting": self.ledger.waiting, **self.taker.stats()}

    async def close(self) -> None:
        """Leaves the bridge; the next gateway goes on from here."""
        for task in self._tasks:
            task.cancel()
        self.close_lanes()
        await self.ledger.settled(2.0)
        await self.hub(self.taker.close)
        self._thread.shutdown()
        self.state.close()


class DefaultMode(Mode):
    """Works beside any hub; becomes the hub once a trainer registers here."""

    def __init__(self, options: GatewayOptions) -> None:
        super().__init__(options)
        self.taker = Taker(options, self.state, lambda: self.ledger.waiting > 0)
        self._envs: RemoteEnvs | None = None
        self._latest: dict[str, Any] | None = None

    @property
    def envs(self) -> RemoteEnvs:
        """The remote environments; there from open() on."""
        assert self._envs is not None
        return self._envs

    async def open(self) -> None:
        """See Mode."""
        await super().open()
        self._envs = RemoteEnvs(self.options, self.state, lambda lane: self.tell(self.taker.look))

    async def let_the_silent_go(self) -> None:
        """See Mode."""
        if self._envs is not None:
            await self._envs.let_the_silent_go()

    async def register(self, run: Run) -> None:
        """See Mode."""
        await super().register(run)
        self.envs.hub_came()

    async def post(self, posted: Posted, carrier: Carrier, waited_s: float) -> Outcomes:
        """See Mode."""
        last = posted.groups[-1] if posted.groups else None
        outcomes = await self.ledger.take(posted, self._lane_of, carrier, waited_s)
        self._latest = last or self._latest
        return outcomes

    def _lane_of(self, group: dict[str, Any]) -> RemoteLane:
        return self.envs.lane_of(group.get("env_id"))

    async def register_env(self, wish: dict[str, Any]) -> dict[str, Any]:
        """See Mode. Raises RequestRefused."""
        return await self.envs.register(wish)

    async def disconnect_env(self, number: int) -> dict[str, Any]:
        """See Mode."""
        return await self.envs.disconnect(number)

    async def env_status(self, number: int) -> dict[str, Any]:
        """See Mode."""
        return await self.envs.status(number)

    async def status(self) -> dict[str, int]:
        """See Mode."""
        consumer = self.taker.consumer
        if consumer is not None and self.taker.run is not None:
            return {"current_step": consumer.current_step, "queue_size": consumer.queue.groups()}
        info = await self.envs.run_info()
        return {"current_step": info.current_step if info is not None else 0, "queue_size": 0}

    async def run(self) -> Run | None:
        """See Mode."""
        if self.taker.run is not None:
            return self.taker.run
        info = await self.envs.run_info()
        return info.run if info is not None else None

    async def latest(self) -> dict[str, Any] | None:
        """See Mode: the last group posted here, or of a batch that is out."""
        return self._latest if self._latest is not None else await self.hub(self.taker.latest)

    async def reset(self) -> None:
        """See Mode. Raises ConsumerTaken if the queue is another hub's."""
        await self.hub(self.taker.reset)
        self.envs.forget()
        self.ledger.forget()
        self.state.forget()

    def close_lanes(self) -> None:
        """See Mode."""
        if self._envs is not None:
            self._envs.close_lanes()

    async def close(self) -> None:
        """See Mode."""
        await super().close()
        if self._envs is not None:
            self._envs.close()

    def stats(self) -> dict[str, float]:
        """See Mode."""
        return {**super().stats(), "environments": len(self._envs or ())}


class StrictMode(Mode):
    """The hub from the beginning, with the original's queue."""

    taker: StrictTaker

    def __init__(self, options: GatewayOptions) -> None:
        super().__init__(options)
        self.taker = StrictTaker(options, self.state)
        self._lanes: dict[int | None, RemoteLane] = {}

    async def post(self, posted: Posted, carrier: Carrier, waited_s: float) -> Outcomes:
        """See Mode."""
        return await self.ledger.take(posted, self._lane_of, carrier, waited_s)

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
        """See Mode."""
        return await self.hub(self.taker.register_env, wish)

    async def disconnect_env(self, number: int) -> dict[str, Any]:
        """See Mode."""
        return await self.hub(self.taker.disconnect_env, number)

    async def env_status(self, number: int) -> dict[str, Any]:
        """See Mode. Raises what the original fails with."""
        return await self.hub(self.taker.env_status, number)

    async def status(self) -> dict[str, int]:
        """See Mode."""
        return await self.hub(self.taker.status)

    async def run(self) -> Run | None:
        """See Mode; after a reset its numbers are -1 and its names gone, as in the original."""
        return await self.hub(self.taker.said_run)

    async def latest(self) -> dict[str, Any] | None:
        """See Mode."""
        return await self.hub(self.taker.latest)

    async def reset(self) -> None:
        """See Mode."""
        await self.hub(self.taker.reset)
        lanes, self._lanes = self._lanes, {}
        for lane in lanes.values():
            lane.close()
        self.ledger.forget()
        self.state.forget()

    def close_lanes(self) -> None:
        """See Mode."""
        for lane in self._lanes.values():
            lane.close()
