"""Where steps end: found in the row's own tokens, inside trained spans, whatever the tokenizer."""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Callable
from typing import Any

import pytest

from shmbridge.errors import BadArgument
from shmbridge.producers.rewards import (
    RewardsFailed,
    SplitByTag,
    SplitByToken,
    SplitByTurn,
    StepRow,
    split_by_blank_line,
)
from shmbridge.producers.rewards.steps import token_rows, trained_spans
from shmbridge.producers.rollout import TokenText

KINDS = ["characters", "bytes", "metaspace"]


def texts_of(tokenizer: Any, tokens: list[int], ends: list[int]) -> list[str]:
    """The text of each step, by decoding the row up to each end."""
    before = ["", *(decode(tokenizer, tokens[:end]) for end in ends)]
    return [now[len(then) :] for then, now in itertools.pairwise(before)]


def decode(tokenizer: Any, tokens: list[int]) -> str:
    return tokenizer.decode(tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False)


@pytest.mark.parametrize("kind", KINDS)
def test_steps_end_after_their_blank_line(kind: str, make_tokenizer: Callable[[str], Any]) -> None:
    tokenizer = make_tokenizer(kind)
    parts = ["step one.\n\n", "step two.\n\n\n", "three"]
    tokens = [token for part in parts for token in tokenizer.encode(part, add_special_tokens=False)]
    ends = split_by_blank_line(tokenizer)(tokens, [(0, len(tokens))])
    assert len(ends) == 3
    assert ends[-1] == len(tokens)
    assert "".join(texts_of(tokenizer, tokens, ends)) == decode(tokenizer, tokens)
    assert [text.strip() for text in texts_of(tokenizer, tokens, ends)] == ["step one.", "step two.", "three"]


@pytest.mark.parametrize("kind", KINDS)
def test_what_tokens_add_is_the_text_for_random_tokens(
    kind: str, make_tokenizer: Callable[[str], Any]
) -> None:
    """Also for tokens that no text is encoded to: parts of characters, special ones in between."""
    tokenizer, rng = make_tokenizer(kind), random.Random(5)
    text = TokenText(tokenizer)
    for _ in range(100):
        tokens = [rng.randrange(len(tokenizer)) for _ in range(rng.randrange(1, 25))]
        pieces = text.pieces(tokens)
        assert len(pieces) == len(tokens)
        assert "".join(pieces) == decode(tokenizer, tokens)
        ends, shown = text.ends(tokens, special=False), text.text(tokens, special=False)
        assert (sorted(ends), ends[-1]) == (ends, len(shown))


def test_a_character_spread_over_tokens_belongs_to_the_last_of_them(
    make_tokenizer: Callable[[str], Any],
) -> None:
    tokenizer = make_tokenizer("bytes")
    (snow,) = tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str("\u2603")
    tokens = tokenizer.convert_tokens_to_ids([*snow[0], "a"])
    assert TokenText(tokenizer).pieces(tokens) == ["", "", "\u2603", "a"]
    assert SplitByTag(tokenizer, "\u2603")([*tokens, *tokens], [(0, 8)]) == [7, 8]


def test_a_tag_that_begins_inside_a_token_ends_the_step_with_that_token(
    make_tokenizer: Callable[[str], Any],
) -> None:
    tokenizer = make_tokenizer("bytes")
    tokens = tokenizer.encode("we add two and two.\n\nthat is", add_special_tokens=False)
    (end, whole) = split_by_blank_line(tokenizer)(tokens, [(0, len(tokens))])
    assert decode(tokenizer, tokens[:end]).endswith(".\n\n")
    assert "\n\n" not in decode(tokenizer, tokens[: end - 1])
    assert whole == len(tokens)


def test_steps_lie_in_trained_spans(policy: Any) -> None:
    """A tag in the prompt, or in what a tool says, ends no step; a turn ends one."""
    prompt, first, tool, second = (policy.encode(text) for text in ("a\n\nb", "c\n\nd", "e\n\nf", "g"))
    tokens = [*prompt, *first, *tool, *second]
    spans = [(4, 8), (12, 13)]
    assert split_by_blank_line(policy)(tokens, spans) == [7, 8, 13]
    row = StepRow.of(tokens, spans, [7, 8, 13], None, TokenText(policy))
    assert (row.starts, row.step_texts, row.prompt_text) == ((4, 7, 12), ["c\n\n", "d", "g"], "a\n\nb")


def test_what_has_no_text_is_no_step(policy: Any) -> None:
    end = policy.eos_token_id
    split = split_by_blank_line(policy)
    only = [*policy.encode("a\n\nb\n\n"), end]
    assert split(only, [(0, len(only))]) == [3, 7]  # the end of the turn belongs to the last step
    first = policy.encode("\n\na\n\nb")
    assert split(first, [(0, len(first))]) == [5, 6]
    assert split([end], [(0, 1)]) == []
    assert split([], []) == []


def test_a_tag_may_be_a_pattern_that_begins_a_step(policy: Any) -> None:
    tokens = policy.encode("step 1: a step 2: b")
    ends = SplitByTag(policy, re.compile(r"(?=step \d)"))(tokens, [(0, len(tokens))])
    assert texts_of(policy, tokens, ends) == ["step 1: a ", "step 2: b"]


@pytest.mark.parametrize("tag", ["", re.compile("")], ids=repr)
def test_an_empty_tag_is_refused(policy: Any, tag: Any) -> None:
    with pytest.raises(BadArgument, match="an empty tag"):
        SplitByTag(policy, tag)


def test_steps_by_token_and_by_turn() -> None:
    tokens, spans = [5, 9, 6, 9, 7, 1, 5, 5, 2], [(1, 6), (7, 9)]
    assert SplitByToken([9], silent=[1])(tokens, spans) == [4, 6, 9]
    assert SplitByToken([9], silent=[1, 7])(tokens, spans) == [6, 9]
    assert SplitByTurn()(tokens, spans) == [6, 9]


def test_every_form_of_rows_that_put_takes() -> None:
    import numpy as np

    rows = [[1, 2, 3], [4, 5]]
    flat = (np.array([1, 2, 3, 4, 5]), [3, 2])
    for tokens in (rows, flat, (flat[0], np.array([3, 2])), [np.array(row) for row in rows]):
        assert token_rows({"tokens": tokens}) == rows
    spans = [[(1, 3)], [(1, 2)]]
    for mask in (
        {"loss_mask": [[0, 1, 1], [0, 1]]},
        {"masks": [[-100, 2, 3], [-100, 5]]},
        {"prompt_length": [1, 1]},
        {"loss_mask": (np.array([0, 1, 1, 0, 1]), [3, 2])},
    ):
        assert trained_spans(mask, rows) == spans
    assert trained_spans({"masks": [[-100, 2], [-100, 5]]}, rows) == [[], [(1, 2)]]
    with pytest.raises(RewardsFailed, match="loss_mask, masks or prompt_length"):
        trained_spans({}, rows)
    with pytest.raises(RewardsFailed, match="'masks' has 1 rows, tokens have 2"):
        trained_spans({"masks": [[1]]}, rows)
