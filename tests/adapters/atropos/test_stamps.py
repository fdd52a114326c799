"""Rows of tokens looked up among the answers a worker heard: which are found, which are not, and which are
ambiguous and so left open.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from stamped_rows import BEGAN, LONG, NOW, PROMPT, bounds, column, generated, group, ledger_of, said, under

from shmbridge.producers.atropos.versions import CONTRADICTORY, NOT_TAKEN, UNCLEAR, Ledger, stamp
from shmbridge.producers.rollout.sampling import UNKNOWN, Completion, completions_in

# --- found ------------------------------------------------------------------------------------------------


def test_every_token_has_the_version_of_its_span() -> None:
    ledger = ledger_of(generated(PROMPT, ([5, 6, 7, 8], said((3, 0, 3), (4, 3, 4))), ([6], said((4, 0, 1)))))
    stamped = stamp(group((PROMPT, [5, 6, 7, 8]), (PROMPT, [6])), ledger, BEGAN, NOW)
    assert column(stamped) == [[-1, -1, -1, 3, 3, 3, 4], [-1, -1, -1, 4]]
    assert bounds(stamped) == (3, 4), "what the sampler said wins over what was published"
    assert not stamped.unclear


def test_several_turns_have_a_stretch_each() -> None:
    first, second = [*PROMPT, 5, 6], [*PROMPT, 5, 6, 9, 9, 4]
    ledger = ledger_of(
        under(PROMPT, [5, 6], 3), under([*first, 9, 9], [4], 5), under([*second, 9], [5, 6], 6)
    )
    stamped = stamp(group((PROMPT, [5, 6], [9, 9], [4], [9], [5, 6])), ledger, BEGAN, NOW)
    assert column(stamped) == [[-1, -1, -1, 3, 3, -1, -1, 5, -1, 6, 6]]
    assert bounds(stamped) == (3, 6)


def test_sampled_tokens_that_are_not_trained_are_stamped_too() -> None:
    """Turns before the last are masked in trees of sequences."""
    ledger = ledger_of(under(PROMPT, [5, 6], 3), under([*PROMPT, 5, 6, 9], [4], 5))
    stamped = stamp(group(([*PROMPT, 5, 6, 9], [4])), ledger, BEGAN, NOW)
    assert column(stamped) == [[-1, -1, -1, 3, 3, -1, 5]]


def test_a_turn_whose_prompt_was_tokenised_again_is_found_where_training_begins() -> None:
    ledger = ledger_of(under(PROMPT, [5, 6], 3), under([1, 1, 1, 1], [4, 4], 5))
    stamped = stamp(group(([*PROMPT, 5, 6, 9], [4, 4])), ledger, BEGAN, NOW)
    assert column(stamped) == [[-1, -1, -1, 3, 3, -1, 5, 5]]
    assert bounds(stamped) == (3, 5)


def test_answers_without_a_prompt_are_found() -> None:
    body = {"choices": [{"index": 0, "token_ids": [5, 6, 7], "weight_versions": said((3, 0, 1), (4, 1, 3))}]}
    stamped = stamp(group((PROMPT, [5, 6, 7])), ledger_of(body), BEGAN, NOW)
    assert column(stamped) == [[-1, -1, -1, 3, 4, 4]]


def test_turns_with_nothing_between_them_are_found() -> None:
    ledger = ledger_of(under(None, [1, 2, 3, 4], 3), under(None, [5, 6, 7, 8], 4))
    assert column(stamp(group((PROMPT, [1, 2, 3, 4, 5, 6, 7, 8])), ledger, BEGAN, NOW)) == [
        [-1, -1, -1, 3, 3, 3, 3, 4, 4, 4, 4]
    ]


@pytest.mark.parametrize(
    ("trained", "expected"),
    [
        (LONG[:20], [3] * 10 + [4] * 10),  # truncated
        ([*LONG, 2], [3] * 10 + [4] * 20 + [-1]),  # an end token added
        (LONG[:-1], [3] * 10 + [4] * 19),  # the end token dropped
        ([*LONG[:-1], 2, 1], [3] * 10 + [4] * 19 + [-1, -1]),  # the end token replaced
    ],
    ids=["cut", "added", "dropped", "replaced"],
)
@pytest.mark.parametrize("prompt", [PROMPT, None, [1, *PROMPT]])
def test_an_answer_that_was_cut_or_given_another_end_is_found(
    trained: list[int], expected: list[int], prompt: list[int] | None
) -> None:
    ledger = ledger_of(generated(prompt, (LONG, said((3, 0, 10), (4, 10, 30)))))
    stamped = stamp(group((PROMPT, trained)), ledger, BEGAN, NOW)
    assert column(stamped) == [[-1, -1, -1, *expected]]
    assert bounds(stamped) == (3, 4)


def test_equal_answers_of_one_version_are_no_trouble() -> None:
    ledger = ledger_of(under(PROMPT, [5], 3), under(PROMPT, [5], 3))
    stamped = stamp(group((PROMPT, [5]), (PROMPT, [5])), ledger, BEGAN, NOW)
    assert (bounds(stamped), stamped.unclear) == ((3, 3), {})


@pytest.mark.parametrize("form", [np.array, tuple, lambda row: np.array(row, np.int64)])
def test_rows_are_found_in_any_form(form: Any) -> None:
    given_group = group((PROMPT, [5, 6]))
    for name in ("tokens", "masks"):
        given_group[name] = [form(row) for row in given_group[name]]
    assert column(stamp(given_group, ledger_of(under(PROMPT, [5, 6], 3)), BEGAN, NOW)) == [[-1, -1, -1, 3, 3]]


# --- not found --------------------------------------------------------------------------------------------


def test_stamps_without_any_version_leave_all_as_before() -> None:
    for ledger in (
        None,
        Ledger(),
        ledger_of(generated(PROMPT, ([5], None))),
        ledger_of(under(PROMPT, [5], "default")),
    ):
        stamped = stamp(group((PROMPT, [5])), ledger, NOW, BEGAN)
        assert (bounds(stamped), stamped.column, stamped.unclear) == ((BEGAN, NOW), None, {})


def test_no_row_is_read_where_no_answer_names_a_version() -> None:
    class Row(list[int]):
        def __iter__(self) -> Any:
            raise AssertionError("read")

    unread = {"tokens": [Row([1, 2])], "masks": [Row([1, 2])]}
    assert bounds(stamp(unread, ledger_of(generated(PROMPT, ([5], None))), BEGAN, NOW)) == (BEGAN, NOW)


def test_a_row_that_is_not_found_is_as_old_as_its_worker() -> None:
    """The second row matches no answer, and every answer has a row of its own."""
    stamped = stamp(group((PROMPT, [5]), (PROMPT, [6])), ledger_of(under(PROMPT, [5], 60)), BEGAN, NOW)
    assert column(stamped) == [[-1, -1, -1, 60], [-1, -1, -1, -1]]
    assert bounds(stamped) == (BEGAN, NOW)
    lagging = stamp(group((PROMPT, [5]), (PROMPT, [6])), ledger_of(under(PROMPT, [5], 3)), BEGAN, NOW)
    assert bounds(lagging) == (3, NOW)


def test_a_row_may_be_an_answer_that_was_not_found() -> None:
    """Tokenised again, the row has other tokens; its age is that of the answers that the worker got."""
    body = {"choices": [{}, {}], "weight_version": 61, "oldest_weight_version": 60}
    stamped = stamp(group((PROMPT, [5]), (PROMPT, [6])), ledger_of(body), BEGAN, NOW)
    assert (bounds(stamped), stamped.column) == ((60, 61), None)


@pytest.mark.parametrize("unknown", [generated(PROMPT, ([9], None)), "nothing", {"choices": [{}]}])
def test_an_answer_of_unknown_version_may_be_of_any(unknown: Any) -> None:
    body = {"choices": [{}, {}], "weight_version": 61, "oldest_weight_version": 60}
    assert bounds(stamp(group((PROMPT, [5])), ledger_of(body, unknown), BEGAN, NOW)) == (BEGAN, NOW)


def test_the_newest_alone_bounds_the_newest() -> None:
    sglang = [{"meta_info": {"weight_version": "61"}}, {"meta_info": {"weight_version": "62"}}]
    stamped = stamp(group((PROMPT, [5]), (PROMPT, [6])), ledger_of(sglang), BEGAN, NOW)
    assert (bounds(stamped), stamped.column) == ((BEGAN, 62), None)
    assert (
        stamp(group((PROMPT, [5])), ledger_of({"meta_info": {"weight_version": "3"}}), BEGAN, NOW).oldest == 3
    )


def test_spans_of_unknown_version_leave_their_tokens_open() -> None:
    ledger = ledger_of(generated(PROMPT, ([5, 6, 7], said(("default", 0, 1), (60, 1, 3)))))
    stamped = stamp(group((PROMPT, [5, 6, 7])), ledger, BEGAN, NOW)
    assert (column(stamped), bounds(stamped)) == ([[-1, -1, -1, -1, 60, 60]], (BEGAN, NOW))


def test_a_few_tokens_in_common_are_no_find() -> None:
    ledger = ledger_of(under(None, LONG, 3), under(None, [5, 6, 7, 8, 9, 9], 4), under(None, [4], 5))
    rows = [LONG[:10], [*LONG[:20], 1, 2], [5, 6, 1], [5, 6, 7, 8], [4, 1, 2]]
    assert stamp(group(*((PROMPT, row) for row in rows)), ledger, BEGAN, NOW).column is None


def test_the_same_tokens_in_another_order_are_another_answer() -> None:
    ledger = ledger_of(under(PROMPT, [5, 6], 3))
    for row in ([6, 5], [4, 7]):
        assert stamp(group((PROMPT, row)), ledger, BEGAN, NOW).column is None
    assert stamp(group((PROMPT[::-1], [5], [6])), ledger, BEGAN, NOW).column is None


def test_a_worker_that_sends_twice_is_answered_in_between() -> None:
    ledger = ledger_of(under(PROMPT, [5], 3))
    assert bounds(stamp(group((PROMPT, [5])), ledger, BEGAN, NOW)) == (3, 3)
    ledger.note(completions_in(under(PROMPT, [6], 4)))
    assert column(stamp({"tokens": [[*PROMPT, 6]]}, ledger, BEGAN, NOW)) == [[-1, -1, -1, 4]]


def test_rows_without_masks_match_only_whole_answers_from_the_beginning() -> None:
    bare = {"tokens": [[*PROMPT, 5, 6]]}
    assert column(stamp(bare, ledger_of(under(PROMPT, [5, 6], 3)), BEGAN, NOW)) == [[-1, -1, -1, 3, 3]]


@pytest.mark.parametrize(
    "tokens", [None, [], [[]], [["x"]], [[1.5]], [[1 << 40]], 3, "text", [3], [[1], None], [[[1]]]]
)
def test_values_that_are_no_tokens_are_left_alone(tokens: Any) -> None:
    for masks in (None, tokens, [[1]]):
        assert bounds(
            stamp({"tokens": tokens, "masks": masks}, ledger_of(under([1], [2], 3)), BEGAN, NOW)
        ) == (BEGAN, NOW)


# --- never guessed ----------------------------------------------------------------------------------------


def test_equal_answers_of_two_versions_are_unclear() -> None:
    ledger = ledger_of(under(PROMPT, [5, 6], 3), under(PROMPT, [5, 6], 4), under(PROMPT, [7], 5))
    stamped = stamp(group((PROMPT, [5, 6]), (PROMPT, [7])), ledger, BEGAN, NOW)
    assert column(stamped) == [[-1] * 5, [-1, -1, -1, 5]]
    assert bounds(stamped) == (3, 5)
    assert stamped.unclear == {UNCLEAR: 1}


def test_the_length_that_is_trained_as_a_whole_is_taken_of_two() -> None:
    ledger = ledger_of(under(PROMPT, [5], 3), under(PROMPT, [5, 6, 7], 4))
    stamped = stamp(group((PROMPT, [5], [6, 7]), (PROMPT, [5, 6, 7])), ledger, BEGAN, NOW)
    assert column(stamped) == [[-1, -1, -1, 3, -1, -1], [-1, -1, -1, 4, 4, 4]]
    assert not stamped.unclear
    neither = stamp(
        group(([*PROMPT, 5, 6], [1])), ledger_of(under(PROMPT, [5], 3), under(PROMPT, [5, 6], 3)), BEGAN, NOW
    )
    assert column(neither) == [[-1, -1, -1, 3, -1, -1]], (
        "the second token was sampled after the first, or is the environment's"
    )


def test_ambiguous_answers_are_believed_where_they_agree() -> None:
    ledger = ledger_of(*(generated(PROMPT, ([5, 6], said((3, 0, 1), (version, 1, 2)))) for version in (3, 4)))
    assert column(stamp(group((PROMPT, [5, 6])), ledger, BEGAN, NOW)) == [[-1, -1, -1, 3, -1]]


def test_a_cut_row_that_two_answers_begin_with_is_unclear() -> None:
    ledger = ledger_of(under(PROMPT, [*LONG, 1], 3), under(PROMPT, [*LONG, 2], 4))
    stamped = stamp(group((PROMPT, LONG)), ledger, BEGAN, NOW)
    assert (stamped.column, bounds(stamped), stamped.unclear) == (None, (3, 4), {UNCLEAR: 1})


@pytest.mark.parametrize(
    "spans",
    [
        said((3, 0, 2), (4, 1, 3)),
        said((3, 0, 4)),
        said((3, -1, 3)),
        said((3, 2, 1)),
        [3],
        "3",
        7,
        [{"version": "3"}],
    ],
)
def test_spans_that_contradict_each_other_are_counted_once(spans: Any) -> None:
    ledger = ledger_of(generated(PROMPT, ([5, 6, 7], spans)), under(PROMPT, [9], 60))
    mine = group((PROMPT, [5, 6, 7]))
    stamped = stamp(mine, ledger, BEGAN, NOW)
    assert (stamped.column, bounds(stamped), stamped.unclear) == (None, (BEGAN, NOW), {CONTRADICTORY: 1})
    assert not stamp(mine, ledger, BEGAN, NOW).unclear


def test_spans_for_another_number_of_answers_are_believed_for_none() -> None:
    body = generated(PROMPT, ([5], None), ([6], None)) | {
        "weight_versions": [said((3, 0, 1))],
        "weight_version": 3,
    }
    assert stamp(group((PROMPT, [5])), ledger_of(body, under([1], [1], 2)), BEGAN, NOW).unclear == {
        CONTRADICTORY: 2
    }


def test_a_ledger_records_nothing_after_its_worker_has_ended() -> None:
    ledger = ledger_of(under(PROMPT, [5], 3))
    ledger.close()
    ledger.note(completions_in(under(PROMPT, [6], 4)))
    assert bounds(stamp(group((PROMPT, [5])), ledger, BEGAN, NOW)) == (3, 3)
    assert stamp(group((PROMPT, [6])), ledger, BEGAN, NOW).column is None


def test_the_same_few_tokens_again_and_again_are_all_accounted_for() -> None:
    """The rows are a game's moves and do not begin with the prompts that were answered."""
    turns = 50
    move = generated(PROMPT, *[([5, 6], said((3, 0, 2)))] * turns)
    stamped = stamp(
        group(([1], [5, 6]), *[([1, 2], [5, 6])] * (turns - 1)),
        ledger_of(move, under(PROMPT, [5, 7], 9)),
        BEGAN,
        NOW,
    )
    assert {version for row in column(stamped) for version in row[-2:]} == {3}
    assert bounds(stamped) == (3, 3)
    one_more = group(([1], [5, 6]), ([1], [8]))
    assert bounds(stamp(one_more, ledger_of(move, under(PROMPT, [4, 4], 9)), BEGAN, NOW)) == (3, 9)


