"""Finds the policy version of each token of a group by looking its rows up among the responses to its worker.

Hooks in aiohttp and in the OpenAI client record responses. Every worker has a ledger in its context, which
its own tasks inherit; outside of workers (evaluation, health checks) nothing is recorded.

Only a row's tokens show its origin. The lookup first matches a row's beginning, prompt and output together,
in one pass for all responses; then, for trained tokens still open, responses that begin where a run of them
begins (an end token cut off or added, a prompt that was tokenised again). Where completions of different
versions fit equally, none is taken. Used by `patches` and `control_link`, in the worker's context.
"""

from __future__ import annotations

import functools
import hashlib
from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import numpy as np
import numpy.typing as npt

from shmbridge.producers.rollout.sampling import Completion, Span, Tokens, completions_in
from shmbridge.put import token_array

if TYPE_CHECKING:
    from shmbridge.producers.atropos.upstream import Changes

# Markers in place of a token's version: reported as unknown, and completions that disagree.
NOT_KNOWN, VERSIONS_DISAGREE = -1, -2

# Least tokens by which a completion that was cut is recognised by its beginning; and those of one in a longer
# run, or without its end.
LONG, SHORT = 16, 4

_ledger: ContextVar[Ledger | None] = ContextVar("completions_of_the_calling_worker", default=None)
# Ends of the paths that sample; other requests are not recorded.
_SAMPLING = ("/generate", "/completions")
# Markers in a row of versions, besides those of the ledger.
_OPEN = -3
# So many trained tokens, end tokens, may follow a completion of few tokens. With more, it is the beginning of
# an unknown one.
_ENDING = 2
_MASKED = -100
CONTRADICTORY = "completions whose spans contradict each other"
UNCLEAR = "groups with tokens that fit completions of different versions"
NOT_TAKEN = "groups whose own token_versions are not versions"


@dataclass(slots=True, eq=False)
class Heard:
    """A completion in the form for lookups; of its prompt only the length and a digest are kept."""

    completion: Completion
    start: int = -1  # the length of its prompt; -1 if it is not known
    digest: bytes = b""  # of prompt and output
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


def _digests(tokens: Tokens, ends: Sequence[int]) -> Iterator[tuple[int, bytes]]:
    """Yields each of the rising ends, with a digest of the tokens before it."""
    digest, begin = _digest(tokens[:0]), 0
    for end in ends:
        digest.update(tokens[begin:end].tobytes())
        begin = end
        yield end, digest.digest()


def _digest(tokens: Tokens) -> Any:
    return hashlib.blake2b(tokens.tobytes(), digest_size=16)


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
        of_prompt: Any = None
        for completion in completions:
            self._contradictory += completion.contradicts
            heard = Heard(replace(completion, prompt=None))  # prompts of many turns are long
            if completion.prompt is not None and completion.output is not None:
                if completion.prompt is not prompt:
                    prompt, of_prompt = completion.prompt, _digest(completion.prompt)
                whole = of_prompt.copy()
                whole.update(completion.output.tobytes())
                heard.start, heard.digest = len(completion.prompt), whole.digest()
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
        self._placeable: dict[tuple[int, bytes], list[Heard]] = defaultdict(list)
        for each in heard:
            if each.start >= 0:
                self._placeable[each.end, each.digest].append(each)
        self._ends = sorted({end for end, _ in self._placeable})
        self._outputs: _Outputs | None = None
        _mark_alike(heard)

    def same(self, heard: Heard) -> list[Heard]:
        """Completions with the same tokens and versions as one of `fitting`: they fit wherever it does."""
        assert self._outputs is not None
        return self._outputs.same[heard]

    def beginnings(self, row: Tokens) -> list[Heard]:
        """Completions whose prompt and output the row begins with, shorter rows first."""
        ends = self._ends[: bisect_right(self._ends, len(row))]
        return [each for key in _digests(row, ends) for each in self._placeable.get(key, ())]

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
        self._by_start: dict[tuple[int, bytes], list[Heard]] = defaultdict(list)  # and without the last
        for each in heard:
            if (output := each.completion.output) is None:
                continue
            key = output.tobytes(), each.completion.spans, each.alike
            same = self.same.setdefault(first.setdefault(key, each), [])
            if not same:
                for start in _digests(output, [len(output) - 1, len(output)]):
                    self._by_start[start].append(each)
            same.append(each)
        self._heard = list(first.values())
        self._sorted = sorted((key[0], at) for at, key in enumerate(first))
        self._ends = sorted({end for end, _ in self._by_start})

    def fitting(self, run: Tokens) -> list[tuple[Heard, int]]:
        """Returns those that fit, and how many tokens each explains."""
        counts: dict[Heard, int] = {}
        for key in _digests(run, self._ends[: bisect_right(self._ends, len(run))]):
            for each in self._by_start.get(key, ()):  # the whole output comes after its beginning
                is_whole = each.length == key[0]
                if key[0] >= SHORT or (is_whole and key[0] >= len(run) - 1):
                    counts[each] = key[0]
        if len(run) >= LONG:
            longer = (self._heard[at] for at in self._longer(run.tobytes()))
            counts |= {each: len(run) for each in longer if each.length > len(run) + 1}
        return list(counts.items())

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


