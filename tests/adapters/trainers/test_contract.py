"""The comparison that all trainers' losses are held to is red for one token, one mask, one value, one row."""

from dataclasses import replace

import numpy as np
import pytest

from shmbridge.testing.fixtures import loss_matrix
from tests.trainers.contract import Seen, compare, scored, without, without_truncated

GROUPS = loss_matrix()


def of(row) -> Seen:
    """A row as a loss without faults gets it."""
    logprobs = np.full(len(row.tokens), np.nan) if row.logprobs is None else row.logprobs
    return Seen(row.tokens, row.trained, row.advantages, logprobs)


TRAINED = [of(row) for each in GROUPS if each.split == "train" for row in each.rows if row.trained.any()]
PROMPT = of(next(row for each in GROUPS for row in each.rows if not row.trained.any()))
EXAM = of(next(each for each in GROUPS if each.split == "eval").rows[0])


def shifted(field):
    return lambda row: [replace(row, **{field: np.roll(getattr(row, field), 1)})]


def changed(field, value, at=0):
    """One trained token's value is another one; at=-1: that of the token after the last trained one."""

    def change(row):
        values = getattr(row, field).copy()
        values[np.flatnonzero(row.mask)[at]] = value
        return [replace(row, **{field: values})]

    return change


FAULTS = {
    **{f"{field} shifted": shifted(field) for field in ("tokens", "mask", "advantages", "old_logprobs")},
    "another token": changed("tokens", 63),
    "a token more is trained": lambda row: [replace(row, mask=row.mask | (np.arange(len(row.mask)) == 0))],
    "a token less is trained": changed("mask", False, -1),
    "another advantage": changed("advantages", 0.125),
    "no number as an advantage": changed("advantages", np.nan),
    "another log-probability": changed("old_logprobs", -0.125),
    "a log-probability is lost": changed("old_logprobs", np.nan, -1),
    "a row is missing": lambda row: [],
    "a row comes twice": lambda row: [row, row],
    "a row of a prompt only is trained": lambda row: [row, replace(PROMPT, mask=PROMPT.tokens > 0)],
    "a row of an evaluation": lambda row: [row, EXAM],
    "a row that was never put": lambda row: [row, replace(row, tokens=np.append(row.tokens, 1))],
}


def test_what_was_put_is_right():
    found = compare(GROUPS, TRAINED)
    assert found.all_are_right()
    assert (found.rows, found.old_logprobs) == (35, 0.0), (
        "of 40: one is a prompt only, four are of an evaluation"
    )
    padding = Seen(np.zeros(3), np.zeros(3), np.zeros(3), None)
    assert compare(GROUPS, [padding, *TRAINED[::-1]]) == found


@pytest.mark.parametrize("fault", FAULTS)
def test_one_fault_is_seen_in_whatever_row_it_is(fault):
    for at, row in enumerate(TRAINED):
        if "log" in fault and np.isnan(row.old_logprobs).all():  # the trainer has its own in their place
            row = replace(row, own_logprobs=row.advantages, old_logprobs=row.advantages)
            assert compare(GROUPS, [*TRAINED[:at], row, *TRAINED[at + 1 :]]).all_are_right(), at
        faulty = [*TRAINED[:at], *FAULTS[fault](row), *TRAINED[at + 1 :]]
        assert not compare(GROUPS, faulty).all_are_right(), at


@pytest.mark.parametrize(
    "expected",
    [without(GROUPS, "equal scores"), without_truncated(GROUPS), scored(GROUPS, lambda scores: scores)],
)
def test_what_a_setting_leaves_out_or_makes_anew_is_not_what_was_put(expected):
    assert not compare(expected, TRAINED).all_are_right()
