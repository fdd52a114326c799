"""One environment's connection to the bridge: its lane for groups, and control requests to the consumer for
all else.

Gives the answers of Atropos' rollout server, as plain dicts, but imports nothing of it. A missing
consumer is not an error here: the environment holds, and continues when there is a consumer again.

Used by `shmbridge.producers.atropos.patches`, in the environment's event loop.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import math
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from contextvars import ContextVar
from typing import Any

import msgspec

from shmbridge import Run, ShmBridgeError
from shmbridge.config import format_size
from shmbridge.control.messages import (
    LONGEST_NAME,
    MOST_METRICS,
    Evaluated,
    Goodbye,
    Register,
    Registered,
    RunInfo,
    RunInfoRequest,
    Status,
    StatusRequest,
)
from shmbridge.control.server import AsyncControlClient
from shmbridge.errors import NoConsumer
from shmbridge.producers.atropos.lane import EnvLane, LinkOptions
from shmbridge.producers.atropos.versions import heard, stamp

log = logging.getLogger(__name__)

_MOST_UNSENT = 16

_Method = Callable[..., Coroutine[Any, Any, Any]]
# What the running evaluation has passed to `evaluate_log`. Every task has a context of its own.
_logged: ContextVar[dict[str, float] | None] = ContextVar("metrics_of_this_evaluation", default=None)

# How long one request may take before the consumer counts as missing. Rollouts continue in this time.
ASK_S = 2.0
# Between two requests, while the environment cannot begin: doubled each time, from the first to the last.
FIRST_PAUSE_S, LAST_PAUSE_S = 0.25, 4.0
# The policy version when this worker began to generate. Every task has a context of its own.
_began_at: ContextVar[int] = ContextVar("policy_version_when_generation_began")


class Evaluations:
    """The evaluations of one environment that the consumer has not heard of yet, the newest 16 at most."""

    def __init__(self, env_name: str) -> None:
        self._env_name = env_name
        self._number = 0
        self.unsent: deque[Evaluated] = deque()
        self.not_delivered: Counter[str] = Counter()

    def add(self, metrics: Mapping[str, float], producer_id: str, version: int, step: int) -> None:
        """Notes what one evaluation has measured, to be sent."""
        kept = {name: value for name, value in metrics.items() if len(name) <= LONGEST_NAME}
        kept = dict(list(kept.items())[:MOST_METRICS])
        if len(kept) < len(metrics):
            self._lose("metrics beyond what a message takes", len(metrics) - len(kept))
        shown = ", ".join(f"{name} {value:.4g}" for name, value in list(kept.items())[:8])
        log.info("evaluation at step %d, policy version %d: %s", step, version, shown or "no numbers")
        if not kept:
            return
        self._number += 1
        name = self._env_name[:LONGEST_NAME]
        self.unsent.append(Evaluated(producer_id, name, self._number, kept, version, step))
        if len(self.unsent) > _MOST_UNSENT:
            self.unsent.popleft()
            self._lose("evaluations while no consumer answered")

    def refused(self, why: Exception) -> None:
        """Drops the oldest, which the consumer does not take."""
        self.unsent.popleft()
        self._lose(f"evaluations, refused: {why}")

    def leave(self) -> None:
        """Counts what is left at the end."""
        if self.unsent:
            self._lose("evaluations at the end", len(self.unsent))
            self.unsent.clear()

    def _lose(self, kind: str, count: int = 1) -> None:
        self.not_delivered[kind] += count
        log.warning("environment %s: %d not delivered: %s", self._env_name, count, kind)


def measured(
    evaluate: _Method, env: Any, begin: Callable[[], tuple[int, int]], add: Callable[..., None]
) -> _Method:
    """Returns `evaluate` of an environment, which then calls `add(metrics, version, step)`.

    Args:
        evaluate: the environment's own.
        env: the environment.
        begin: returns the policy version and the step now.
        add: gets what was measured.
    """

    @functools.wraps(evaluate)
    async def run(*args: Any, **kwargs: Any) -> Any:
        version, step = begin()
        found: dict[str, float] = {}
        token, before = _logged.set(found), list(_listed(env))
        try:
            result = await evaluate(*args, **kwargs)
        except Exception:  # BaseEnv reads no result of this task
            log.exception("the evaluation at step %d failed; the environment goes on", step)
            raise
        finally:
            _logged.reset(token)
        now = list(_listed(env))
        same = now[: len(before)] == before  # else `wandb_log` has emptied it meanwhile, or it was replaced
        new = now[len(before) :] if same else now
        add({**numbers(result), **numbers(dict(new)), **found}, version, step)
        return result

    return run


def logged(evaluate_log: _Method) -> _Method:
    """Returns `evaluate_log` of an environment, whose metrics are then those of the running evaluation."""

    @functools.wraps(evaluate_log)
    async def run(metrics: Any, *args: Any, **kwargs: Any) -> Any:
        if (found := _logged.get()) is not None:
            found |= numbers(metrics)
        return await evaluate_log(metrics, *args, **kwargs)

    return run


def numbers(metrics: Any) -> dict[str, float]:
    """Returns the finite numbers of a mapping, by name; none of anything else."""
    found: dict[str, float] = {}
    for name, value in metrics.items() if isinstance(metrics, Mapping) else ():
        try:
            number = float(value) if not isinstance(value, (str, bytes)) else math.nan
        except (TypeError, ValueError, OverflowError):
            continue
        if math.isfinite(number):
            found[str(name)] = number
    return found


def _listed(env: Any) -> Iterable[tuple[str, Any]]:
    """Yields the pairs of `eval_metrics`, of the environments that have such a list."""
    listed = getattr(env, "eval_metrics", None)
    for each in listed if isinstance(listed, list) else ():
        if isinstance(each, (tuple, list)) and len(each) == 2 and isinstance(each[0], str):
            yield each[0], each[1]


class EnvLink:
    """One environment on one bridge, for as long as it runs.

    Opening reserves the lane, which takes milliseconds for each MiB at worst; nothing else here blocks the
    event loop.

    Attributes:
        run: what the consumer trains, as last reported; another one after a change of consumer.
        env_id: the environment's number, -1 before it has one; another one where the bridge was made again
            and the old one was taken.
        closed: left, or about to be.
    """

    def __init__(self, options: LinkOptions, env_name: str, tokenizer: Any = None) -> None:
        self._bridge, self._env_name = options.bridge, env_name
        self.loop = asyncio.get_running_loop()
        self._lane = EnvLane(options, env_name, tokenizer)
        self._control = self._client()
        self._hold = _Hold(options.bridge, self._lane)
        self._evaluations = Evaluations(env_name)
        self._registered: Register | None = None
        self.env_id = -1
        self._hub_epoch = 0
        self.run: Run | None = None
        self._status: dict[str, Any] = {}
        self.closed = False

    def _client(self) -> AsyncControlClient:
        return AsyncControlClient(self._bridge, role="env", name=self._env_name)

    # --- the rollout server's answers --------------------------------------------------------------------

    async def wandb_info(self) -> dict[str, str]:
        """Where to log. Returns once a consumer has announced its run."""
        await self._until(self._ask_run)
        assert self.run is not None
        return {"group": self.run.wandb_group, "project": self.run.wandb_project}

    async def register(self, wish: Mapping[str, Any]) -> dict[str, Any]:
        """Asks to be admitted. Returns once a consumer has announced its run, and has admitted."""
        self._registered = Register(
            desired_name=wish["desired_name"] or self._env_name,
            max_token_length=wish["max_token_length"],
            group_size=wish["group_size"],
            weight=wish["weight"],
            min_batch_allocation=wish["min_batch_allocation"],
            producer_id=self._lane.producer_id,
        )
        await self._until(self._ask_admission)
        assert self.run is not None
        return {
            "status": "success",
            "env_id": self.env_id,
            "wandb_name": self._registered.wandb_name,
            "checkpoint_dir": self.run.checkpoint_dir,
            "starting_step": self._status["current_step"],
            "checkpoint_interval": self.run.save_checkpoint_interval,
            "num_steps": self.run.num_steps,
        }

    async def info(self) -> dict[str, int]:
        """Returns the batch size and the longest trajectory in tokens; -1 if unknown."""
        run = self.run
        return {
            "batch_size": run.batch_size if run else -1,
            "max_token_len": run.max_token_len if run else -1,
        }

    async def status(self) -> dict[str, Any]:
        """Returns the numbers the environment throttles by; without a consumer, the last ones.

        The last ones, and `holding`, instead of an invented full queue: an environment ends itself once what
        is queued completes its last step, so near the end it would take a full queue for the end.
        """
        try:
            if await self._missing_lane() or not await self._still_admitted():
                return self._status
            answer = await self._control.request(StatusRequest(self.env_id), ASK_S)
        except NoConsumer:
            self._hold.begin("no consumer answers")
        except ShmBridgeError as refused:  # an error of the consumer must not end the environment
            self._hold.begin(str(refused))
        else:
            if isinstance(answer, Status):
                await self._take(answer)
                await self._report_evaluation(ASK_S)
            else:
                self._hold.begin("the consumer has announced no run")
        return self._status

    # --- evaluations --------------------------------------------------------------------------------------

    def evaluation_begins(self) -> tuple[int, int]:
        """Returns the policy version and the run's step now."""
        return self._lane.policy_version, self._status.get("current_step", -1)

    def evaluated(self, metrics: Mapping[str, float], version: int, step: int) -> None:
        """Notes what an evaluation has measured; the consumer hears of it with the next status."""
        self._evaluations.add(metrics, self._lane.producer_id, version, step)
        if self.closed:
            self._evaluations.leave()

    async def _report_evaluation(self, timeout_s: float) -> None:
        """Sends the oldest evaluation that the consumer has not heard of."""
        if not self._evaluations.unsent:
            return
        try:
            await self._control.request(self._evaluations.unsent[0], timeout_s)
        except NoConsumer:
            return  # it is sent again
        except ShmBridgeError as refused:
            self._evaluations.refused(refused)
        else:
            self._evaluations.unsent.popleft()

    async def _take(self, answer: Status) -> None:
        if answer.draining or answer.paused:
            self._hold.begin(
                "the consumer drains the bridge" if answer.draining else "the consumer has paused it"
            )
        else:
            self._hold.end()
        if answer.hub_epoch != self._hub_epoch:
            with suppress(NoConsumer):
                await self._ask_run(ASK_S)
            self._hub_epoch = answer.hub_epoch
        self._status = _status(
            answer.current_step,
            # Groups that wait for room in the lane are queued as well, and must throttle as well.
            queue_size=answer.queue_groups + self._lane.unsent,
            self_queue_size=answer.self_queue_groups + self._lane.unsent,
            unallocated_fraction=answer.unallocated_fraction,
            max_group_size=answer.max_group_size,
            env_weight=answer.env_weight,
        )

    def check(self) -> None:
        """Raises GroupsRefused once the environment is of no use."""
        if self._lane.fatal is not None:
            raise self._lane.fatal

    @property
    def holding(self) -> bool:
        """Whether no new rollouts may begin: there is no consumer, or it asked for none."""
        return bool(self._hold.reason)

    # --- asking -------------------------------------------------------------------------------------------

    async def _until(self, ask: Callable[[float], Awaitable[str]]) -> None:
        """Asks until the request is granted, and logs why it is not: now, and at growing intervals.

        While there is no consumer, each request waits longer for one: it is answered the moment a consumer
        comes.
        """
        patience = _Patience(self._bridge)
        while True:
            try:
                reason = (
                    "there is no lane"
                    if await self._missing_lane()
                    else await ask(max(ASK_S, patience.pause_s))
                )
            except NoConsumer:
                reason = "no consumer answers"
            if not reason:
                self._hold.end()
                return
            self._hold.begin(reason)
            patience.say(reason)
            if reason != "no consumer answers":
                await asyncio.sleep(patience.pause_s)

    async def _ask_run(self, timeout_s: float) -> str:
        answer = await self._control.request(RunInfoRequest(), timeout_s)
        if not isinstance(answer, RunInfo) or answer.run is None:
            return "the consumer has announced no run"
        self.run = answer.run
        return ""

    async def _ask_admission(self, timeout_s: float) -> str:
        """Asks to be admitted, with its number and name, if it has them."""
        assert self._registered is not None
        admitted = await self._control.request(self._registered, timeout_s)
        if not isinstance(admitted, Registered):
            return "the consumer has announced no run"
        self._registered = msgspec.structs.replace(
            self._registered, env_id=admitted.env_id, wandb_name=admitted.wandb_name
        )
        self.env_id, self._hub_epoch, self.run = admitted.env_id, admitted.hub_epoch, admitted.run
        self._status = _status(admitted.current_step)
        return ""

    async def _missing_lane(self) -> bool:
        """Makes sure that a consumer can find the lane; returns whether there is none now.

        A new lane has a conversation of its own.
        """
        if await self._lane.stay():
            self._control.close()
            self._control = self._client()
        if not self._lane.is_there:
            self._hold.begin("the bridge was removed and there is no new lane yet")
        return not self._lane.is_there

    async def _still_admitted(self) -> bool:
        """Returns whether the consumer knows the present lane as this environment's; registers it if not."""
        wish = self._registered
        if wish is None or wish.producer_id == self._lane.producer_id:
            return True
        self._registered = msgspec.structs.replace(wish, producer_id=self._lane.producer_id)
        try:
            reason = await self._ask_admission(ASK_S)
        except ShmBridgeError:
            self._registered = wish
            raise
        if reason:
            self._registered = wish
            self._hold.begin(reason)
        return not reason

    # --- groups -------------------------------------------------------------------------------------------

    async def ticket(self) -> AbstractContextManager[object]:
        """Holds a ticket while a group is generated and sent; returns once there is room for the group."""
        return await self._lane.ticket()

    def generation_begins(self) -> None:
        """Remembers the policy version for the group that the calling task is about to generate."""
        _began_at.set(self._lane.policy_version)

    async def send(self, groups: Sequence[dict[str, Any]]) -> None:
        """Puts groups into the lane, in order; returns once each is committed or counted.

        They go there also if the awaiting worker is cancelled, which Atropos does to a worker at any moment.
        Their versions are those that the worker's inference servers named; where these named none, the one
        when it began and the one now.
        """
        now = self._lane.policy_version
        began, ledger = _began_at.get(now), heard()
        await self._lane.send(groups, [stamp(group, ledger, began, now) for group in groups])

    # --- the end ------------------------------------------------------------------------------------------

    async def close(self, flush_s: float) -> None:
        """Leaves the bridge: groups that wait for room get `flush_s`, and are then counted as dropped."""
        self.closed = True
        await self._lane.flush(flush_s)
        with suppress(ShmBridgeError):  # without a consumer there is none to notify
            while self._evaluations.unsent and self.env_id >= 0:
                await self._control.request(self._evaluations.unsent[0], min(flush_s, ASK_S))
                self._evaluations.unsent.popleft()
            await self._control.request(Goodbye(self.env_id), min(flush_s, ASK_S))
        self._evaluations.leave()
        self._control.close()
        await self._lane.close()

    def leave(self) -> None:
        """Does `close` after the event loop has ended: nothing is flushed, the consumer is not notified."""
        self.closed = True
        self._evaluations.leave()
        self._control.close()
        self._lane.leave()


