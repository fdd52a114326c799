"""Ends whose clocks differ, as in containers with time namespaces: records flow; a rank that cannot be
numbered is refused.
"""

import subprocess

import pytest

BEHIND_S, AHEAD_S = -5, 1_000_000


@pytest.fixture
def elsewhere(not_root, start):
    """Starts a role where CLOCK_MONOTONIC differs by so many seconds."""

    def run(ahead_s: int, role: str, *arguments: object):
        before = ("unshare", "--time", "--fork", "--kill-child", "--monotonic", str(ahead_s))
        if subprocess.run([*before, "true"], capture_output=True).returncode != 0:
            pytest.skip("no time namespace can be made here")
        return start(role, *arguments, before=before)

    return run


@pytest.mark.parametrize("ahead_s", [BEHIND_S, AHEAD_S])
def test_records_flow_between_time_namespaces(ahead_s, elsewhere, consumer) -> None:
    child = elsewhere(ahead_s, "produce", 5, 3)
    child.step("put")
    for sequence in range(3):
        with consumer.get(5) as record:
            assert record["tokens"][0].tolist() == [5, sequence]
    child.tell(9)
    with consumer.get(5) as record:
        assert record["tokens"][0].tolist() == [5, 9]


@pytest.mark.parametrize(("ahead_s", "refused"), [(BEHIND_S, False), (AHEAD_S, True)])
def test_a_rank_whose_clock_is_ahead_is_refused_with_the_reason(
    ahead_s, refused, elsewhere, consumer, make_producer
) -> None:
    """Incarnations of ranks are numbered by the clock, so that one from the future would count as the latest
    for ever.
    """
    make_producer().put({"tokens": [[1, 2]]})
    consumer.serve_ranks(world_size=1, groups=1)
    (said,) = elsewhere(ahead_s, "read_share").rest()
    if refused:
        assert (said["error"], "in the future" in said["message"]) == ("RequestRefused", True), said
        assert "CLOCK_MONOTONIC" in said["hint"]
    else:
        assert said == {"step": "read", "error": None, "tokens": [1, 2]}