# --- the environment's own --------------------------------------------------------------------------------


def test_own_versions_of_the_environment_win() -> None:
    own = [[-1, -1, -1, 8]]
    stamped = stamp(group((PROMPT, [5]), token_versions=own), ledger_of(under(PROMPT, [5], 3)), BEGAN, NOW)
    assert stamped.column is own
    assert bounds(stamped) == (8, 8)


def test_trained_tokens_that_the_environment_does_not_stamp_are_bounded_by_the_worker() -> None:
    assert bounds(stamp(group((PROMPT, [5, 6]), token_versions=[[-1, -1, -1, 8, -1]]), None, BEGAN, NOW)) == (
        8,
        NOW,
    )
    assert bounds(stamp(group((PROMPT, [5, 6]), token_versions=[[-1] * 5]), None, BEGAN, NOW)) == (BEGAN, NOW)


@pytest.mark.parametrize("own", [[[8]], [[8, 8, 8, -2]], 3, [], [["x"] * 4], [[1.5] * 4], "8888"])
def test_values_that_are_no_versions_are_counted_and_not_taken(own: Any) -> None:
    stamped = stamp(group((PROMPT, [5]), token_versions=own), ledger_of(under(PROMPT, [5], 3)), BEGAN, NOW)
    assert (bounds(stamped), stamped.unclear) == ((3, 3), {NOT_TAKEN: 1})


