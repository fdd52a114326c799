"""The arithmetic of restarts, over a clock of the test's own."""

from shmbridge.launch.config import Restart
from shmbridge.launch.supervisor import Backoff


def delays(rule, lives):
    """Returns its delays for deaths at the end of each life, restarted after each delay."""
    backoff, now, found = Backoff(rule), 1000.0, []
    for life in lives:
        delay = backoff.after(started=now, ended=now + life)
        found.append(delay)
        now += life + (delay or 0.0)
    return found


def test_delays_double_up_to_the_longest():
    assert delays(Restart(max_restarts=100), [1.0] * 9) == [0.5, 1, 2, 4, 8, 16, 30, 30, 30]


def test_a_long_life_starts_the_delays_afresh():
    assert delays(Restart(), [1.0, 1.0, 59.9, 60.0, 1.0]) == [0.5, 1, 2, 0.5, 1]


def test_patience_ends_after_so_many_restarts():
    assert delays(Restart(max_restarts=3), [1.0] * 4) == [0.5, 1, 2, None]
    assert delays(Restart(max_restarts=0), [1.0]) == [None]


def test_restarts_older_than_the_window_are_forgiven():
    assert delays(Restart(max_restarts=2, window=100, reset_after=50), [10, 10, 99, 99, 99]) == [
        0.5,
        1,
        0.5,
        0.5,
        0.5,
    ]
