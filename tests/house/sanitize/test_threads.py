"""The C core among threads that yield and die at its fail-points, under sanitizers.

One planted error for each way of showing them proves that the checks can fail.
"""

import pytest
from harness import SHAPES, CannotRun, build, run
from planted import PLANTED, check


@pytest.mark.parametrize("sanitizer", ["thread", "address"])
def test_nothing_is_reported_lost_or_torn(sanitizer, tmp_path):
    try:
        program = build(sanitizer, tmp_path)
        for name, arguments in SHAPES.items():
            outcome = run(program, "--seconds", "1", *arguments)
            assert outcome.shown == "nothing", f"{name}: {outcome.output}"
    except CannotRun as why:
        pytest.skip(str(why))


@pytest.mark.parametrize(
    "name", ["commit stored relaxed", "hand-out one too low", "hub-wake: flag loaded before tail"]
)
def test_a_planted_error_is_shown(name):
    try:
        right, shown = check(name, with_model=False)
    except CannotRun as why:
        pytest.skip(str(why))
    assert right, f"{name}: shown by {shown}, not by {PLANTED[name].shown_by}"
