"""The episodes of one task, played at once, and what becomes of those that fail, hang or come too late.

`survivors` gives every episode and the group a deadline; an episode that fails costs its row, not its
siblings. `Losses` counts what was lost, and why. Used by `runner.py` and by `skyrl_gym/adapter.py`; no
lane and no server is needed.
"""

from __future__ import annotations

import asyncio
import logging
import math
import threading
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, Protocol, TypeVar

from shmbridge import ShmBridgeError
from shmbridge.config import check_choice
from shmbridge.errors import BadArgument
from shmbridge.producer import LostReason

T = TypeVar("T")

log = logging.getLogger(__name__)
Incomplete = Literal["put", "drop"]
_CANCEL_S = 2.0  # given to what is cancelled; code that ignores it is left behind


class CallThreads:
    """Runs calls in threads, a limited number at once. Any thread may use it.

    A call that was given up leaves its place to another one. Python cannot end its thread, which stays until
    the call returns.

    Args:
        most: calls that run at once, those that were given up not counted.
        name: of the threads.
    """

    def __init__(self, most: int, name: str) -> None:
        self._places, self._name = most, name
        self._lock = threading.Lock()
        self._waiting: deque[tuple[Future[Any], Callable[[], Any]]] = deque()
        self._running: dict[Future[Any], int] = {}  # those that take a place, with their threads

    def submit(self, call: Callable[..., T], *arguments: Any) -> Future[T]:
        """Returns the result that a call will have. Never blocks."""
        future: Future[T] = Future()
        with self._lock:
            self._waiting.append((future, partial(call, *arguments)))
        self._start()
        return future

    def give_up(self, future: Future[Any]) -> int | None:
        """Cancels a call that waits for a thread; one that runs does not count any more. Never blocks.

        Returns the identifier of the thread that it runs in; None if it does not run.
        """
        future.cancel()
        with self._lock:
            thread = self._running.pop(future, None)
        self._start()
        return thread

    def cancel_waiting(self) -> None:
        """Cancels the calls that wait for a thread. Never blocks."""
        with self._lock:
            waiting, self._waiting = self._waiting, deque()
        for future, _ in waiting:
            future.cancel()

    def _start(self) -> None:
        if (found := self._next()) is not None:
            threading.Thread(target=self._work, args=found, name=self._name).start()

    def _next(self) -> tuple[Future[Any], Callable[[], Any]] | None:
        """The next call, which has a place now; None if there is none, or no place."""
        with self._lock:
            while self._waiting and len(self._running) < self._places:
                future, call = self._waiting.popleft()
                if future.set_running_or_notify_cancel():
                    self._running[future] = 0
                    return future, call
        return None

    def _work(self, future: Future[Any], call: Callable[[], Any]) -> None:
        while True:
            with self._lock:
                if future in self._running:
                    self._running[future] = threading.get_ident()
            try:
                result = call()
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(result)
            with self._lock:
                self._running.pop(future, None)
            del call
            if (found := self._next()) is None:
                return
            future, call = found


class Played(Protocol):
    """What is played: an episode of our own sampling, or of a framework that samples by itself."""

    instance_id: str
    repetition_id: int

    @property
    def asked_again(self) -> int:
        """Answers that were aborted before their first token, and asked for again."""

    def sampled_versions(self) -> Sequence[int]:
        """Returns the policy version of each token sampled so far, -1 where it is not known."""

    def require_finished(self) -> None:
        """Raises if no row can be made of it."""


E = TypeVar("E", bound=Played)


class TooManyFailures(ShmBridgeError):
    """Groups failed, again and again, and none could be put between; the last failure is the cause."""

    code = "SB511"


class EpisodesLost(ShmBridgeError):
    """No episode of a group is left, or too few of them: the group is not put."""

    code = "SB519"


