"""One environment's lane for groups, replaced by a new one if the bridge is removed. Used by
`shmbridge.producers.atropos.control_link`, in the environment's event loop.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

from shmbridge import Producer, ShmBridgeError
from shmbridge.errors import BridgeDraining, Closed, LaneFull, LaneQuarantined, LaneRemoved
from shmbridge.producers.atropos.versions import Stamp
from shmbridge.producers.rewards import RewardBridge, RewardConfig, Stage, read_config

WIRE = frozenset(
    {
        "tokens",
        "masks",
        "scores",
        "advantages",
        "ref_logprobs",
        "inference_logprobs",
        "messages",
        "generation_params",
        "overrides",
        "group_overrides",
        "images",
        "env_id",
        "distill_token_ids",
        "distill_logprobs",
    }
)

# A group's key, of an environment of ours: the names of its other keys that are our columns, as they are.
OWN_COLUMNS = "shmbridge_columns"

_LARGEST = 3.4e38  # of float32, about

Rewards: TypeAlias = RewardConfig | Stage
log = logging.getLogger(__name__)
OnFull: TypeAlias = Literal["block", "raise", "drop"]
LONGEST_PAUSE_S = 30.0
_LOOP_ENDED = "with the event loop ended"
# Not the group's fault: the next one may be taken.
_PASSING = (LaneFull, BridgeDraining, Closed, LaneQuarantined, LaneRemoved)


@dataclass(frozen=True)
class Carried:
    """A group for `Producer.put(foreign=True)`, and the parts that could not be carried though it is
    delivered.
    """

    group: dict[str, Any]
    left_out: tuple[str, ...] = ()


def carried(
    group: Mapping[str, Any],
    step_rewards: bool = False,
    token_versions: Any = None,
    columns: Mapping[str, Any] | None = None,
) -> Carried:
    """Sorts the keys of a group; never raises, never changes it.

    Upstream drops every key but its fourteen. Here they go into `extra` under their own names, also where a
    column of ours is called the same: an environment may give `temperature` or `rewards` another meaning. A
    key that has no JSON is left out, as upstream would. With `step_rewards`, the columns step_rewards and
    step_ends are filled where the group has them. `token_versions`, in a form that a lane takes, is a column;
    if the group itself has them, they are in `extra`, too, and come back with its other keys. `columns` are
    those that rewards made; step rewards among them replace the group's own. What `OWN_COLUMNS` of the group
    names is a column, and in `extra`, too.
    """
    if OWN_COLUMNS in group:
        own = {name: group[name] for name in group[OWN_COLUMNS] if name in group}
        columns = {**own, **(columns or {})}
        group = {key: value for key, value in group.items() if key != OWN_COLUMNS}
    made = {**(columns or {}), **({} if token_versions is None else {"token_versions": token_versions})}
    step_rewards = step_rewards and "step_rewards" not in made
    if WIRE.issuperset(group) and not step_rewards:
        return Carried({**group, **made})
    wire = {key: value for key, value in group.items() if key in WIRE}
    steps = _steps(group) if step_rewards else {}
    others = {key: value for key, value in group.items() if key not in WIRE and key not in steps}
    extra = {key: value for key, value in others.items() if isinstance(key, str) and _has_json(value)}
    left_out = [str(key) for key in others if key not in extra and key not in made]
    if step_rewards and "step_ends" not in steps and ("step_rewards" in steps or _speaks_of_steps(group)):
        left_out.append("step_ends" if "step_rewards" in steps else "step_rewards")
    return Carried({**wire, **steps, **made, **({"extra": extra} if extra else {})}, tuple(left_out))


def _has_json(value: Any) -> bool:
    """Whether upstream's client could write it, and a strict reader read it."""
    if isinstance(value, Mapping):
        return all(key is None or isinstance(key, (str, int)) for key in value) and all(
            map(_has_json, (*value, *value.values()))
        )
    if isinstance(value, (list, tuple)):
        return all(map(_has_json, value))
    if isinstance(value, str):
        return value.isascii() or value.encode(errors="replace").decode() == value
    return value is None or isinstance(value, int) or (isinstance(value, float) and math.isfinite(value))


# --- rewards of steps -------------------------------------------------------------------------------------


