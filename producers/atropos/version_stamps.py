"""Finds the policy version of each token of a group by looking its rows up among the responses to its worker.

Only a row's tokens show its origin. The lookup first matches a row's beginning, prompt and output
together, in one pass for all responses; then, for trained tokens still open, responses that begin where a run
of them begins (an end token cut off or added, a prompt that was tokenised again). Where completions of
different versions fit equally, none is taken. Used by `shmbridge.producers.atropos.control_link`, in the
worker's context.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from shmbridge.producers.atropos.response_index import (
    LONG,
    NOT_KNOWN,
    SHORT,
    VERSIONS_DISAGREE,
    Heard,
    Index,
    Ledger,
)
from shmbridge.producers.rollout.responses import Tokens
from shmbridge.put import token_array

# Markers in a row of versions, besides those of the ledger.
_OPEN = -3

# So many trained tokens, end tokens, may follow a completion of few tokens. With more, it is the beginning of
# an unknown one.
_ENDING = 2

_MASKED = -100

CONTRADICTORY = "completions whose spans contradict each other"
UNCLEAR = "groups with tokens that fit completions of different versions"
NOT_TAKEN = "groups whose own token_versions are not versions"


@dataclass(frozen=True)
class Stamp:
    """The stamp of a record: the oldest and the newest version, the column `token_versions`, and the unclear
    tokens, by kind.
    """

    oldest: int
    newest: int
    # the group's own, or (int32 of all rows, lengths); None: nothing is known of any token
    column: Any = None
    unclear: Counter[str] = field(default_factory=Counter)


# --- groups -----------------------------------------------------------------------------------------------


def stamp(group: Mapping[str, Any], ledger: Ledger | None, began: int, now: int) -> Stamp:
    """Returns the stamp for the record of a group. Never raises, never changes the group.

    Args:
        group: as the environment sends it. Its own `token_versions` are taken where it has them, one integer
            per token.
        ledger: the responses to its worker.
        began: the version the learner had published when the worker began; with `now`, bounds for tokens
            without a server's version.
        now: the version it has published.
    """
    own = group.get("token_versions")
    if own is None and (ledger is None or ledger.index() is None):  # no row has to be read
        return _Stamping([], [], began, now).by_completions(ledger)
    rows = _rows(group.get("tokens"))
    if rows is None:
        return Stamp(min(began, now), max(began, now))
    stamping = _Stamping(rows, _masks(group.get("masks"), rows), began, now)
    if own is not None and (taken := _own(own, rows)) is not None:
        return stamping.by_the_group(own, taken)
    if own is not None:
        stamping.unclear[NOT_TAKEN] += 1
    return stamping.by_completions(ledger)


class _Stamping:
    """One group being stamped."""

    def __init__(self, rows: list[Tokens], masks: list[Tokens | None], began: int, now: int) -> None:
        self._rows, self._masks = rows, masks
        self._bounds = min(began, now), max(began, now)
        self._placed: set[Heard] = set()
        self._found: set[Heard] = set()  # by their tokens alone, as one for all that are alike
        self.unclear: Counter[str] = Counter()

    def by_the_group(self, own: Any, versions: list[Tokens]) -> Stamp:
        complete = all(
            bool((row[_trained(mask, len(row))] >= 0).all())
            for row, mask in zip(versions, self._masks, strict=True)
        )
        known = np.concatenate(versions)
        known = known[known >= 0]
        if not known.size:
            return Stamp(*self._bounds, own)
        oldest, newest = int(known.min()), int(known.max())
        if not complete:
            oldest, newest = min(oldest, self._bounds[0]), max(newest, self._bounds[1])
        return Stamp(oldest, newest, own)

    def by_completions(self, ledger: Ledger | None) -> Stamp:
        index = ledger.index() if ledger is not None else None
        if ledger is not None and (contradictory := ledger.take_contradictory()):
            self.unclear[CONTRADICTORY] += contradictory
        if index is None:
            return Stamp(*self._bounds, unclear=self.unclear)
        lengths = [len(row) for row in self._rows]
        flat = np.full(sum(lengths), _OPEN, np.int32)
        complete, without, at = True, 0, 0
        for row, mask in zip(self._rows, self._masks, strict=True):
            versions = flat[at : at + len(row)]
            at += len(row)
            if not self._look_up(index, row, mask, versions):
                complete = False
                without += bool((versions == _OPEN).all())
        if bool((flat == VERSIONS_DISAGREE).any()):
            self.unclear[UNCLEAR] += 1
        known = flat[flat >= 0]
        flat[flat < 0] = NOT_KNOWN
        found = (int(known.min()), int(known.max())) if known.size else None
        bounds = self._widened(index, found, without) if not complete else found or self._bounds
        return Stamp(*bounds, (flat, lengths) if found else None, self.unclear)

    def _look_up(self, index: Index, row: Tokens, mask: Tokens | None, versions: Tokens) -> bool:
        """Finds the sampled tokens of a row; returns whether the version of every trained token is known."""
        stretches = []
        for completions in _by_start(_believable(index.beginnings(row), mask, len(row)), mask):
            for heard in completions:
                self._place(heard, versions[heard.start :])
            begin, end, longest = completions[0].start, completions[0].end, completions[-1].end
            # the rest of a longer completion, or what came after a shorter one
            versions[end:longest] = VERSIONS_DISAGREE
            stretches.append((begin, longest))
        gaps = _gaps(stretches, len(row))
        if all(_is_masked(mask, begin, end) for begin, end in gaps):
            return all(bool((versions[begin:end] >= 0).all()) for begin, end in stretches)
        trained = _trained(mask, len(row))
        for begin, end in _runs(trained & (versions == _OPEN)):
            self._search(index, row[begin:end], versions[begin:end])
        return bool((versions[trained] >= 0).all())

    def _search(self, index: Index, run: Tokens, versions: Tokens) -> None:
        """Matches completions one after the other, from the beginning of a run."""
        found: list[tuple[int, list[tuple[Heard, int]]]] = []
        at = believed = 0
        while len(run) - at >= (SHORT if at else 1) and (fits := index.fitting(run[at:])):
            found.append((at, fits))
            at += (count := max(count for _, count in fits))
            if not any(heard.length == count for heard, _ in fits):
                break
            if count >= LONG:
                believed = len(found)
        if len(run) - at <= _ENDING:
            believed = len(found)
        for begin, fits in found[:believed]:
            self._place_all(index, fits, versions[begin:])

    def _place_all(self, index: Index, fits: list[tuple[Heard, int]], versions: Tokens) -> None:
        for heard, count in fits:
            self._place(heard, versions[:count])
            if heard not in self._found:
                self._found.add(heard)
                self._placed.update(index.same(heard))
        fewest, most = min(count for _, count in fits), max(count for _, count in fits)
        if bool((versions[:fewest] == VERSIONS_DISAGREE).any()):
            # the last token of one, or an end token behind the other
            versions[fewest:most] = VERSIONS_DISAGREE

    def _place(self, heard: Heard, versions: Tokens) -> None:
        """Writes a completion's versions, as far as there is room; a token to which another one gives another
        version is unclear.
        """
        said = heard.versions()[: len(versions)]
        there = versions[: len(said)]
        there[:] = np.where((there == _OPEN) | (there == said), said, VERSIONS_DISAGREE)
        self._placed.add(heard)

    def _widened(self, index: Index, found: tuple[int, int] | None, without: int) -> tuple[int, int]:
        """Bounds where some trained token is of unknown version: of all that the worker received, if that
        can be all there is.

        A row of which nothing was found can be one of the completions that were found nowhere. If there are
        too few of these, or one names no version, the versions that the learner had published when the worker
        began and now are bounds as well.
        """
        completions = [heard.completion for heard in index.heard]
        elsewhere = sum(heard not in self._placed for heard in index.heard)
        said = [bound for each in completions for bound in (each.oldest, each.newest) if bound is not None]
        said += [version for each in completions for version, _, _ in each.spans]
        said += found or ()
        explained = without <= elsewhere
        oldest, newest = min(said), max(said)
        if not explained or any(each.oldest is None for each in completions):
            oldest = min(oldest, self._bounds[0])
        if not explained or any(each.newest is None for each in completions):
            newest = max(newest, self._bounds[1])
        return oldest, newest


# --- rows -------------------------------------------------------------------------------------------------


def _rows(tokens: Any) -> list[Tokens] | None:
    if not isinstance(tokens, (list, tuple)):
        return None
    rows = [token_array(row) for row in tokens]
    return [row for row in rows if row is not None] if all(row is not None for row in rows) else None


def _masks(masks: Any, rows: list[Tokens]) -> list[Tokens | None]:
    """A mask per row, or None where there is none that fits it."""
    if not isinstance(masks, (list, tuple)) or len(masks) != len(rows):
        return [None] * len(rows)
    arrays = map(token_array, masks)
    return [
        mask if mask is not None and len(mask) == len(row) else None
        for mask, row in zip(arrays, rows, strict=True)
    ]


def _own(own: Any, rows: list[Tokens]) -> list[Tokens] | None:
    """The group's `token_versions`, if there is one for each token."""
    if not isinstance(own, (list, tuple)) or any(
        isinstance(row, (list, tuple)) and bool in set(map(type, row)) for row in own
    ):
        return None
    versions = _rows(own)
    if versions is None or [len(row) for row in versions] != [len(row) for row in rows]:
        return None
    return versions if all(bool((row >= NOT_KNOWN).all()) for row in versions) else None