# --- at random --------------------------------------------------------------------------------------------


@settings(deadline=None)
@given(st.data())
def test_rollouts_of_several_turns_under_changing_weights(data: st.DataObject) -> None:
    """Few words, so that answers often begin alike; every token that is stamped has the version it was
    sampled under.
    """
    words = st.lists(st.integers(0, 2), min_size=1, max_size=6)
    ledger, truth, rows, version = Ledger(), [], [], 1
    for _ in range(data.draw(st.integers(1, 4))):
        parts: list[list[int]] = [data.draw(words)]
        versions = [-1] * len(parts[0])
        for _ in range(data.draw(st.integers(1, 3))):
            output = data.draw(words)
            at = data.draw(st.integers(0, len(output)))
            spans = said((version, 0, at), (version + 1, at, len(output)))
            ledger.note(
                completions_in(generated([token for part in parts for token in part], (output, spans)))
            )
            versions += [version] * at + [version + 1] * (len(output) - at)
            version += 1
            between = data.draw(words)
            parts += [output, between]
            versions += [-1] * len(between)
        rows.append(tuple(parts))
        truth.append(versions)
    stamped = stamp(group(*rows), ledger, 0, version + 1)
    sampled = [each for row in truth for each in row if each >= 0]
    assert stamped.oldest <= min(sampled) <= max(sampled) <= stamped.newest
    found = column(stamped) if stamped.column else [[-1] * len(row) for row in truth]
    rows_of_both = zip(found, truth, strict=True)
    pairs = [pair for mine, real in rows_of_both for pair in zip(mine, real, strict=True) if pair[1] >= 0]
    assert all(each in (-1, real) for each, real in pairs)
    assert stamped.unclear or all(each == real for each, real in pairs)


