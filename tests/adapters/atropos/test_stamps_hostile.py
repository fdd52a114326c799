"""Answers that look like those a row was made of: no token gets the version of a wrong answer, and no lookup
blocks the event loop.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from stamped_rows import BEGAN, LONG, NOW, PROMPT, bounds, column, group, ledger_of, under

from shmbridge.producers.atropos import versions
from shmbridge.producers.atropos.versions import NOT_TAKEN, UNCLEAR, stamp
from shmbridge.producers.rollout.sampling import completions_in


def chat(
    text: Any, version: int, output: list[int] | None = None, prompt: list[int] | None = None, **message: Any
) -> dict[str, Any]:
    choice = {"index": 0, "message": {"role": "assistant", "content": text, **message}}
    if output is not None:
        choice["token_ids"] = output
    body = {"choices": [choice], "weight_version": version, "oldest_weight_version": version}
    return body if prompt is None else body | {"prompt_token_ids": prompt}


# --- one text ---------------------------------------------------------------------------------------------


def test_a_text_that_was_also_answered_without_tokens_may_be_that_answer() -> None:
    """A server is asked for tokens only after an answer with a version, so its first answers have none."""
    turns = ledger_of(chat("A", 3), chat(" A", 4, [5], [*PROMPT, 5, 1]))
    stamped = stamp(group((PROMPT, [5], [1], [5])), turns, BEGAN, NOW)
    assert (stamped.column, bounds(stamped), stamped.unclear) == (None, (3, 4), {UNCLEAR: 1})
    again = stamp(group((PROMPT, [5])), ledger_of(chat("A", 3), chat("A", 4, [5], PROMPT)), BEGAN, NOW)
    assert (again.column, bounds(again)) == (None, (3, 4))


def test_a_text_of_two_spellings_in_tokens_may_be_either() -> None:
    """A row that was made of the text has the tokenizer's spelling."""
    stamped = stamp(group((PROMPT, [56])), ledger_of(chat("56", 3, [5, 6]), chat("56", 4, [56])), BEGAN, NOW)
    assert (stamped.column, bounds(stamped), stamped.unclear) == (None, (3, 4), {UNCLEAR: 1})


def test_a_call_of_a_tool_is_a_text_too() -> None:
    calls = [{"id": "1", "function": {"name": "weather", "arguments": "{}"}}]
    others = [{"id": "2", "function": {"name": "time", "arguments": "{}"}}]
    first, second = chat(None, 3, tool_calls=calls), chat(None, 4, LONG, tool_calls=calls)
    assert stamp(group((PROMPT, LONG)), ledger_of(first, second), BEGAN, NOW).column is None
    third = chat(None, 3, tool_calls=others)
    assert column(stamp(group((PROMPT, LONG)), ledger_of(third, second), BEGAN, NOW)) == [[-1] * 3 + [4] * 30]


def test_texts_of_one_version_or_with_other_thoughts_are_no_trouble() -> None:
    stamped = stamp(
        group((PROMPT, [56])),
        ledger_of(chat("56", 3, [5, 6]), chat("56", 3, [56]), chat("56", 3)),
        BEGAN,
        NOW,
    )
    assert (column(stamped), stamped.unclear) == ([[-1, -1, -1, 3]], {})
    thoughts = [chat("56", version, [version, *LONG], reasoning_content=f"{version}") for version in (3, 4)]
    stamped = stamp(group((PROMPT, [3, *LONG]), (PROMPT, [4, *LONG])), ledger_of(*thoughts), BEGAN, NOW)
    assert column(stamped) == [[-1] * 3 + [3] * 31, [-1] * 3 + [4] * 31]


# --- one beginning ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("prompt", [PROMPT, None])
@pytest.mark.parametrize("answer", [[1, 2, 3, 4], [1, 2, 3, 4, 77]])
def test_a_short_answer_is_not_the_beginning_of_a_longer_one(
    answer: list[int], prompt: list[int] | None
) -> None:
    """The longer one is of another version, and its end was tokenised again."""
    heard = ledger_of(under(prompt, answer, 9), under(prompt, [*range(1, 12), 99, 99], 3))
    stamped = stamp(group((PROMPT, list(range(1, 13)))), heard, BEGAN, NOW)
    assert (stamped.column, bounds(stamped)) == (None, (3, 9))


def test_a_short_turn_before_another_is_still_found() -> None:
    """The environment trains its own words between them."""
    heard = ledger_of(under(PROMPT, [5], 3), under([*PROMPT, 5, 1, 1, 1, 1], [6], 4))
    assert column(stamp(group((PROMPT, [5, 1, 1, 1, 1, 6])), heard, BEGAN, NOW)) == [
        [-1, -1, -1, 3, -1, -1, -1, -1, 4]
    ]


