"""Plays many groups at once and puts them into a lane, whatever plays their episodes: `Runner`.

`Rollout` samples them itself; `shmbridge.producers.verifiers` has verifiers play them.
"""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from types import TracebackType
from typing import Any, Generic, Literal, Self, TypedDict, TypeVar

from shmbridge import Producer, ShmBridgeError
from shmbridge.errors import BridgeDraining
from shmbridge.producers.rollout.episode import known_versions
from shmbridge.producers.rollout.position import Position
from shmbridge.producers.rollout.sampling import Message
from shmbridge.producers.rollout.survivors import (
    Late,
    Limits,
    Losses,
    Played,
    TooOld,
    is_cancelled,
    survivors,
)

log = logging.getLogger(__name__)

T = TypeVar("T")
E = TypeVar("E", bound=Played)
Group = Mapping[str, Any]
Stage = Callable[[Group], Awaitable[Group]]

_LOOK_S = 0.25  # between two looks at the policy version and at the time
DEFAULT_LIMITS = Limits()


class NothingCame(ShmBridgeError, TimeoutError):
    """No group was finished for as long as the run was to wait."""

    code = "SB520"


@dataclass(frozen=True)
class Task(Generic[T]):
    """One prompt to be answered a group's number of times.

    Attributes:
        messages: the beginning of each episode.
        data: whatever the episode's code needs, such as the right answer.
        instance_id: name of the prompt; None: its number in the run.
    """

    messages: Sequence[Message]
    data: T
    instance_id: str | None = None


class RunOptions(TypedDict, total=False):
    """What every `Runner` may be told; see there."""

    env_name: str
    group_size: int
    concurrency: int
    limits: Limits
    stop_after_failures: int
    stop_after_idle_s: float | None
    max_staleness: int | None
    resume: str | Path | None
    tickets: bool
    stages: Sequence[Stage]
    lane_bytes: int | str
    on_full: Literal["block", "raise", "drop"]