@settings(deadline=None)
@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
        lambda inner: (
            st.lists(inner)
            | st.dictionaries(
                st.sampled_from(
                    [
                        "choices",
                        "weight_version",
                        "weight_versions",
                        "token_ids",
                        "prompt_token_ids",
                        "meta_info",
                        "version",
                        "start",
                        "end",
                        "prompt_logprobs",
                        "metadata",
                        "oldest_weight_version",
                    ]
                ),
                inner,
            )
        ),
    )
)
def test_no_answer_of_any_form_is_an_error(body: Any) -> None:
    ledger = ledger_of(body)
    stamp(group((PROMPT, [5])), ledger, BEGAN, NOW)


# --- forms of answers -------------------------------------------------------------------------------------


def forms() -> dict[str, Any]:
    from openai.types import Completion
    from openai.types.chat import ChatCompletion

    spans = said((3, 0, 2))
    choice = {"index": 0, "finish_reason": "stop", "token_ids": [5, 6]}
    chat = {"id": "a", "object": "chat.completion", "created": 1, "model": "m", "prompt_token_ids": PROMPT}
    told = {"weight_version": 3, "oldest_weight_version": 3}
    text = {"id": "a", "object": "text_completion", "created": 1, "model": "m"}
    message = {"role": "assistant", "content": "x"}
    return {
        "generate": generated(PROMPT, ([5, 6], spans)),
        "generate, no spans": generated(PROMPT, ([5, 6], None)) | told,
        "vllm": {
            "request_id": "a",
            "choices": [choice | {"weight_versions": spans}],
            "prompt_token_ids": PROMPT,
        },
        "chat": ChatCompletion.model_validate(chat | told | {"choices": [choice | {"message": message}]}),
        "chat as JSON": json.loads(json.dumps(chat | told | {"choices": [choice | {"message": message}]})),
        "text": Completion.model_validate(
            text | told | {"choices": [choice | {"text": "x", "prompt_token_ids": PROMPT}]}
        ),
    }


@pytest.mark.parametrize("form", ["generate", "generate, no spans", "vllm", "chat", "chat as JSON", "text"])
def test_forms_that_name_tokens_and_versions(form: str) -> None:
    (answer,) = completions_in(forms()[form])
    assert (answer.prompt.tolist(), answer.output.tolist()) == (PROMPT, [5, 6])
    assert (answer.spans, answer.oldest, answer.newest) == (((3, 0, 2),), 3, 3)


def test_forms_that_name_less() -> None:
    (sglang,) = completions_in({"choices": [{}], "metadata": {"weight_version": "7"}})
    assert (sglang.oldest, sglang.newest) == (None, 7)
    (back,) = completions_in({"choices": [{}], "weight_version": 4, "oldest_weight_version": 9})
    assert (back.oldest, back.newest) == (4, 9), "a learner that went back to a checkpoint"
    assert completions_in(object()) == [UNKNOWN]
    assert completions_in({"completion_ids": [[1]]}) == [UNKNOWN]
    assert completions_in(generated(PROMPT, ([], []))) == []
    assert completions_in(generated(PROMPT, ([5], None), prompt_logprobs=[None])) == [], "a prompt was scored"
    assert isinstance(completions_in({"choices": [{}]})[0], Completion)