def _steps(group: Mapping[str, Any]) -> dict[str, Any]:
    """The columns of step rewards that can be made of a group, each valid by itself; none if there are none,
    or they are no numbers.
    """
    tokens = group.get("tokens")
    rows = len(tokens) if isinstance(tokens, (list, tuple)) else -1
    if "step_rewards" in group:
        rewards, ends = group["step_rewards"], group.get("step_ends")
    else:
        rewards = _rewards_of_messages(group.get("messages"))
        ends = _ends_of_turns(group.get("masks"), rewards)
    if rewards is None or not _is_table(rewards, rows, float) or not any(rewards):
        return {}
    fits = (
        ends is not None
        and _is_table(ends, rows, int)
        and [len(row) for row in ends] == [len(row) for row in rewards]
    )
    return {"step_rewards": rewards, "step_ends": ends} if fits else {"step_rewards": rewards}


def _speaks_of_steps(group: Mapping[str, Any]) -> bool:
    rewards = _rewards_of_messages(group.get("messages"))
    return bool(group.get("step_rewards")) or (rewards is not None and any(rewards))


def _rewards_of_messages(messages: Any) -> list[list[Any]] | None:
    """`reward` of every message that has one, in order; a list per row, or None."""
    if not isinstance(messages, (list, tuple)) or not all(isinstance(row, (list, tuple)) for row in messages):
        return None
    return [
        [m["reward"] for m in row if isinstance(m, Mapping) and m.get("reward") is not None]
        for row in messages
    ]


def _ends_of_turns(masks: Any, rewards: list[list[Any]] | None) -> list[list[int]] | None:
    """The index after each trained span of a row, where there are as many spans as rewards: then the n-th
    reward is that of the n-th.
    """
    if rewards is None or not _is_table(masks, len(rewards), object):
        return None
    ends = [
        [
            at + 1
            for at, mask in enumerate(row)
            if mask != -100 and (at + 1 == len(row) or row[at + 1] == -100)
        ]
        for row in masks
    ]
    return [row if turns else [] for row, turns in zip(ends, rewards, strict=True)]


def _is_table(value: Any, rows: int, kind: type) -> bool:
    """A list per row: of anything, of indices of tokens, or of numbers that float32 holds."""
    if (
        not isinstance(value, (list, tuple))
        or len(value) != rows
        or not all(isinstance(row, (list, tuple)) for row in value)
    ):
        return False
    if kind is object:
        return True
    numbers = [each for row in value for each in row]
    if any(isinstance(each, bool) or not isinstance(each, (int, kind)) for each in numbers):
        return False
    return (
        all(0 <= each < 1 << 31 for each in numbers)
        if kind is int
        else all(abs(each) <= _LARGEST for each in numbers)
    )


def checked_rewards(given: Rewards | Mapping[str, Any] | str | Path | None) -> Rewards | None:
    """Returns what `attach(rewards=)` was given, a file read. Raises BadConfig."""
    return given if given is None or callable(given) else read_config(given)


def stage_for(rewards: Rewards | None, tokenizer: Any) -> Stage | None:
    """Returns the stage of one environment; None if nothing is to be done."""
    if isinstance(rewards, RewardConfig):
        return None if rewards.is_off else RewardBridge(rewards, tokenizer=tokenizer)
    return rewards