@contextmanager
def listening() -> Iterator[None]:
    """For one worker: responses that it and its tasks receive within the block go into a new ledger."""
    ledger = Ledger()
    token = _ledger.set(ledger)
    try:
        yield
    finally:
        ledger.close()  # tasks it leaves behind keep the context
        _ledger.reset(token)


def heard() -> Ledger | None:
    """The ledger of the calling worker, also after its end; None outside of workers."""
    return _ledger.get()


def put_on_hooks(changes: Changes) -> None:
    """Begins to record, for workers in `listening` blocks; undoing the changes ends it. Never blocks."""
    from aiohttp import ClientResponse
    from atroposlib.envs.server_handling import openai_server, sglang_server, vllm_server
    from openai.resources.chat.completions import AsyncCompletions as AsyncChatCompletions
    from openai.resources.completions import AsyncCompletions

    changes.replace(ClientResponse, "json", _heard_json(ClientResponse.json))
    for client in (AsyncChatCompletions, AsyncCompletions):
        changes.replace(client, "create", _heard_create(client.create))
    # The first worker that asks a server starts its health checks, in its own context and for good.
    for server in (openai_server.OpenAIServer, sglang_server.SGLangServer, vllm_server.VLLMServer):
        changes.replace(server, "check_server_status_task", _unheard(server.check_server_status_task))


def _heard_json(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    async def json(response: Any, *args: Any, **options: Any) -> Any:
        body = await original(response, *args, **options)
        ledger = _ledger.get()
        if ledger is not None and response.ok and response.url.path.rstrip("/").endswith(_SAMPLING):
            ledger.note(completions_in(body))
        return body

    return json


def _heard_create(original: Callable[..., Any]) -> Callable[..., Any]:
    """The OpenAI API has no tokens.

    Servers of ours, known by earlier responses, are asked for them, as vLLM has it.
    """
    ours: WeakSet[Any] = WeakSet()

    @functools.wraps(original)
    async def create(resource: Any, *args: Any, **options: Any) -> Any:
        ledger = _ledger.get()
        if ledger is None:
            return await original(resource, *args, **options)
        if resource._client in ours:
            options["extra_body"] = {"return_token_ids": True, **(options.get("extra_body") or {})}
        completion = await original(resource, *args, **options)
        if getattr(completion, "oldest_weight_version", None) is not None:
            ours.add(resource._client)
        ledger.note(completions_in(completion))
        return completion

    return create


def _unheard(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    async def check(*args: Any, **options: Any) -> Any:
        token = _ledger.set(None)
        try:
            return await original(*args, **options)
        finally:
            _ledger.reset(token)

    return check


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
        for completions in _by_start(_believable(index.beginnings(row), mask, len(row)), mask):
            for heard in completions:
                self._place(heard, versions[heard.start :])
            # the rest of a longer completion, or what came after a shorter one
            versions[completions[0].end : completions[-1].end] = VERSIONS_DISAGREE
        trained = _trained(mask, len(row))
        runs = _runs(trained & (versions == _OPEN))
        if not runs:
            return bool((versions[versions != _OPEN] >= 0).all())
        for begin, end in runs:
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


def _runs(where: npt.NDArray[np.bool_]) -> list[tuple[int, int]]:
    edges = np.flatnonzero(np.diff(where, prepend=False, append=False)).tolist()
    return list(zip(edges[::2], edges[1::2], strict=True))