class Runner(ABC, Generic[E]):
    """Plays the tasks of one environment and puts their groups into one lane.

    For one event loop; an async context manager, which closes the lane. Only the constructor blocks, to
    reserve the lane's memory. A subclass says how an episode begins, and which columns episodes have.

    Args:
        bridge: name of the bridge.
        env_name: the environment's name in metrics.
        group_size: episodes of one task.
        concurrency: groups in the making at once.
        limits: deadlines, and what happens to a group that lost some of its episodes.
        stop_after_failures: so many failures of whole groups in a row, those that share a moment counted
            once, end the run with TooManyFailures; 0: never.
        stop_after_idle_s: seconds without a finished group, waits for the consumer left out, after which the
            run ends with NothingCame; None: never.
        max_staleness: a group in the making that is more versions behind than this is cancelled when a
            version is published, and its ticket comes back; None: none is.
        resume: file that keeps which tasks are over, for one `run`: a restarted run over the same tasks, in
            the same order, goes on behind them. None: no file.
        tickets: begin a group only once the consumer has room for it: see Consumer(max_off_policy_steps=).
        stages: change a group before it is put, one after the other, such as those of `producers.rewards`.
        lane_bytes, on_full, schema: of `shmbridge.Producer`.
    """

    def __init__(
        self,
        bridge: str,
        *,
        env_name: str = "",
        group_size: int = 8,
        concurrency: int = 8,
        limits: Limits = DEFAULT_LIMITS,
        stop_after_failures: int = 8,
        stop_after_idle_s: float | None = None,
        max_staleness: int | None = None,
        resume: str | Path | None = None,
        tickets: bool = False,
        stages: Sequence[Stage] = (),
        lane_bytes: int | str = "64M",
        on_full: Literal["block", "raise", "drop"] = "block",
        schema: Any = None,
    ) -> None:
        if group_size < 1 or concurrency < 1:
            raise ValueError(f"group_size={group_size} and concurrency={concurrency} must be at least 1")
        self._group_size, self._concurrency = group_size, concurrency
        self._limits, self._tickets, self._max_staleness = limits, tickets, max_staleness
        self._idle_s, self._last_group = stop_after_idle_s, 0.0
        self._stages = tuple(stages)
        self._playing: dict[asyncio.Future[Exception], tuple[int, list[E]]] = {}  # with its version
        self._newest = -1  # version that was looked at
        self._putting = asyncio.Lock()
        self._position = Position(resume)
        try:
            self.producer = Producer(
                bridge, env_name=env_name, lane_bytes=lane_bytes, on_full=on_full, schema=schema
            )
        except BaseException:
            self._position.close()
            raise
        self._position.begin(self.producer)
        self.losses = Losses(stop_after_failures, self.producer.count_lost)
        self.groups_put = self.groups_evaluated = 0  # and committed
        log.info("%s: %s", env_name or bridge, limits)
        if self._position.tasks_over:
            log.info("goes on behind %d tasks that are over: %s", self._position.tasks_over, resume)

    @abstractmethod
    def begin(self, task: Task[Any], instance_id: str, repetition_id: int) -> E:
        """Returns one episode of a task, before its first answer."""

    @abstractmethod
    def columns(self, episodes: Sequence[E]) -> Group:
        """Returns the columns of a group, as `Producer.put` takes them."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Leaves the bridge, with what is committed in the lane."""
        self.producer.close()
        self._position.settle(int(self.producer.stats()["records_total"]))
        self._position.close()

    async def run(
        self,
        tasks: Iterable[Task[T]] | AsyncIterable[Task[T]],
        play: Callable[[E, T], Awaitable[None]],
        max_groups: int | None = None,
    ) -> int:
        """Plays each task `group_size` times and puts its group; returns how many groups were put.

        Ends with the tasks, or when the bridge drains. An episode that fails costs its row, is counted in
        `losses` and logged; the others are put as a smaller group.

        Args:
            tasks: may be endless: the next is taken when a group is finished.
            play: samples, observes and rewards one episode, and sets `episode.score`.
            max_groups: tasks to play at most, those before a restart included.

        Raises:
            TooManyFailures: see `stop_after_failures`. NothingCame: see `stop_after_idle_s`.
        """
        # In a task of its own: Ctrl-C cancels the program's task from a signal handler, between any two lines
        # of asyncio, also between a look at a future and its result (InvalidStateError).
        running = asyncio.create_task(self._run(tasks, play, max_groups))
        try:
            return await asyncio.shield(running)
        except asyncio.CancelledError:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            raise

    async def _run(
        self,
        tasks: Iterable[Task[T]] | AsyncIterable[Task[T]],
        play: Callable[[E, T], Awaitable[None]],
        max_groups: int | None,
    ) -> int:
        before, more = self.groups_put, True
        self._last_group = asyncio.get_running_loop().time()
        making: set[asyncio.Task[None]] = set()
        upcoming: asyncio.Task[tuple[int, Task[T]] | None] | None = None
        source = _numbered(tasks, max_groups, self._position)
        try:
            while more or making:
                if more and upcoming is None and len(making) < self._concurrency:
                    upcoming = asyncio.create_task(_next(source))
                waits: set[asyncio.Task[Any]] = {*making, *(() if upcoming is None else (upcoming,))}
                await asyncio.wait(waits, timeout=_LOOK_S, return_when=asyncio.FIRST_COMPLETED)
                if upcoming is not None and upcoming.done():
                    numbered, upcoming = upcoming.result(), None
                    if numbered is None:
                        more = False
                    else:
                        making.add(asyncio.create_task(self._make(*numbered, play)))
                for each in [each for each in making if each.done()]:
                    making.remove(each)
                    each.result()
                self._look()
        except BridgeDraining:
            log.info("the bridge drains: %d groups were put", self.groups_put - before)
        finally:
            left: set[asyncio.Task[Any]] = {*making, *(() if upcoming is None else (upcoming,))}
            for task in left:
                task.cancel()
            await asyncio.gather(*left, return_exceptions=True)
        return self.groups_put - before

    def _look(self) -> None:
        """Ends groups that are too old, after a new version. Raises NothingCame."""
        version = self.producer.policy_version
        if self._max_staleness is not None and version > self._newest:
            self._newest = version
            for outdated, (began, begun) in self._playing.items():
                behind = version - _oldest(begun, began)
                if behind > self._max_staleness and not outdated.done():
                    why = f"a group is {behind} versions behind, more than {self._max_staleness}"
                    outdated.set_result(TooOld(why))
        now = asyncio.get_running_loop().time()
        if self._putting.locked() or (self._tickets and not self._playing):  # the consumer's turn
            self._last_group = now
        elif self._idle_s is not None and now - self._last_group > self._idle_s:
            raise NothingCame(
                f"no group was finished for {now - self._last_group:.0f} s; {len(self._playing)} are played",
                hint="see what was lost in the log, and the inference server's log",
            )

    @property
    def failed(self) -> Counter[str]:
        """Groups that were not put, by the kind of their error."""
        return self.losses.groups

    def stats(self) -> dict[str, float]:
        """Returns counters, flat: groups put, episodes and groups lost by reason. Never blocks."""
        return {"groups_put_total": float(self.groups_put), **self.losses.stats()}

    def summary(self) -> str:
        """Returns a line on what was put and what was lost, and why."""
        return f"{self.groups_put} groups were put; lost: {self.losses}"

    async def group(
        self, task: Task[T], play: Callable[[E, T], Awaitable[None]], number: int | None = 0
    ) -> list[E]:
        """Returns the episodes of one task that came to a good end, all played at once; nothing is put.

        Args:
            number: its place among the tasks; None: an evaluation, which is never too old.

        Raises EpisodesLost: see `limits`.
        """
        instance = str(number) if task.instance_id is None else task.instance_id
        begun: list[E] = []

        def begin(repetition: int) -> E:
            begun.append(self.begin(task, instance, repetition))
            return begun[-1]

        outdated: asyncio.Future[Exception] = asyncio.get_running_loop().create_future()
        if number is not None:
            self._playing[outdated] = self.producer.policy_version, begun
        try:
            return await survivors(
                begin,
                lambda episode: play(episode, task.data),
                self._group_size,
                self._limits,
                self.losses,
                outdated,
            )
        finally:
            self._playing.pop(outdated, None)
            self.losses.asked_again += sum(episode.asked_again for episode in begun)

    async def evaluate(self, tasks: Iterable[Task[T]], play: Callable[[E, T], Awaitable[None]]) -> int:
        """Plays each task once, a group at a time beside what else is played, and puts its group with
        `split="eval"`, which no learner trains; returns how many groups were put.

        It takes no tickets, has no position, and is never too old.

        Raises TooManyFailures, as `run` does.
        """
        before = self.groups_evaluated
        for number, task in enumerate(tasks):
            began = asyncio.get_running_loop().time()
            try:
                await self._make_now(None, replace(task, instance_id=task.instance_id or str(number)), play)
            except BridgeDraining:
                break
            except Exception as error:
                self.losses.group(error, began)
        return self.groups_evaluated - before

    async def _make(self, number: int, task: Task[T], play: Callable[[E, T], Awaitable[None]]) -> None:
        """One group, from its ticket to its lane."""
        began = asyncio.get_running_loop().time()
        try:
            with await self.producer.begin_group_async() if self._tickets else nullcontext():
                began = asyncio.get_running_loop().time()
                await self._make_now(number, task, play)
        except BridgeDraining:
            raise
        except Exception as error:
            self.losses.group(error, began)

    async def _make_now(
        self, number: int | None, task: Task[T], play: Callable[[E, T], Awaitable[None]]
    ) -> None:
        """One group, and its place among the tasks; None: an evaluation, which has none."""
        began, episodes = self.producer.policy_version, list[E]()
        try:
            episodes = await self.group(task, play, number)
            versions = known_versions(episodes, began, self.producer.policy_version)
            group = await self._staged(episodes)
            async with self._putting:
                if number is not None:
                    self._position.committing(number, int(self.producer.stats()["records_total"]))
                sequence = await self.producer.put_async(
                    group, policy_version=versions, split="eval" if number is None else "train"
                )
                if number is not None:
                    self._position.over(number)
        except BridgeDraining:
            raise
        except Exception as error:
            self.losses.episode(error, len(episodes))
            if number is not None:
                self._position.over(number)
            raise
        self._last_group = asyncio.get_running_loop().time()
        self.losses.put()
        if number is None:
            self.groups_evaluated += sequence is not None
        else:
            self.groups_put += sequence is not None

    async def _staged(self, episodes: Sequence[E]) -> Group:
        group, deadline = self.columns(episodes), asyncio.timeout(self._limits.group_s)
        try:
            async with deadline:
                for stage in self._stages:
                    group = await stage(group)
        except asyncio.CancelledError as error:
            if is_cancelled():
                raise
            raise RuntimeError(f"a stage ended with {error!r}") from error
        except TimeoutError:
            if not deadline.expired():  # the stage's own
                raise
            raise Late(f"the stages of a group did not end within {self._limits.group_s:g} s") from None
        return group


def _oldest(begun: Sequence[Played], began: int) -> int:
    """The oldest version that samples one of the episodes, as far as it is known; else that of the start."""
    first = (next(iter(each.sampled_versions()), -1) for each in begun)
    return min((began if version < 0 else version for version in first), default=began)


async def _next(source: AsyncIterator[T]) -> T | None:
    return await anext(source, None)


async def _numbered(
    tasks: Iterable[T] | AsyncIterable[T], most: int | None, over: Position
) -> AsyncIterator[tuple[int, T]]:
    """The first `most` of the tasks, with their numbers, without those that are over."""
    number = 0
    if isinstance(tasks, AsyncIterable):
        async for task in tasks:
            if number == most:
                return
            if number not in over:
                yield number, task
            number += 1
    else:
        for task in islice(tasks, most):
            if number not in over:
                yield number, task
            number += 1
