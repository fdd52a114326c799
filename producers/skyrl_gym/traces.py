"""Finds reasoning traces, what a model writes between tags, as text and as tokens of the row: `traces_of`.

A trace begins after its start tag and ends before its end tag; whole tokens are counted, so that one which
holds the end of a tag and the beginning of the trace belongs to the trace.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from shmbridge.producers.rollout import Episode

_LOOK_BACK = 16  # tokens before an answer in which a template may have opened a trace


@dataclass(frozen=True)
class TagPair:
    """The tags around a trace, as text."""

    start: str
    end: str

    def __post_init__(self) -> None:
        if not self.start or not self.end or self.start == self.end:
            raise ValueError(f"a trace needs two different tags, not {self.start!r} and {self.end!r}")


THINK = TagPair("<think>", "</think>")


@dataclass(frozen=True)
class Trace:
    """One reasoning trace.

    Attributes:
        text: what it says, without tags, special tokens and white space around it.
        turn: number of the answer that it is in.
        begin, end: the tokens of the row that hold it, end exclusive.
        closed: False where the end tag is missing: it runs to the end of its answer.
    """

    text: str
    turn: int
    begin: int
    end: int
    closed: bool


@dataclass(frozen=True)
class Place:
    """Where in a text a trace is: characters between its tags."""

    begin: int
    end: int
    closed: bool


def traces_of(episode: Episode, tags: Sequence[TagPair] = (THINK,)) -> list[Trace]:
    """Returns the traces of all answers of an episode, in order. Never blocks; any thread.

    A tag within a trace of its own pair is nested and belongs to it. Where the prompt ends with a start tag,
    as some chat templates have it, the answer begins within a trace. Traces of white space are left out.
    """
    token_text = episode.chat.token_text  # special tokens included: tags are special tokens of some models
    found = []
    for turn, (begin, end) in enumerate(episode.turns()):
        ids = episode.tokens[begin:end]
        text = token_text.text(ids)
        before = token_text.text(episode.tokens[max(0, begin - _LOOK_BACK) : begin]).rstrip()
        opened = next((pair for pair in tags if before.endswith(pair.start)), None)
        places = [each for each in places_in(text, tags, opened) if text[each.begin : each.end].strip()]
        ends = token_text.ends(ids) if places else []
        for place in places:
            first, last = _tokens(ends, place)
            said = _without_special(text[place.begin : place.end], episode.chat.tokenizer, tags)
            found.append(Trace(said.strip(), turn, begin + first, begin + last, place.closed))
    return [trace for trace in found if trace.text]


def places_in(text: str, tags: Sequence[TagPair], opened: TagPair | None = None) -> list[Place]:
    """Returns where traces are in a text; `opened` is the pair whose start tag stands before it."""
    places: list[Place] = []
    at, inside = 0, opened
    while True:
        if inside is None:
            starts = [
                (text.find(pair.start, at), -len(pair.start), number) for number, pair in enumerate(tags)
            ]
            starts = [each for each in starts if each[0] >= 0]
            if not starts:
                return places
            where, _, number = min(starts)
            inside = tags[number]
            at = where + len(inside.start)
        end = _closing(text, at, inside)
        if end is None:
            return [*places, Place(at, len(text), False)]
        places.append(Place(at, end, True))
        at, inside = end + len(inside.end), None


def _closing(text: str, at: int, pair: TagPair) -> int | None:
    """Where the end tag stands that closes the trace which begins at `at`."""
    depth = 1
    while True:
        end, start = text.find(pair.end, at), text.find(pair.start, at)
        if end < 0:
            return None
        if 0 <= start < end:
            depth, at = depth + 1, start + len(pair.start)
            continue
        depth, at = depth - 1, end + len(pair.end)
        if depth == 0:
            return end


def _tokens(ends: Sequence[int], place: Place) -> tuple[int, int]:
    """The tokens that hold a place, given how many characters there are after each token."""
    first = bisect_left(ends, place.begin) if place.begin else 0
    if place.begin and first < len(ends) and ends[first] == place.begin:
        first += 1
    return first, bisect_left(ends, place.end) + 1 if place.closed else len(ends)


def _without_special(text: str, tokenizer: Any, tags: Sequence[TagPair]) -> str:
    kept = {tag for pair in tags for tag in (pair.start, pair.end)}
    for special in getattr(tokenizer, "all_special_tokens", ()):
        if special not in kept:
            text = text.replace(str(special), "")
    return text
