"""Reasoning traces: which text is one, and which tokens of the row hold it, whatever pieces tokens are."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest
from skyrl_scripted import Scripted

from shmbridge.producers.rollout import ChatFormat, Episode
from shmbridge.producers.skyrl_gym import THINK, TagPair, Trace, traces_of
from shmbridge.producers.skyrl_gym.play import places_in

NOTE = TagPair("[note]", "[/note]")


async def played(pieces: Any, *answers: str | list[int], chat: ChatFormat | None = None) -> Episode:
    """An episode whose answers were these."""
    server = Scripted(pieces, lambda prompt, number: answers[number])
    episode = Episode(server, chat or ChatFormat(pieces), [{"role": "user", "content": "?"}])
    for number in range(len(answers)):
        if number:
            episode.observe([{"role": "user", "content": f"go on {number}"}])
        await episode.sample()
    return episode


def cut(text: str, *tags: TagPair) -> list[tuple[str, bool]]:
    return [(text[each.begin : each.end], each.closed) for each in places_in(text, tags or (THINK,))]


def test_what_is_between_tags_is_a_trace() -> None:
    assert cut("a<think>b</think>c") == [("b", True)]
    assert cut("no tags </think>") == []
    assert cut("<think>1</think> and <think>2</think>") == [("1", True), ("2", True)]


def test_a_trace_without_end_runs_to_the_end_of_its_answer() -> None:
    assert cut("a<think>b") == [("b", False)]
    assert cut("<think>a</think><think>b") == [("a", True), ("b", False)]


def test_what_is_nested_belongs_to_the_trace_around_it() -> None:
    assert cut("<think>a<think>b</think>c</think>d") == [("a<think>b</think>c", True)]
    assert cut("<think>a[note]b[/note]c</think>[note]d[/note]", THINK, NOTE) == [
        ("a[note]b[/note]c", True),
        ("d", True),
    ]
    assert cut("<think>a<think>b</think>c") == [("a<think>b</think>c", False)]


@pytest.mark.parametrize("tags", [("", "x"), ("x", ""), ("x", "x")])
def test_tags_that_cannot_be_told_apart_are_refused(tags: tuple[str, str]) -> None:
    with pytest.raises(ValueError, match="two different tags"):
        TagPair(*tags)


async def test_text_and_tokens_of_several_turns(pieces: Any) -> None:
    episode = await played(
        pieces, "<think> one é\n</think>answer", "none", "so <think>two</think> and [note]three"
    )
    traces = traces_of(episode, (THINK, NOTE))
    assert [(each.text, each.turn, each.closed) for each in traces] == [
        ("one é", 0, True),
        ("two", 2, True),
        ("three", 2, False),
    ]
    held = [pieces.decode(episode.tokens[each.begin : each.end]) for each in traces]
    assert held[0].strip("k>s").strip() == "one é"  # whole tokens
    assert "two" in held[1]
    assert held[2] == "three<|end|>"
    assert all(all(episode.mask[each.begin : each.end]) for each in traces)


async def test_a_trace_that_the_template_opened(pieces: Any) -> None:
    chat = ChatFormat(
        pieces, template=pieces.chat_template.replace("<|assistant|>", "<|assistant|><think>\n")
    )
    episode = await played(pieces, "hidden</think>shown", "more</think>", chat=chat)
    assert [(each.text, each.turn) for each in traces_of(episode)] == [("hidden", 0), ("more", 1)]
    assert traces_of(episode)[0].begin == episode.prompt_length


async def test_white_space_is_no_trace(pieces: Any) -> None:
    assert traces_of(await played(pieces, "<think>\n\n</think>4<think></think>", "<think>")) == []


async def test_half_a_character_at_the_end(pieces: Any) -> None:
    tokens = pieces.encode("<think>é", add_special_tokens=False)[:-1]
    episode = await played(pieces, tokens, "<think>x</think>")
    first, second = traces_of(episode)
    assert (first.end, first.closed) == (episode.turns()[0][1], False)
    assert (second.text, second.turn) == ("x", 1)


class Stripping:
    """A tokenizer whose decode drops white space in front, as some do: tokens decoded alone lack it."""

    all_special_tokens = ()
    pieces = ("<think>", "a", " ", "  ", "b", "</think>", "c")

    def decode(self, ids: list[int], **_: bool) -> str:
        return "".join(self.pieces[each] for each in ids).lstrip(" ")


def test_a_tokenizer_that_decodes_parts_otherwise() -> None:
    episode: Any = SimpleNamespace(
        chat=ChatFormat(Stripping()), tokens=list(range(7)), turns=lambda: [(0, 7)]
    )
    assert traces_of(episode) == [Trace("a   b", 0, 1, 5, True)]


def window(pieces: Any, ids: list[int], begin: int, end: int) -> tuple[int, int]:
    """The fewest tokens that hold the bytes [begin, end) of an answer, from each token's own bytes."""
    table = {symbol: byte for byte, symbol in bytes_of_symbols().items()}
    reached, first, last = 0, None, 0
    for at, token in enumerate(pieces.convert_ids_to_tokens(ids)):
        length = (
            len(token.encode())
            if token in pieces.all_special_tokens
            else sum(each in table for each in token)
        )
        if first is None and reached + length > begin:
            first = at
        if reached < end:
            last = at + 1
        reached += length
    assert first is not None
    return first, last


def bytes_of_symbols() -> dict[int, str]:
    """How the byte-level alphabet writes each byte."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [each for each in range(256) if each not in shown]
    return {**{each: chr(each) for each in shown}, **{each: chr(256 + at) for at, each in enumerate(hidden)}}


@pytest.mark.parametrize("seed", range(20))
async def test_tokens_are_those_that_hold_the_trace(pieces: Any, seed: int) -> None:
    """Against another way: bytes of tokens, over random answers with characters of one to four bytes."""
    rng = random.Random(seed)
    words = [
        "<think>",
        "</think>",
        "[note]",
        "[/note]",
        "so",
        " thin",
        "é",
        "𝄞",
        "k>s",
        "ow",
        " ",
        "x",
        "<",
        "日",
    ]
    answers = ["".join(rng.choice(words) for _ in range(rng.randint(3, 30))) for _ in range(4)]
    episode = await played(pieces, *answers)
    expected = []
    for turn, ((begin, end), answer) in enumerate(zip(episode.turns(), answers, strict=True)):
        whole = answer + "<|end|>"
        for place in places_in(whole, (THINK, NOTE)):
            text = whole[place.begin : place.end].replace("<|end|>", "").strip()
            if text:
                before = len(whole[: place.begin].encode())
                length = len(whole[place.begin : place.end].encode())
                first, last = window(pieces, episode.tokens[begin:end], before, before + length)
                expected.append((text, turn, begin + first, begin + last, place.closed))
    found = [
        (each.text, each.turn, each.begin, each.end, each.closed)
        for each in traces_of(episode, (THINK, NOTE))
    ]
    assert found == expected