@pytest.mark.parametrize("prompt", [PROMPT, None])
def test_an_end_token_may_be_the_environments_or_the_answers(prompt: list[int] | None) -> None:
    for output in ([5, 6, 7, 8], [5]):
        heard = ledger_of(under(prompt, output, 3), under(prompt, [*output, 2], 4))
        stamped = stamp(group((PROMPT, [*output, 2])), heard, BEGAN, NOW)
        assert (stamped.column, bounds(stamped), stamped.unclear) == (None, (3, 4), {UNCLEAR: 1})
        heard = ledger_of(under(prompt, output, 3), under(prompt, [*output, 2], 3))
        assert column(stamp(group((PROMPT, [*output, 2])), heard, BEGAN, NOW)) == [
            [-1] * 3 + [3] * (len(output) + 1)
        ]


def test_an_end_token_is_not_an_answer_of_nothing() -> None:
    assert column(
        stamp(group((PROMPT, [5, 2])), ledger_of(under(None, [5], 3), under(None, [2], 9)), BEGAN, NOW)
    ) == [[-1, -1, -1, 3, -1]]


# --- what is no version, no token, no mask
# -------------------------------------------------------------------


@pytest.mark.parametrize(
    "own",
    [[[True] * 4], [np.array([-1, -1, -1, (1 << 32) + 3])], [np.array([True] * 4)], [[float("nan")] * 4]],
)
def test_own_versions_of_another_type_or_size_are_not_taken(own: Any) -> None:
    stamped = stamp(group((PROMPT, [5]), token_versions=own), ledger_of(under(PROMPT, [5], 3)), BEGAN, NOW)
    assert (bounds(stamped), column(stamped), stamped.unclear) == ((3, 3), [[-1, -1, -1, 3]], {NOT_TAKEN: 1})


def test_wide_tokens_are_not_taken_for_what_their_low_bits_are() -> None:
    row = np.array([*PROMPT, (1 << 32) + 5])
    assert stamp({"tokens": [row]}, ledger_of(under(PROMPT, [5], 3)), BEGAN, NOW).column is None


@pytest.mark.parametrize(
    "masks",
    [[[np.array([1, 2])] * 4], [["x"] * 4], [[float("nan")] * 4], [[None] * 4], [[[1]] * 4], [np.array(3)]],
)
@pytest.mark.parametrize("prompt", [PROMPT, None])
def test_a_value_that_is_no_mask_counts_as_none(masks: Any, prompt: list[int] | None) -> None:
    heard = ledger_of(under(prompt, [5], 3), under(prompt, [5, 6], 4))
    assert bounds(stamp({"tokens": [[*PROMPT, 5]], "masks": masks}, heard, BEGAN, NOW))[0] == 3


# --- at random --------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=300)
@given(st.data())
def test_rows_made_of_texts_cut_and_ended_by_the_environment(data: st.DataObject) -> None:
    """Few words of several spellings; servers that say tokens or not; answers that the environment drops,
    ends or spells again.
    """
    spellings = {5: [5], 6: [6], 56: [5, 6], 7: [7]}
    words = st.lists(st.sampled_from(sorted(spellings)), min_size=1, max_size=3)
    heard, rows, truth, version = [], [], [], 0
    for _ in range(data.draw(st.integers(1, 5))):
        version += data.draw(st.integers(0, 1))
        tokens, with_tokens = data.draw(words), data.draw(st.booleans())
        text = "".join(map(str, tokens))
        prompt = PROMPT if data.draw(st.booleans()) else None
        ended = [*tokens, 2] if data.draw(st.booleans()) else tokens
        heard.append(chat(text, version, ended if with_tokens else None, prompt if with_tokens else None))
        if data.draw(st.booleans()):
            continue  # dropped
        row = (
            list(tokens)
            if data.draw(st.booleans())
            else [56 if pair == "56" else int(pair) for pair in _canonical(text)]
        )
        row += [2] * data.draw(st.integers(0, 1))
        rows.append((PROMPT, row))
        truth.append(version)
    if not rows:
        return
    stamped = stamp(group(*rows), ledger_of(*heard), 0, version)
    for stamps, real in zip(column(stamped) if stamped.column else [], truth, strict=bool(stamped.column)):
        assert set(stamps) <= {-1, real}
    assert stamped.oldest <= min(truth) <= max(truth) <= stamped.newest


def _canonical(text: str) -> list[str]:
    return text.replace("56", "x").replace("", " ").replace("x", "56").split()


def test_answers_that_begin_alike_are_not_compared_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls of tools begin with the same twenty tokens. Comparing each run with each answer took seconds of
    the event loop.
    """
    looked = 0

    class Counted(versions.Heard):
        @property
        def length(self) -> int:
            nonlocal looked
            looked += 1
            return super().length

    monkeypatch.setattr(versions, "Heard", Counted)
    chance, heard, parts, turns = random.Random(1), versions.Ledger(), [], 200
    for turn in range(turns):
        output = [*range(20), *(chance.randrange(1000) for _ in range(30))]
        heard.note(completions_in(under([chance.randrange(1000)], output, turn)))
        parts += [[1, 2, 3], output]
    stamped = stamp(group(tuple(parts)), heard, 0, turns)
    assert column(stamped)[0] == [version for turn in range(turns) for version in [-1] * 3 + [turn] * 50]
    assert looked < 20 * turns
