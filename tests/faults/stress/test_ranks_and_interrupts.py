"""Short runs of ranks_fuzz.py and interrupt_fuzz.py; a planted lost record is found."""

import pytest
from short_run import run, run_until


def every_pair_was_killed(tally):
    return all(counts["rank_kills"] >= 1 and counts["records"] > 50 for counts in tally["pairs"].values())


@pytest.mark.timeout(400)
def test_ranks_of_all_modes():
    run_until(every_pair_was_killed, "ranks_fuzz.py", "--seed", 1, seconds=14)


@pytest.mark.timeout(400)
def test_interrupts_in_every_way_of_reading():
    run_until(lambda tally: tally["counts"]["interrupts"] > 500, "interrupt_fuzz.py", "--seed", 1, seconds=18)


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