@dataclass(frozen=True)
class Limits:
    """How long episodes may take, and what happens to a group that lost some of them.

    Args:
        episode_s: seconds for one episode; None: no limit.
        group_s: seconds for all episodes of a task, those played in place of others included; None: no limit.
        refill: episodes that may be played in place of lost ones, in each group.
        incomplete: "put" puts the episodes that are left, "drop" none of a group that is not complete.
    """

    episode_s: float | None = 1800.0
    group_s: float | None = 3600.0
    refill: int = 0
    incomplete: Incomplete = "put"

    def __post_init__(self) -> None:
        for name in ("episode_s", "group_s"):
            seconds = getattr(self, name)
            if seconds is not None and not 0 < seconds < math.inf:
                raise BadArgument(
                    f"{name}={seconds} is not a time", hint="seconds above 0, or None: no limit"
                )
        check_choice("incomplete", self.incomplete, ("put", "drop"))
        if self.refill < 0:
            raise BadArgument(f"refill={self.refill} is below 0", hint="0: no episode is played again")

    def __str__(self) -> str:
        words = ("no deadline" if each is None else f"{each:g} s" for each in (self.episode_s, self.group_s))
        episode, group = words
        refill = f", {self.refill} played in place of lost ones" if self.refill else ""
        rest = "puts those that are left" if self.incomplete == "put" else "is left out"
        return f"an episode has {episode}, a group {group}{refill}; a group with lost episodes {rest}"


class Late(TimeoutError):
    """An episode or a group did not end within its deadline."""


class TooOld(RuntimeError):
    """Newer weights make a group in the making of no use."""


_REASONS: dict[type[Exception], LostReason] = {Late: "late", TooOld: "too_old"}


def _kind(error: Exception) -> str:
    named: str | None = getattr(error, "kind", None)  # a framework's own name of what it caught
    return _REASONS.get(type(error)) or named or type(error).__name__


class Losses:
    """Counts what was lost, and ends a run in which nothing else happens. For one event loop.

    Args:
        stop_after: so many failures of whole groups, one after the other, raise TooManyFailures; 0: never.
        count: is told each loss: a reason of `Producer.count_lost`, and how many episodes.

    Attributes:
        episodes: lost episodes, by the kind of their error, "late" or "too_old".
        groups: groups that were not put, by the same.
        refilled: episodes played in place of lost ones.
        asked_again: answers that a server aborted before their first token, and that were asked for again.
    """

    def __init__(self, stop_after: int = 0, count: Callable[[LostReason, int], None] | None = None) -> None:
        self.episodes: Counter[str] = Counter()
        self.groups: Counter[str] = Counter()
        self.refilled = self.asked_again = 0
        self._stop_after, self._count = stop_after, count
        self._in_a_row, self._at = 0, -math.inf

    def episode(self, error: Exception, episodes: int = 1) -> None:
        """Counts lost episodes; the first error of each kind is logged."""
        if not episodes:
            return
        kind = _kind(error)
        if kind not in self.episodes:
            trace = None if isinstance(error, (ShmBridgeError, Late, TooOld)) else error
            log.error(
                "an episode was lost, further ones like it are only counted: %s",
                error or kind,
                exc_info=trace,
            )
        self.episodes[kind] += episodes
        if self._count is not None:
            self._count(_REASONS.get(type(error), "failed"), episodes)

    def group(self, error: Exception, began: float) -> None:
        """Counts a group that is not put. Raises TooManyFailures.

        Args:
            error: why.
            began: when it began, in the time of the event loop. Groups that were in the making at a failure
                share its moment, as when a server ends, and count once.
        """
        cause = error.__cause__ if isinstance(error.__cause__, Exception) else error
        kind = _kind(cause)
        if kind not in self.groups and not isinstance(error, EpisodesLost):
            trace = None if isinstance(error, ShmBridgeError) else error
            log.error("a group failed, further ones like it are only counted: %s", error, exc_info=trace)
        self.groups[kind] += 1
        if isinstance(cause, TooOld) or began < self._at:
            return
        self._at = asyncio.get_running_loop().time()
        self._in_a_row += 1
        if self._in_a_row == self._stop_after:
            raise TooManyFailures(
                f"groups failed {self._in_a_row} times in a row, the last with {cause!r}",
                hint="fix the environment or the server; stop_after_failures=0 goes on",
            ) from cause

    def put(self) -> None:
        """Notes that a group was put."""
        self._in_a_row = 0

    def stats(self) -> dict[str, float]:
        """Returns counters, flat. Never blocks."""
        return {
            **{f"episodes_lost_total{{{kind}}}": float(count) for kind, count in self.episodes.items()},
            **{f"groups_lost_total{{{kind}}}": float(count) for kind, count in self.groups.items()},
            "episodes_refilled_total": float(self.refilled),
            "answers_asked_again_total": float(self.asked_again),
        }

    def __str__(self) -> str:
        lost = {"episodes": self.episodes, "groups": self.groups}
        words = [f"{count} {what} {kind}" for what, of in lost.items() for kind, count in sorted(of.items())]
        return ", ".join(words) or "none"


