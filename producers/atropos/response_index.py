"""The responses to one worker, looked up by tokens: by the beginning of a row, or by a run of trained tokens.

Tokens are compared by sums with random weights,
for all completions in one pass. Used by `shmbridge.producers.atropos.version_stamps`, and filled by
`shmbridge.producers.atropos.response_hooks`, both in the worker's context.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from shmbridge.producers.rollout.responses import Completion, Span, Tokens

# Markers in place of a token's version: reported as unknown, and completions that disagree.
NOT_KNOWN, VERSIONS_DISAGREE = -1, -2

# Least tokens by which a completion that was cut is recognised by its beginning; and those of one in a longer
# run, or without its end.
LONG, SHORT = 16, 4


@dataclass(slots=True, eq=False)
class Heard:
    """A completion in the form for lookups; of its prompt only the length and a sum are kept."""

    completion: Completion
    start: int = -1  # the length of its prompt; -1 if it is not known
    total: int = 0  # of prompt and output
    # ambiguous: another version gave the same text or tokens
    alike: bool = False

    @property
    def length(self) -> int:
        """The length of its output, in tokens."""
        return 0 if self.completion.output is None else len(self.completion.output)

    @property
    def end(self) -> int:
        """Its end in a row that begins with its prompt."""
        return self.start + self.length

    def versions(self) -> Tokens:
        """Returns the versions of its output tokens."""
        output = self.completion.output
        assert output is not None
        if self.alike:
            return np.full(len(output), VERSIONS_DISAGREE, np.int32)
        versions = np.full(len(output), NOT_KNOWN, np.int32)
        for version, start, end in self.completion.spans:
            versions[start:end] = version
        return versions


class _Sums:
    """Sums over tokens with a random weight for each position: those of two beginnings of one length are
    equal only if they are.
    """

    def __init__(self) -> None:
        self._random = np.random.default_rng()
        self._weights = np.empty(0, np.uint64)

    def of(self, tokens: Tokens, start: int = 0) -> npt.NDArray[np.uint64]:
        """uint64, one for each token: its share, standing `start` tokens from the beginning."""
        if (end := start + len(tokens)) > len(self._weights):
            more = self._random.integers(0, 1 << 64, max(end, 4096), np.uint64)
            self._weights = np.concatenate([self._weights, more])
        shares: npt.NDArray[np.uint64] = tokens.astype(np.uint64) * self._weights[start:end]
        return shares


_sums = _Sums()


class Ledger:
    """The completions that one worker got. For one thread: that of its event loop."""

    def __init__(self) -> None:
        self._heard: list[Heard] = []
        self._closed = False
        self._index: Index | None = None
        self._contradictory = 0

    def note(self, completions: Sequence[Completion]) -> None:
        """Keeps a server's completions; not after `close`."""
        if self._closed:
            return
        self._index = None
        prompt: Tokens | None = None
        of_prompt = 0
        for completion in completions:
            self._contradictory += completion.contradicts
            heard = Heard(replace(completion, prompt=None))  # prompts of many turns are long
            if completion.prompt is not None and completion.output is not None:
                if completion.prompt is not prompt:
                    prompt = completion.prompt
                    of_prompt = int(_sums.of(prompt).sum())
                heard.start = len(completion.prompt)
                heard.total = (of_prompt + int(_sums.of(completion.output, heard.start).sum())) % (1 << 64)
            self._heard.append(heard)

    def close(self) -> None:
        """No more completions: the worker has ended."""
        self._closed = True

    def index(self) -> Index | None:
        """The index for lookups; None if no completion names a version."""
        if self._index is None and any(
            each.completion.newest is not None or each.completion.spans for each in self._heard
        ):
            self._index = Index(self._heard)
        return self._index

    def take_contradictory(self) -> int:
        """Returns how many completions were contradictory since the last call."""
        count, self._contradictory = self._contradictory, 0
        return count


class Index:
    """Completions by their tokens."""

    def __init__(self, heard: Sequence[Heard]) -> None:
        self.heard = heard
        self._placeable = sorted((each for each in heard if each.start >= 0), key=lambda each: each.end)
        self._ends = np.array([each.end for each in self._placeable], np.int64)
        self._totals = np.array([each.total for each in self._placeable], np.uint64)
        self._outputs: _Outputs | None = None
        _mark_alike(heard)

    def same(self, heard: Heard) -> list[Heard]:
        """Completions with the same tokens and versions as one of `fitting`: they fit wherever it does."""
        assert self._outputs is not None
        return self._outputs.same[heard]

    def beginnings(self, row: Tokens) -> list[Heard]:
        """Completions whose prompt and output the row begins with, shorter rows first."""
        sums = np.cumsum(_sums.of(row))
        fitting = int(np.searchsorted(self._ends, len(row), "right"))
        same = sums[self._ends[:fitting] - 1] == self._totals[:fitting]
        return [self._placeable[at] for at in np.flatnonzero(same)]

    def fitting(self, run: Tokens) -> list[tuple[Heard, int]]:
        """Completions that a run of trained tokens begins with, or is the beginning of, and how many tokens
        each explains.

        All of it, all but its last token, or all of the run. Those that explain most, and those that end one
        token before: an environment may have added an end token to one of these.
        """
        if self._outputs is None:
            self._outputs = _Outputs(self.heard)
        fits = self._outputs.fitting(run)
        most = max((count for _, count in fits), default=0)
        return [(heard, count) for heard, count in fits if count == most or heard.length == count == most - 1]


