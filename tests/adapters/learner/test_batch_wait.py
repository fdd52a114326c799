"""Waiting for batches: within limits, of which each attempt names who is missing, or for ever; interrupted
by signals.
"""

from __future__ import annotations

import contextlib
import math
import queue
import signal
import threading
import weakref
from types import SimpleNamespace

import pytest

import shmbridge
from shmbridge.consumers.feed import Drained
from shmbridge.consumers.learner.config.flags import parse
from shmbridge.consumers.learner.data import sources
from shmbridge.consumers.learner.data.sources import HubSource, NoBatch, Patience, patience_of
from shmbridge.consumers.learner.stopping import Stopped, StopSignals


class Lanes:
    """A feed whose batches the test provides; it waits as long as asked, and counts the calls."""

    paused = False
    policy_version = 0

    def __init__(self, *batches):
        self.queue = queue.SimpleQueue()
        for batch in batches:
            self.queue.put(batch)
        self.asked, self.consumer = [], self
        self.rested = self.waits = self.in_wait = 0

    @contextlib.contextmanager
    def one_wait(self):
        self.waits, self.in_wait = self.waits + 1, self.in_wait + 1
        yield
        self.in_wait -= 1

    def take(self, timeout_s):
        self.asked.append(timeout_s)
        try:
            batch = self.queue.get(timeout=timeout_s)
        except queue.Empty:
            raise shmbridge.ConsumerEmpty("nothing came") from None
        if isinstance(batch, Exception):
            raise batch
        if batch is None:
            raise Drained("drained")
        return SimpleNamespace(batch=batch)

    def give_back(self, step):
        pass

    def trained(self, steps):
        pass

    def rest(self):
        self.rested += 1

    def stats(self):
        return {"lanes_live": 0, "lanes_dead": 0, "queue_groups": 0}


def options(**limits):
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in limits.items()]
    return parse(["--bridge", "b", "--model", "m", "--steps", "1", *flags])


@pytest.fixture
def said(monkeypatch):
    lines = []
    monkeypatch.setattr(sources, "say", lines.append)
    return lines


def waited_for(lanes, stops=None, **limits):
    """Return the batches that the learner gets."""
    with HubSource(lanes, options(**limits), stops or StopSignals()).batches() as batches:
        for batch in batches:
            assert not lanes.in_wait
            yield batch


def test_batches_come_one_by_one():
    lanes = Lanes("a", "b", None)
    assert list(waited_for(lanes)) == ["a", "b"]
    assert (len(lanes.asked), lanes.rested) == (3, 1)


def test_a_limit_may_be_beyond_any_clock():
    for limits in ({"batch_timeout": math.inf}, {"batch_timeout": 0.01, "batch_retry_delay": 1e300}):
        lanes = Lanes()
        threading.Timer(0.1, lanes.queue.put, ["late"]).start()
        assert next(waited_for(lanes, **limits)) == "late"


def test_an_error_of_the_bridge_is_an_error_here():
    with pytest.raises(ValueError, match="broken"):
        next(waited_for(Lanes(ValueError("broken"))))


def test_attempts_end_and_each_says_who_is_missing(said):
    limits = {"batch_timeout": 0.05, "batch_attempts": 3, "batch_retry_delay": 0.02}
    with pytest.raises(NoBatch) as given_up:
        next(waited_for(Lanes(), **limits))
    assert len(said) == 2
    assert "attempt 1 of 3" in said[0]
    assert "no environment has a lane, 0 of 16 groups are there; the next begins in 0.0 s" in said[0]
    for part in ("3 of 3 attempts of 0.05 s", "no environment has a lane", "--max-wait-time"):
        assert part in str(given_up.value)


def test_the_limit_over_all_attempts_counts_too(said):
    with pytest.raises(NoBatch, match="1 of 1000 attempts"):  # 0.04 s, and the delay up to the limit
        next(waited_for(Lanes(), batch_timeout=0.04, batch_attempts=1000, max_wait_time=0.1))