def _is_masked(mask: Tokens | None, begin: int, end: int) -> bool:
    """Whether the mask trains no token of [begin, end)."""
    return mask is not None and bool((mask[begin:end] == _MASKED).all())


def _trained(mask: Tokens | None, length: int) -> npt.NDArray[np.bool_]:
    return np.ones(length, bool) if mask is None else mask != _MASKED


def _believable(heard: list[Heard], mask: Tokens | None, length: int) -> list[Heard]:
    """Drops short completions at the end that the row goes on from: another one may begin with them."""
    last = max((each.start for each in heard), default=0)

    def is_whole(each: Heard) -> bool:
        return each.length >= LONG or _run_end(mask, each.end, length) - each.end <= _ENDING

    return [
        each
        for each in heard
        if each.start < last or _is_masked(mask, each.start, each.end) or is_whole(each)
    ]


def _by_start(heard: list[Heard], mask: Tokens | None) -> list[list[Heard]]:
    """Completions that begin at one place together, shorter first.

    Of several lengths, the one that fills its run of trained tokens; and those that do so with an end token,
    if their versions differ.
    """
    by_start: dict[int, list[Heard]] = defaultdict(list)
    for each in heard:
        by_start[each.start].append(each)
    for start, completions in by_start.items():
        if completions[0].end < completions[-1].end and (
            filling := [each for each in completions if _fills_a_run(mask, start, each.end)]
        ):
            said = filling[0].versions()
            others = [
                each
                for each in completions
                if each.end == filling[0].end - 1 and bool((each.versions() != said[:-1]).any())
            ]
            by_start[start] = others + filling
    return list(by_start.values())


def _run_end(mask: Tokens | None, begin: int, length: int) -> int:
    """Returns the end of the run of trained tokens that continues at `begin`."""
    masked = [] if mask is None else np.flatnonzero(mask[begin:] == _MASKED).tolist()
    return begin + masked[0] if masked else length


def _fills_a_run(mask: Tokens | None, begin: int, end: int) -> bool:
    return (
        mask is not None
        and not (mask[begin:end] == _MASKED).any()
        and (end == len(mask) or mask[end] == _MASKED)
    )


def _gaps(stretches: list[tuple[int, int]], length: int) -> list[tuple[int, int]]:
    """Returns the parts of [0, length) in no stretch."""
    gaps, reached = [], 0
    for begin, end in sorted(stretches):
        if begin > reached:
            gaps.append((reached, begin))
        reached = max(reached, end)
    return [*gaps, (reached, length)] if reached < length else gaps


def _runs(where: npt.NDArray[np.bool_]) -> list[tuple[int, int]]:
    edges = np.flatnonzero(np.diff(where, prepend=False, append=False)).tolist()
    return list(zip(edges[::2], edges[1::2], strict=True))