async def survivors(
    begin: Callable[[int], E],
    play: Callable[[E], Awaitable[None]],
    size: int,
    limits: Limits,
    losses: Losses,
    outdated: asyncio.Future[Exception] | None = None,
) -> list[E]:
    """Returns the episodes of a group that came to a good end, in the order of their numbers.

    All are played at once. Cancelling it cancels them.

    Args:
        begin: makes the episode of a number, from 0 to `size` - 1; those in place of others follow.
        play: plays it.
        size: episodes.
        limits, losses: see there.
        outdated: ends the group once it is done, with the result as the cause: no episode is of use any more.

    Raises:
        EpisodesLost: none is left, or under "drop" not all; the last error is its cause.
    """
    made: list[E] = []
    errors: list[Exception] = []

    def lose(error: Exception, episodes: int = 1) -> None:
        errors.append(error)
        losses.episode(error, episodes)

    def start(number: int) -> asyncio.Task[E | Exception]:
        return asyncio.create_task(_played(begin, play, number, limits.episode_s))

    more, playing = iter(range(size, size + limits.refill)), set(map(start, range(size)))
    loop = asyncio.get_running_loop()
    ends = None if limits.group_s is None else loop.time() + limits.group_s
    given_up: Exception | None = None  # why those that play still are not waited for
    of_use = True
    try:
        while playing and given_up is None:
            waits: set[asyncio.Future[Any]] = {*playing, *(() if outdated is None else (outdated,))}
            left = None if ends is None else max(ends - loop.time(), 0.0)
            done, _ = await asyncio.wait(waits, timeout=left, return_when=asyncio.FIRST_COMPLETED)
            for each in playing & done:
                playing.remove(each)
                played = each.result()
                if isinstance(played, Exception):
                    lose(played)
                else:
                    made.append(played)
            while len(made) + len(playing) < size and (number := next(more, None)) is not None:
                losses.refilled += 1
                playing.add(start(number))
            if outdated is not None and outdated.done():
                given_up, of_use = outdated.result(), False
            elif not done:
                given_up = Late(f"a group did not end within {limits.group_s:g} s")
    finally:
        await _cancelled(playing)
    if given_up is not None:
        lose(given_up, len(playing))
    if not made or not of_use or (len(made) < size and limits.incomplete == "drop"):
        lost = EpisodesLost(
            f"{size - len(made)} of {size} episodes of a group were lost, and it is not put",
            hint="see the first error of each kind in the log",
        )
        losses.episode(lost if of_use else errors[-1], len(made))
        raise lost from errors[-1]
    return sorted(made, key=lambda episode: episode.repetition_id)


def is_cancelled() -> bool:
    """Returns whether the running task is to be cancelled: a CancelledError is meant for it. Never blocks."""
    task = asyncio.current_task()
    return task is None or task.cancelling() > 0


async def _played(
    begin: Callable[[int], E], play: Callable[[E], Awaitable[None]], number: int, deadline_s: float | None
) -> E | Exception:
    """Plays an episode; returns it, or why it is lost. Raises what is meant for this task or the process."""
    deadline = asyncio.timeout(deadline_s)
    try:
        episode = begin(number)
        async with deadline:
            await play(episode)
        episode.require_finished()
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        if isinstance(error, asyncio.CancelledError) and is_cancelled():
            raise
        if deadline.expired():
            name = f"episode {number} of task {episode.instance_id!r}"
            return Late(f"{name} did not end within {deadline_s:g} s")
        if isinstance(error, Exception):
            return error
        return RuntimeError(f"the episode ended with {error!r}")  # a library cancelled something of its own
    return episode


async def _cancelled(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Cancels tasks, and waits for them a moment: one that ignores it is left behind."""
    for each in tasks:
        each.cancel()
    if left := set(tasks):
        _, stuck = await asyncio.wait(left, timeout=_CANCEL_S)
        if stuck:
            log.warning("%d episodes go on though they were cancelled", len(stuck))
