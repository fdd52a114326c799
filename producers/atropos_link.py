"""One environment's two ends: its lane for groups, and its conversation with the consumer for all else.

Speaks Atropos' words (the answers of its rollout server, as plain dicts) but imports nothing of it. A missing
consumer is never an error here: the environment is told to hold, and goes on when there is one again.

Called by `shmbridge.producers.atropos`, in the environment's event loop.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from shmbridge import Producer, Run, ShmBridgeError
from shmbridge.config import format_size
from shmbridge.control import AsyncControlClient
from shmbridge.errors import NoConsumer
from shmbridge.messages import Goodbye, Register, Registered, RunInfo, RunInfoRequest, Status, StatusRequest

log = logging.getLogger(__name__)

# How long one question may take before the consumer counts as missing. Rollouts go on meanwhile.
ASK_S = 2.0

# The policy version when this worker began to generate. Every task has a context of its own.
_began_at: ContextVar[int] = ContextVar("policy_version_when_generation_began")


OnFull: TypeAlias = Literal["block", "raise", "drop"]


@dataclass(frozen=True)
class LinkOptions:
    """What a user chooses; the arguments of `shmbridge.Producer`."""

    bridge: str
    lane_bytes: int | str = "64M"
    on_full: OnFull = "block"


class EnvLink:
    """One environment on one bridge, for as long as it runs.

    Opening reserves the lane, which takes some milliseconds; nothing else here blocks the event loop.
    """

    def __init__(self, options: LinkOptions, env_name: str) -> None:
        self._env_name = env_name
        self._producer = Producer(
            options.bridge, env_name=env_name, lane_bytes=options.lane_bytes, on_full=options.on_full
        )
        self._control = AsyncControlClient(options.bridge, role="env", name=env_name)
        self._hold = _Hold(options.bridge, self._producer)
        self._env_id = -1
        self._hub_epoch = 0
        self._run: Run | None = None
        self._status: dict[str, Any] = {}
        self._sending: set[asyncio.Task[None]] = set()
        self._unsent = 0
        self._refusals: Counter[str] = Counter()

    # --- what the rollout server would answer -------------------------------------------------------------

    async def wandb_info(self) -> dict[str, str | None]:
        """Where to log; nulls until a consumer has announced its run."""
        await self._learn_run()
        run = self._run
        return {"group": run.wandb_group if run else None, "project": run.wandb_project if run else None}

    async def register(self, wish: Mapping[str, Any]) -> dict[str, Any]:
        """Ask to be admitted; a status other than "success" means: ask again in a second."""
        request = Register(
            desired_name=wish["desired_name"] or self._env_name,
            max_token_length=wish["max_token_length"],
            group_size=wish["group_size"],
            weight=wish["weight"],
            min_batch_allocation=wish["min_batch_allocation"],
            producer_id=self._producer.producer_id,
        )
        try:
            admitted = await self._control.request(request, ASK_S)
        except NoConsumer:
            return self._wait("no consumer answers")
        if not isinstance(admitted, Registered):
            return self._wait("the consumer has announced no run")
        self._hold.end()
        self._env_id, self._hub_epoch, self._run = admitted.env_id, admitted.hub_epoch, admitted.run
        self._status = _status(admitted.current_step)
        return {
            "status": "success",
            "env_id": admitted.env_id,
            "wandb_name": admitted.wandb_name,
            "checkpoint_dir": admitted.run.checkpoint_dir,
            "starting_step": admitted.current_step,
            "checkpoint_interval": admitted.run.save_checkpoint_interval,
            "num_steps": admitted.run.num_steps,
        }

    async def info(self) -> dict[str, int]:
        """What a batch takes; -1 where nobody has said."""
        run = self._run
        return {
            "batch_size": run.batch_size if run else -1,
            "max_token_len": run.max_token_len if run else -1,
        }

    async def status(self) -> dict[str, Any]:
        """The numbers the environment throttles by; while nobody answers, the last ones.

        The last ones, and `holding`, instead of an invented full queue: an environment ends itself once what
        is queued completes its last step, so near the end it would take a full queue for the end.
        """
        try:
            answer = await self._control.request(StatusRequest(self._env_id), ASK_S)
        except NoConsumer:
            self._hold.begin("no consumer answers")
        except ShmBridgeError as refused:  # the consumer's trouble, of which no environment should die
            self._hold.begin(str(refused))
        else:
            if isinstance(answer, Status):
                await self._take(answer)
            else:
                self._hold.begin("the consumer has announced no run")
        return self._status

    async def _take(self, answer: Status) -> None:
        if answer.draining or answer.paused:
            self._hold.begin(
                "the consumer drains the bridge" if answer.draining else "the consumer has paused it"
            )
        else:
            self._hold.end()
        if answer.hub_epoch != self._hub_epoch:
            await self._learn_run()
            self._hub_epoch = answer.hub_epoch
        self._status = _status(
            answer.current_step,
            # Groups that wait for room in the lane are queued as well, and must throttle as well.
            queue_size=answer.queue_groups + self._unsent,
            self_queue_size=answer.self_queue_groups + self._unsent,
            unallocated_fraction=answer.unallocated_fraction,
            max_group_size=answer.max_group_size,
            env_weight=answer.env_weight,
        )

    @property
    def holding(self) -> bool:
        """No new rollouts are to begin: nobody consumes, or the consumer wants none."""
        return bool(self._hold.reason)

    @property
    def run(self) -> Run | None:
        """What the consumer trains, as last heard; another one after a change of consumer."""
        return self._run

    def _wait(self, reason: str) -> dict[str, Any]:
        self._hold.begin(reason)
        return {"status": f"wait: {reason}"}

    async def _learn_run(self) -> None:
        with suppress(NoConsumer):
            answer = await self._control.request(RunInfoRequest(), ASK_S)
            if isinstance(answer, RunInfo) and answer.run is not None:
                self._run = answer.run

    # --- groups -------------------------------------------------------------------------------------------

    def generation_begins(self) -> None:
        """Remember the policy version for what the calling task is about to generate."""
        _began_at.set(self._producer.policy_version)

    async def send(self, groups: Sequence[dict[str, Any]]) -> None:
        """Put groups into the lane, in order; returns once each is committed or counted.

        They go there also if the awaiting worker is cancelled, which Atropos does to a worker at any moment.
        """
        self._unsent += len(groups)
        task = asyncio.create_task(self._put(groups, self._versions()))
        self._sending.add(task)
        task.add_done_callback(self._sending.discard)
        await asyncio.shield(task)

    def _versions(self) -> tuple[int, int]:
        """The oldest and the newest policy that can have sampled a token: when generation began, and now.

        An environment does not say which of its tokens came when, so these are bounds; staleness goes by the
        oldest. A learner that went back to a checkpoint has made the newest the smaller number.
        """
        now = self._producer.policy_version
        began = _began_at.get(now)
        return min(began, now), max(began, now)

    async def _put(self, groups: Sequence[dict[str, Any]], versions: tuple[int, int]) -> None:
        for group in groups:
            try:
                if await self._producer.put_async(group, policy_version=versions, foreign=True) is None:
                    self._count("dropped: the lane is full")
            except ShmBridgeError as refused:
                self._count(f"{type(refused).__name__} {getattr(refused, 'column', '')}", str(refused))
            except Exception as fault:  # a worker may be gone already: nobody else would hear of it
                self._count(type(fault).__name__, repr(fault))
            finally:
                self._unsent -= 1

    def _count(self, kind: str, details: str = "") -> None:
        """Count a group that is not in the lane; say so once per kind, for it may happen to every group."""
        self._refusals[kind] += 1
        if self._refusals[kind] == 1:
            log.error("a group is not delivered, further ones like it are only counted: %s", details or kind)

    # --- the end ------------------------------------------------------------------------------------------

    async def close(self, flush_s: float) -> None:
        """Leave the bridge: what waits for room gets `flush_s` to find it and is then counted as dropped."""
        if self._sending:
            await asyncio.wait(self._sending, timeout=flush_s)
        with suppress(ShmBridgeError):  # a consumer that is not there needs no goodbye
            await self._control.request(Goodbye(self._env_id), min(flush_s, ASK_S))
        self._control.close()
        self._producer.close()
        if self._sending:
            await asyncio.wait(self._sending)  # each finds the lane closed
        put = int(self._producer.stats()["records_total"])
        lost = ", ".join(f"{count} {kind}" for kind, count in self._refusals.items())
        log.info(
            "environment %s ends: %d groups delivered, not delivered: %s", self._env_name, put, lost or "none"
        )


class _Hold:
    """Whether rollouts hold and since when; said once when it begins and once when it ends."""

    def __init__(self, bridge: str, producer: Producer) -> None:
        self._bridge = bridge
        self._producer = producer
        self._since = 0.0
        self._records_before = 0
        self.reason = ""

    def begin(self, reason: str) -> None:
        if reason == self.reason:
            return
        if not self.reason:
            self._since = time.monotonic()
            self._records_before = int(self._producer.stats()["records_total"])
        self.reason = reason
        stats = self._producer.stats()
        log.warning(
            "bridge %s: %s; no new rollouts begin until that ends (lane: %d groups, %s of %s free)",
            self._bridge,
            reason,
            stats["held"],
            format_size(stats["lane_free_bytes"]),
            format_size(stats["lane_bytes"]),
        )

    def end(self) -> None:
        if not self.reason:
            return
        self.reason = ""
        log.warning(
            "bridge %s: going on after %.1f s (%d groups were put meanwhile)",
            self._bridge,
            time.monotonic() - self._since,
            int(self._producer.stats()["records_total"]) - self._records_before,
        )


def _status(
    current_step: int,
    queue_size: int = 0,
    self_queue_size: int = 0,
    unallocated_fraction: float = 1.0,
    max_group_size: int = 1,
    env_weight: float = 1.0,
) -> dict[str, Any]:
    """The answer to /status-env; without arguments that of an empty queue."""
    return dict(locals())
