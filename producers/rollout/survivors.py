"""The episodes of one task, played at once, and what becomes of those that fail, hang or come too late.

`survivors` gives every episode and the group a deadline; an episode that fails costs its row, not its
siblings. `Losses` counts what was lost, and why. Used by `rollout.py` and by `skyrl_gym/adapter.py`; knows no
lane and no server.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Literal

from shmbridge import ShmBridgeError
from shmbridge.producers.rollout.episode import Episode
from shmbridge.producers.rollout.group import require_finished

log = logging.getLogger(__name__)

LATE, TOO_OLD = "late", "too_old"  # reasons beside the names of exceptions
Incomplete = Literal["put", "drop"]

_CANCEL_S = 2.0  # given to what is cancelled; code that ignores it is left behind


class TooManyFailures(ShmBridgeError):
    """Groups failed, again and again, and none could be put between; the last failure is the cause."""

    code = "SB511"


class EpisodesLost(ShmBridgeError):
    """No episode of a group is left, or too few of them: the group is not put."""

    code = "SB519"


@dataclass(frozen=True)
class Limits:
    """How long episodes may take, and what becomes of a group some of whose episodes were lost.

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
                raise ValueError(f"{name}={seconds} is no number of seconds above 0 -> None: no limit")
        if self.refill < 0 or self.incomplete not in ("put", "drop"):
            raise ValueError(
                f'refill={self.refill} is at least 0, incomplete={self.incomplete!r} is "put" or "drop"'
            )

    def __str__(self) -> str:
        words = ("no deadline" if each is None else f"{each:g} s" for each in (self.episode_s, self.group_s))
        episode, group = words
        refill = f", {self.refill} played in place of lost ones" if self.refill else ""
        rest = "puts those that are left" if self.incomplete == "put" else "is left out"
        return f"an episode has {episode}, a group {group}{refill}; a group with lost episodes {rest}"


class Losses:
    """Counts what was lost, and ends a run in which nothing else happens. For one event loop.

    Args:
        stop_after: so many failures of whole groups, one after the other, raise TooManyFailures; 0: never.

    Attributes:
        episodes: lost episodes, by the kind of their error, "late" or "too_old".
        groups: groups that were not put, by the same.
        refilled: episodes played in place of lost ones.
        asked_again: answers that a server aborted before their first token, and that were asked for again.
    """

    def __init__(self, stop_after: int = 0) -> None:
        self.episodes: Counter[str] = Counter()
        self.groups: Counter[str] = Counter()
        self.refilled = self.asked_again = 0
        self._stop_after, self._in_a_row, self._at = stop_after, 0, -math.inf

    def episode(self, error: BaseException, reason: str = "") -> None:
        """Counts a lost episode; the first of each kind is logged."""
        kind = reason or type(error).__name__
        self.episodes[kind] += 1
        if self.episodes[kind] == 1:
            trace = None if isinstance(error, (ShmBridgeError, TimeoutError)) else error
            log.error(
                "an episode failed, further ones like it are only counted: %s", error or kind, exc_info=trace
            )

    def group(self, error: BaseException, began: float) -> None:
        """Counts a group that is not put. Raises TooManyFailures.

        Args:
            error: why.
            began: when it began, in the time of the event loop. Groups that were in the making at a failure
                share its moment, as when a server ends, and count once.
        """
        kind = type(error.__cause__ or error).__name__
        self.groups[kind] += 1
        if self.groups[kind] == 1 and not isinstance(error, EpisodesLost):
            trace = None if isinstance(error, ShmBridgeError) else error
            log.error("a group failed, further ones like it are only counted: %s", error, exc_info=trace)
        if began < self._at:
            return
        self._at = asyncio.get_running_loop().time()
        self._in_a_row += 1
        if self._in_a_row == self._stop_after:
            last = error.__cause__ or error
            raise TooManyFailures(
                f"{self._in_a_row} groups in a row failed, the last with {last!r}",
                hint="mend the environment or the server; stop_after_failures=0 goes on",
            ) from last

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


async def survivors(
    begin: Callable[[int], Episode],
    play: Callable[[Episode], Awaitable[None]],
    size: int,
    limits: Limits,
    losses: Losses,
) -> list[Episode]:
    """Returns the episodes of a group that came to a good end, in the order of their numbers.

    All are played at once. Cancelling it cancels them.

    Args:
        begin: makes the episode of a number, from 0 to `size` - 1; those in place of others follow.
        play: plays it.
        size: episodes.
        limits, losses: see there.

    Raises:
        EpisodesLost: none is left, or under "drop" not all; the last error is its cause.
    """
    made: dict[int, Episode] = {}
    errors: list[BaseException] = []

    async def one(number: int) -> None:
        episode = begin(number)
        error = await _error_of(play, episode, limits.episode_s)
        if error is None:
            made[number] = episode
        else:
            errors.append(error)
            losses.episode(error, LATE if isinstance(error, _Late) else "")

    numbers = iter(range(size, size + limits.refill))
    playing = {asyncio.create_task(one(number)) for number in range(size)}
    loop = asyncio.get_running_loop()
    ends = math.inf if limits.group_s is None else loop.time() + limits.group_s
    try:
        while playing and (left := ends - loop.time()) > 0:
            wait_s = None if left == math.inf else left
            done, playing = await asyncio.wait(playing, timeout=wait_s, return_when=asyncio.FIRST_COMPLETED)
            for each in done:
                each.result()
            while len(made) + len(playing) < size and (number := next(numbers, None)) is not None:
                losses.refilled += 1
                playing.add(asyncio.create_task(one(number)))
        for _ in playing:
            errors.append(_Late(f"the group did not end within {limits.group_s:g} s"))
            losses.episode(errors[-1], LATE)
    finally:
        await _cancelled(playing)
    found = [made[number] for number in sorted(made)][:size]
    if not found or (len(found) < size and limits.incomplete == "drop"):
        raise EpisodesLost(
            f"{len(errors)} episodes of a group of {size} were lost, {len(found)} are left",
            hint="see the episodes' own errors in the log",
        ) from errors[-1]
    return found


class _Late(TimeoutError):
    """An episode did not end within its deadline."""


async def _error_of(
    play: Callable[[Episode], Awaitable[None]], episode: Episode, deadline_s: float | None
) -> BaseException | None:
    """Plays an episode; returns why it is lost, or None. Raises only what is said to this task."""
    try:
        async with asyncio.timeout(deadline_s) as deadline:
            await play(episode)
        require_finished(episode)
    except TimeoutError as error:
        if deadline.expired():
            return _Late(f"an episode did not end within {deadline_s:g} s")
        return error
    except Exception as error:
        return error
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # of a library that cancelled something of its own, or timed it out
        task = asyncio.current_task()
        if isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling():
            raise
        return RuntimeError(f"the episode ended with {error!r}")
    return None


async def _cancelled(tasks: set[asyncio.Task[None]]) -> None:
    """Cancels tasks, and waits for them a moment: one that ignores it is left behind."""
    for each in tasks:
        each.cancel()
    if tasks:
        _, stuck = await asyncio.wait(tasks, timeout=_CANCEL_S)
        if stuck:
            log.warning("%d episodes go on though they were cancelled", len(stuck))
