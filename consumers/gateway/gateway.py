"""The operations behind the routes: batches in the hub's thread, posts and environments in the event loop."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from shmbridge import Run
from shmbridge.consumers.gateway.batches import Batch, Taker
from shmbridge.consumers.gateway.bodies import Posted
from shmbridge.consumers.gateway.environments import RemoteEnvs, StateFile
from shmbridge.consumers.gateway.limits import GatewayOptions
from shmbridge.consumers.gateway.posts import Outcomes, PostLedger, ProvingConnection, RemoteLane

log = logging.getLogger(__name__)

T = TypeVar("T")
_LOOK_EVERY_S = 1.0


class Gateway:
    """Works beside any hub; becomes the hub once a trainer registers here. For one event loop."""

    taker: Taker

    def __init__(self, options: GatewayOptions) -> None:
        self.options = options
        self.state = StateFile(options.bridge)
        self.ledger = PostLedger(options.post_deadline_s)
        self.taker = Taker(options, self.state, lambda: self.ledger.waiting > 0)
        self.envs = RemoteEnvs(options, self.state, lambda lane: self.tell(self.taker.look))
        self._thread = ThreadPoolExecutor(1, "shmbridge-gateway-hub")
        self._latest: dict[str, Any] | None = None
        self._looking: asyncio.Task[None] | None = None

    async def open(self) -> None:
        """Continues an earlier gateway's run and environments."""
        self.state.open()
        if self.state.saved.compat != self.options.compat:
            self.state.update(compat=self.options.compat, envs=[], started=False)
        await self.hub(self.taker.restore)
        self._looking = asyncio.get_running_loop().create_task(self._look_after())
        self.envs.restore()

    async def _look_after(self) -> None:
        while True:
            await asyncio.sleep(_LOOK_EVERY_S)
            try:
                self.ledger.forget_old()
                await self.envs.let_the_silent_go()
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

    # -- the trainer

    async def register(self, run: Run) -> None:
        """Announces a trainer's run. Raises ConsumerTaken."""
        await self.hub(self.taker.register, run)
        self.envs.hub_came()

    async def batch(self, connection: ProvingConnection, gzip: bool) -> Batch | None:
        """Returns the next batch, in delivery on this connection. Raises as Taker.next_batch."""
        batch = await self.hub(self.taker.next_batch, gzip, lambda: connection.gone)
        if batch is not None:
            connection.carry(
                lambda read: self.tell(self.taker.proven if read else self.taker.lost, batch.number)
            )
        return batch

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

    # -- environments

    async def post(self, posted: Posted, connection: ProvingConnection, waited_s: float) -> Outcomes:
        """Puts the groups of a body that has waited for `waited_s` already. Raises as PostLedger.take."""
        last = posted.groups[-1] if posted.groups else None
        outcomes = await self.ledger.take(posted, self.lane_of, connection, waited_s)
        self._latest = last or self._latest
        return outcomes

    def lane_of(self, group: dict[str, Any]) -> RemoteLane:
        """Returns the lane that a group goes to."""
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

    # -- counters and the end

    def stats(self) -> dict[str, float]:
        """Returns the counters, flat."""
        posts = {**self.ledger.counts, "posts_waiting": self.ledger.waiting}
        return {**posts, **self.taker.stats(), "environments": len(self.envs)}

    def end(self) -> None:
        """Refuses posts that wait for room, and closes all lanes; what is in them stays."""
        self.ledger.end()
        self.envs.close_lanes()

    async def close(self) -> None:
        """Leaves the bridge; the next gateway goes on from here."""
        if self._looking is not None:
            self._looking.cancel()
        self.end()
        await self.ledger.settled(2.0)
        await self.hub(self.taker.close)
        self._thread.shutdown()
        self.state.close()
        self.envs.close()