class _Patience:
    """How long to wait between two requests, and when to log again that it waits."""

    def __init__(self, bridge: str) -> None:
        self._bridge = bridge
        self._began, self._say_after_s = time.monotonic(), 1.0
        self.pause_s = FIRST_PAUSE_S

    def say(self, reason: str) -> None:
        """Notes one more request without success."""
        self.pause_s = min(2 * self.pause_s, LAST_PAUSE_S)
        waited = time.monotonic() - self._began
        if waited < self._say_after_s:
            return
        while self._say_after_s <= waited:
            self._say_after_s *= 2
        log.warning(
            "bridge %s: still waiting after %.0f s: %s; asked again within %.3g s, said again after %.0f s",
            *(self._bridge, waited, reason, max(ASK_S, self.pause_s), self._say_after_s),
        )


class _Hold:
    """Whether rollouts hold and since when; logged once when it begins and once when it ends."""

    def __init__(self, bridge: str, lane: EnvLane) -> None:
        self._bridge, self._lane = bridge, lane
        self._since = 0.0
        self._records_before = 0
        self.reason = ""

    def begin(self, reason: str) -> None:
        if reason == self.reason:
            return
        if not self.reason:
            self._since = time.monotonic()
            self._records_before = self._lane.records_total
        self.reason = reason
        stats = self._lane.stats()
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
            self._lane.records_total - self._records_before,
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
