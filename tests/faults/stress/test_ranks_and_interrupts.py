"""Short runs of ranks_fuzz.py and interrupt_fuzz.py; a planted lost record is found."""

import pytest
from short_run import run


@pytest.mark.timeout(180)
def test_ranks_of_all_modes():
    code, tally, said = run("ranks_fuzz.py", "--seconds", "14", "--seed", "1")
    assert (code, tally["violations"]) == (0, 0), said
    for pair, counts in tally["pairs"].items():
        assert counts["rank_kills"] >= 1, f"{pair}: this was no fuzz: {said}"
        assert counts["records"] > 50, f"{pair}: this was no fuzz: {said}"


@pytest.mark.timeout(180)
def test_interrupts_in_every_way_of_reading():
    code, tally, said = run("interrupt_fuzz.py", "--seconds", "18", "--seed", "1")
    assert (code, tally["violations"]) == (0, 0), said
    assert tally["counts"]["interrupts"] > 500, "this was no fuzz: " + said


@pytest.mark.timeout(180)
def test_a_record_that_is_released_without_a_word_is_found():
    code, tally, said = run(
        "interrupt_fuzz.py", "--seconds", "2", "--seed", "1", "--ways", "poll", "--plant", "silent"
    )
    assert code == 1, said
    assert tally["counts"]["lost"] >= 1, said


@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    "command",
    [
        ("interrupt_fuzz.py", "--seconds", "3", "--ways", "poll", "--plant", "lost"),
        ("ranks_fuzz.py", "--seconds", "5", "--plant"),
        ("kill_fuzz.py", "--seconds", "1", "--producers", "2", "--json", "--plant"),
    ],
    ids=lambda command: command[0],
)
def test_records_released_without_a_count_are_found(command):
    code, tally, said = run(*command, "--seed", "1")
    assert code == 1, said
    assert tally["counts"]["miscounted"] >= 1, said