class _Outputs:
    """Outputs by their tokens, whatever was asked, and once: a game's worker gets the same few a thousand
    times.
    """

    def __init__(self, heard: Sequence[Heard]) -> None:
        self.same: dict[Heard, list[Heard]] = {}
        first: dict[tuple[bytes, tuple[Span, ...], bool], Heard] = {}
        for each in heard:
            if (output := each.completion.output) is not None:
                key = output.tobytes(), each.completion.spans, each.alike
                self.same.setdefault(first.setdefault(key, each), []).append(each)
        self._sorted = sorted(((key[0], at) for at, key in enumerate(first)))
        self._heard = list(first.values())
        outputs = [each.completion.output for each in self._heard if each.completion.output is not None]
        self._lengths = np.array([len(output) for output in outputs], np.int64)
        shares = [_sums.of(output) for output in outputs]
        self._totals = np.array([share.sum() for share in shares], np.uint64)
        self._without_last = self._totals - np.array([share[-1] for share in shares], np.uint64)

    def fitting(self, run: Tokens) -> list[tuple[Heard, int]]:
        """Returns those that fit, and how many tokens each explains."""
        sums = np.concatenate([np.zeros(1, np.uint64), np.cumsum(_sums.of(run))])
        lengths = self._lengths
        whole = sums[np.minimum(lengths, len(run))] == self._totals
        whole &= (lengths <= len(run)) & ((lengths >= SHORT) | (lengths >= len(run) - 1))
        ended = sums[np.minimum(lengths - 1, len(run))] == self._without_last
        ended &= (lengths - 1 <= len(run)) & (lengths - 1 >= SHORT) & ~whole
        fits = [(self._heard[at], int(lengths[at])) for at in np.flatnonzero(whole)]
        fits += [(self._heard[at], int(lengths[at]) - 1) for at in np.flatnonzero(ended)]
        if len(run) >= LONG:
            fits += [
                (self._heard[at], len(run))
                for at in self._longer(run.tobytes())
                if lengths[at] > len(run) + 1
            ]
        return fits

    def _longer(self, run: bytes) -> list[int]:
        found = []
        for at in range(bisect_left(self._sorted, (run, -1)), len(self._sorted)):
            if not self._sorted[at][0].startswith(run):
                break
            found.append(self._sorted[at][1])
        return found


def _mark_alike(heard: Sequence[Heard]) -> None:
    """Marks completions of several versions that fit a row equally, though its tokens are found as those of
    some.

    Of one text, or of one that another begins with: rows that environments make of texts have the tokenizer's
    tokens, which any of these may have had, or its server did not say which it had. Of the same tokens: where
    only some say what they were asked.
    """
    by_text: dict[str, list[Heard]] = defaultdict(list)
    by_output: dict[bytes, list[Heard]] = defaultdict(list)
    for each in heard:
        if each.completion.text is not None:
            by_text[each.completion.text.strip()].append(each)
        if each.completion.output is not None:
            by_output[each.completion.output.tobytes()].append(each)
    for several in by_output.values():
        if len({each.start >= 0 for each in several}) > 1:
            _mark_unless_of_one_version(several)
    begun: list[str] = []  # texts that the next may begin with, the longest last
    for text, several in sorted(by_text.items()):
        outputs = [each.completion.output for each in several]
        if len({None if output is None else output.tobytes() for output in outputs}) > 1:
            _mark_unless_of_one_version(several)
        while begun and not text.startswith(begun[-1]):
            begun.pop()
        for beginning in begun:
            _mark_unless_of_one_version(by_text[beginning] + several)
        if text:
            begun.append(text)


def _mark_unless_of_one_version(several: list[Heard]) -> None:
    bounds = {(each.completion.oldest, each.completion.newest) for each in several}
    if len(bounds) > 1 or any(oldest is None or oldest != newest for oldest, newest in bounds):
        for each in several:
            each.alike = True
