"""A short run of step_fuzz.py, and turns that once led to a fault: it does no harm where somebody stops."""

import pytest
from short_run import run, run_until
from stepping import turns_of

# Each turn stops its actor before the call that it names; those without a call go to their ends.
HELD = {
    "an observer maps a lane while it grows": (
        "birth",
        "one:fallocate*3 observer:mmap one:sched_yield observer:",
    ),
    "a consumer maps a lane while it grows": (
        "birth",
        "two:fallocate*5 two:mmap one:fallocate*3 two:sched_yield hub:mmap one:sched_yield hub:",
    ),
    "a consumer opens while a lane grows": (
        "opening",
        "one:fallocate*4 hub:getdents64*2 hub:mmap one:sched_yield hub:",
    ),
    "a sweeper measures a lane of which nothing is reserved yet": (
        "leaving",
        "one:flock*2 passer:getdents64*2 passer:fcntl one:sched_yield passer:",
    ),
    "a sweeper measures a lane while it grows": (
        "leaving",
        "one:fallocate*3 passer:getdents64*2 passer:fcntl one:sched_yield passer:",
    ),
    "a writer measures weights that it will replace before they are there": (
        "weights",
        "other:openat*3 one:flock other:fcntl one:sched_yield other:",
    ),
    "a writer maps weights while they grow": (
        "one model",
        "one:fallocate*3 two:openat*2 two:mmap two:fcntl one:sched_yield two:",
    ),
}


def enough(tally):
    scenes = [count for name, count in tally.items() if name.startswith("plays of")]
    early = [tally.get(f"{each} mapped too early", 0) for each in ("hub", "observer")]
    return len(scenes) == 9 and min(early) >= 20 and tally["kills"] >= 2


@pytest.mark.timeout(900)
def test_step_fuzz():
    run_until(enough, "step_fuzz.py", "--seed", 1, seconds=45)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("held", HELD, ids=lambda held: held.replace(" ", "-"))
def test_nothing_goes_wrong_when(held):
    """On a busy machine a thread of an actor may do its part in another turn: then it is played again."""
    scene, turns = HELD[held]
    for _ in range(8):
        code, tally, said = run("step_fuzz.py", "--scene", scene, "--turns", turns)
        assert code == 0, said
        played = zip(turns_of(turns), tally["played"], strict=False)
        if all(not turn.call or stopped.endswith(f": {turn.call})") for turn, stopped in played):
            return
    raise AssertionError(f"never played so: {said}")


def test_turns_are_read_as_they_are_written():
    text = "one:mmap two:fallocate*3 hub:*17! observer: other:futex! hub:! one:~20 two:~5!"
    assert " ".join(map(str, turns_of(text))) == text
    with pytest.raises(ValueError, match="'one' is not a turn"):
        turns_of("two: one")