async def rewarded(stage: Stage, group: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns a new group with the upstream fields that the stage made, and the columns it added.

    The stage sees upstream's fields alone: what an environment means by other keys is its own affair.
    """
    made = await stage({name: value for name, value in group.items() if name in WIRE})
    fields = {name: value for name, value in made.items() if name in WIRE}
    return {**group, **fields}, {name: value for name, value in made.items() if name not in WIRE}


@dataclass(frozen=True)
class LinkOptions:
    """The user's options; the first three are arguments of `shmbridge.Producer`."""

    bridge: str
    lane_bytes: int | str = "64M"
    on_full: OnFull = "block"
    step_rewards: bool = False
    stop_after_refusals: int = 20  # 0: never
    tickets: bool = False
    rewards: Rewards | None = None


class GroupsRefused(ShmBridgeError):
    """Too many consecutive groups were refused for the same reason."""

    code = "SB412"


class EnvLane:
    """One environment's way into the bridge.

    Opening it reserves memory, which takes milliseconds for each MiB at worst.
    """

    def __init__(self, options: LinkOptions, env_name: str, tokenizer: Any = None) -> None:
        self._options, self._env_name = options, env_name
        self._stage = stage_for(options.rewards, tokenizer)
        self._scoring: set[asyncio.Future[Any]] = set()
        self._producer = self._open()
        self.is_there = True
        self._returned = asyncio.Condition()
        self._closing = False
        self._committed = self._lost = 0
        self._retry_s, self._retry_at = 0.5, 0.0
        self._sending: set[asyncio.Task[None]] = set()
        self._last_refusal, self._in_a_row = "", 0
        self.unsent = 0
        self.not_delivered: Counter[str] = Counter()
        self.left_out: Counter[str] = Counter()
        self.unclear: Counter[str] = Counter()
        self._stamped = self._unstamped = 0
        self.fatal: GroupsRefused | None = None

    def _open(self) -> Producer:
        options = self._options
        return Producer(
            options.bridge, env_name=self._env_name, lane_bytes=options.lane_bytes, on_full=options.on_full
        )

    @property
    def producer_id(self) -> str:
        """The producer id of the lane that groups go into now."""
        return self._producer.producer_id

    @property
    def policy_version(self) -> int:
        """The newest the learner has published."""
        return self._producer.policy_version

    def stats(self) -> dict[str, float]:
        """The counters of the present lane."""
        return self._producer.stats()

    @property
    def records_total(self) -> int:
        """Groups committed, into this lane and earlier ones; without groups lost with those."""
        return self._committed - self._lost

    async def ticket(self) -> AbstractContextManager[object]:
        """Holds a ticket for a worker, once the consumer has room for its group; does nothing without
        `tickets`.

        Without a lane, or when the bridge drains, a worker goes on without one: the consumer discards groups
        that are too old.
        """
        while self._options.tickets and self.is_there:
            producer = self._producer
            try:
                return await producer.begin_group_async()
            except ShmBridgeError as refused:
                if producer is self._producer:
                    log.warning("environment %s begins without a ticket: %s", self._env_name, refused)
                    break
        return nullcontext()

    # --- groups -------------------------------------------------------------------------------------------

    async def send(self, groups: Sequence[dict[str, Any]], stamps: Sequence[Stamp]) -> None:
        """Puts groups into the lane, in order; returns once each is committed or counted, and goes on if the
        awaiting task is cancelled.
        """
        self.unsent += len(groups)
        task = asyncio.create_task(self._put_all(groups, stamps))
        self._sending.add(task)
        task.add_done_callback(self._sending.discard)
        await asyncio.shield(task)

    async def _put_all(self, groups: Sequence[dict[str, Any]], stamps: Sequence[Stamp]) -> None:
        left = len(groups)
        try:
            for group, stamp in zip(groups, stamps, strict=True):
                await self._put_or_count(group, stamp)
                left -= 1
                self.unsent -= 1
        finally:
            if left:  # the event loop ends, and all its tasks with it
                self.unsent -= left
                self.not_delivered[_LOOP_ENDED] += left

    async def _put_or_count(self, group: dict[str, Any], stamp: Stamp) -> None:
        try:
            await self._put(group, stamp)
        except ShmBridgeError as refused:
            kind = f"{type(refused).__name__} {getattr(refused, 'column', '')}"
            self._refuse(kind, str(refused), passing=isinstance(refused, _PASSING))
        except Exception as fault:  # logged here, since the worker may be gone already
            self._refuse(type(fault).__name__, repr(fault))

    async def _put(self, group: dict[str, Any], stamp: Stamp) -> None:
        group, columns = await self._rewarded(group)
        took = carried(group, self._options.step_rewards, stamp.column, columns)
        versions = stamp.oldest, stamp.newest
        while True:
            if not self.is_there:
                async with self._returned:
                    await self._returned.wait_for(lambda: self.is_there or self._closing)
            producer = self._producer
            try:
                sequence = await producer.put_async(took.group, policy_version=versions, foreign=True)
            except (LaneQuarantined, LaneRemoved) as gone:
                if self._closing:
                    raise
                why = (
                    "the bridge was removed"
                    if isinstance(gone, LaneRemoved)
                    else f"the consumer reads it no more: {gone.message}"
                )
                # else another waiting group was faster: this one follows it into its lane
                if producer is self._producer and self.is_there:
                    self._replace(why)
            except Closed:
                if self._closing or (producer is self._producer and self.is_there):
                    raise
            else:
                break
        if sequence is None:
            self._refuse("dropped: the lane is full", passing=True)
            return
        self._committed += 1
        self._last_refusal, self._in_a_row = "", 0
        self._count_stamp(stamp)
        for name in took.left_out:
            self._count(
                name, f"groups are delivered without {name!r}, which cannot be carried", self.left_out
            )

    async def _rewarded(self, group: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """The group as the rewards make it, and the columns they add; raises Closed if this ends first."""
        if self._stage is None:
            return group, {}
        scoring = asyncio.ensure_future(rewarded(self._stage, group))
        self._scoring.add(scoring)
        try:
            return await scoring
        except asyncio.CancelledError:
            if self._closing:
                raise Closed(f"environment {self._env_name} ended before its group had its rewards") from None
            raise
        finally:
            self._scoring.discard(scoring)

    def _count_stamp(self, stamp: Stamp) -> None:
        if stamp.column is None:
            self._unstamped += 1
        else:
            self._stamped += 1
        for kind, count in stamp.unclear.items():
            self._count(
                kind,
                f"some tokens go without their version, further cases are only counted: {kind}",
                self.unclear,
            )
            self.unclear[kind] += count - 1

    def _refuse(self, kind: str, details: str = "", *, passing: bool = False) -> None:
        """Counts a group that is not in the lane; many in a row for the same reason end the environment."""
        self._count(
            kind,
            f"a group is not delivered, further ones like it are only counted: {details or kind}",
            self.not_delivered,
        )
        if passing:
            return
        self._in_a_row = self._in_a_row + 1 if kind == self._last_refusal else 1
        self._last_refusal = kind
        if self._in_a_row == self._options.stop_after_refusals:
            self.fatal = GroupsRefused(
                f"environment {self._env_name}: {self._in_a_row} groups in a row were refused for one "
                f"reason, the last: {details or kind}",
                hint="fix the environment; --stop-after-refusals 0 lets it run on",
            )
            log.error("%s", self.fatal)

    def _count(self, kind: str, said: str, where: Counter[str]) -> None:
        where[kind] += 1
        if where[kind] == 1:
            log.error("%s", said)

    # --- a bridge that was removed ------------------------------------------------------------------------

    async def stay(self) -> bool:
        """Opens another lane if the present one, or its bridge, was removed; returns whether it did. Reserves
        memory then, otherwise makes two stat calls.
        """
        if self.is_there and not self._producer.removed:
            return False
        if self.is_there or time.monotonic() >= self._retry_at:
            self._replace("the bridge was removed")
        if not self.is_there:
            return False
        async with self._returned:
            self._returned.notify_all()
        return True

    def _replace(self, reason: str) -> None:
        if self.is_there:
            self._leave_behind(reason)
        try:
            self._producer = self._open()
        except (ShmBridgeError, OSError) as cannot:
            self._retry_at = time.monotonic() + self._retry_s
            log.error(
                "no new lane on bridge %s, again in %.3g s: %s", self._options.bridge, self._retry_s, cannot
            )
            self._retry_s = min(2 * self._retry_s, LONGEST_PAUSE_S)
            return
        self.is_there, self._retry_s = True, 0.5
        log.warning(
            "environment %s goes on in a new lane of bridge %s, as %s",
            self._env_name,
            self._options.bridge,
            self.producer_id,
        )

    def _leave_behind(self, reason: str) -> None:
        """Counts the records of the old lane; groups that wait for room in it go to the new one."""
        old, before = self._producer, self._producer.stats()
        self.is_there = False
        with suppress(ShmBridgeError, OSError):
            old.close()
        # close() may have found room for some
        held = before["held"] + old.stats()["records_total"] - before["records_total"]
        # the words of an overwritten lane may have any value
        lost = max(0, min(int(held), self._committed - self._lost + self.unsent))
        self._lost += lost
        self.not_delivered["in a lane that was removed"] += lost
        log.error(
            "lane %s is lost, %s; it held %d groups that no consumer had released: counted",
            old.producer_id,
            reason,
            lost,
        )

    # --- the end ------------------------------------------------------------------------------------------

    async def flush(self, flush_s: float) -> None:
        """Waits until the groups handed over are in the lane, at most `flush_s`."""
        if self._sending:
            await asyncio.wait(self._sending, timeout=flush_s)

    async def close(self) -> None:
        """Leaves the bridge: groups that still wait for room are counted as dropped."""
        self._closing = True
        for scoring in self._scoring:
            scoring.cancel()
        self._producer.close()
        async with self._returned:
            self._returned.notify_all()
        if self._sending:
            await asyncio.wait(self._sending)  # each waiting group finds the lane closed
        self._report()

    def leave(self) -> None:
        """`close` for an event loop that runs no more: groups not yet put there are not delivered."""
        self._closing = True
        self._producer.close()
        if self.unsent:
            self.not_delivered[_LOOP_ENDED] += self.unsent
        self._report()

    def _report(self) -> None:
        lost = ", ".join(f"{count} {kind}" for kind, count in self.not_delivered.items() if count)
        without = "".join(f"; without {name!r}: {count}" for name, count in self.left_out.items())
        if self._stamped:
            without += f"; with versions of tokens: {self._stamped}, without: {self._unstamped}"
        without += "".join(f"; {kind}: {count}" for kind, count in self.unclear.items())
        log.info(
            "environment %s ends: %d groups delivered, not delivered: %s%s",
            self._env_name,
            self.records_total,
            lost or "none",
            without,
        )