@pytest.mark.parametrize("when", ["attempt", "delay"])
def test_a_batch_that_comes_in_a_later_attempt_or_in_a_delay_is_taken(when, monkeypatch):
    lanes = Lanes()

    def feed(line):
        if "attempt 2" in line or when == "delay":
            lanes.queue.put("late")

    monkeypatch.setattr(sources, "say", feed)
    delay = 0.05 if when == "attempt" else 60.0
    limits = {"batch_timeout": 0.05, "batch_attempts": 20, "batch_retry_delay": delay}
    assert next(waited_for(lanes, **limits)) == "late"
    assert (lanes.waits, len(lanes.asked) > 1) == (1, True), (
        "attempts are one wait, for observers and the log"
    )


def test_an_attempt_for_the_next_batch_is_as_long_as_any(monkeypatch):
    """The first batch comes in a delay of a minute; the attempt for the second is over in 0.05 s all the
    same.
    """
    lanes = Lanes()
    monkeypatch.setattr(sources, "say", lanes.queue.put)
    batches = waited_for(lanes, batch_timeout=0.05, batch_attempts=20, batch_retry_delay=60.0)
    for _ in range(2):
        assert "attempt 1 of 20" in next(batches)
    assert max(lanes.asked) == 0.05


def test_a_wait_without_limits_is_one_call_which_says_itself_what_it_is_for(said):
    lanes = Lanes()
    threading.Timer(0.1, lanes.queue.put, ["at last"]).start()
    assert next(waited_for(lanes)) == "at last"
    assert lanes.asked == [pytest.approx(3600.0)]
    assert not said


def test_a_signal_ends_the_wait():
    lanes = Lanes()
    timer = threading.Timer(0.2, lambda: signal.pthread_kill(threading.main_thread().ident, signal.SIGTERM))
    with StopSignals() as stops, pytest.raises(Stopped):
        timer.start()
        next(waited_for(lanes, stops))
    assert lanes.rested == 1


def test_a_trained_batch_is_kept_by_nobody():
    class Batch:
        pass

    source = HubSource(Lanes(Batch(), None), options(), StopSignals())
    with source.batches() as batches:
        source.trained([batch := next(batches)])
        kept = weakref.ref(batch)
        del batch
        assert kept() is None


def waits(**limits):
    return [round(wait, 6) for wait, _ in Patience(**limits).waits()]


def test_the_limits_of_the_recipe():
    delays = [round(delay, 6) for _, delay in Patience(attempts=8).waits()]
    assert delays == [0.5, 0.75, 1.125, 1.6875, 2.53125, 3.0, 3.0, 0.0]
    assert waits(attempts=3, timeout_s=2.0) == [2.0, 2.0, 2.0]
    assert waits(attempts=10, timeout_s=30.0, max_wait_s=30.0) == [30.0]
    assert waits(attempts=10, timeout_s=20.0, max_wait_s=30.0) == [20.0, 9.5]
    assert list(Patience(timeout_s=2.0, max_wait_s=2.2).waits()) == [(2.2, 0.0)]  # no delay before an end
    assert [delay for _, delay in Patience(retry_delay_s=7.0, attempts=3).waits()] == [7.0, 7.0, 0.0]


def test_options_set_limits_only_if_given():
    base = ["--bridge", "b", "--model", "m", "--steps", "1"]
    assert patience_of(parse(base).waiting) is None
    some = patience_of(parse([*base, "--batch-attempts", "3"]).waiting)
    assert some == Patience(timeout_s=30.0, attempts=3, retry_delay_s=0.5, max_wait_s=math.inf)
    flags = ["--batch-timeout", "2", "--batch-retry-delay", "0", "--max-wait-time", "9.5"]
    assert patience_of(parse([*base, *flags]).waiting) == Patience(2.0, 10, 0.0, 9.5)
    for wrong in (["--batch-timeout", "0"], ["--batch-attempts", "0"], ["--batch-retry-delay", "-1"]):
        with pytest.raises(SystemExit):
            parse([*base, *wrong])
