"""Waiting for batches: within limits or for ever, with a word on who is missing, interrupted by signals."""

from __future__ import annotations

import gc
import math
import queue
import signal
import threading
import time
import weakref

import pytest

from shmbridge.consumers import batch_wait
from shmbridge.consumers.batch_wait import BatchWait, NoBatch, Patience, patience_of
from shmbridge.consumers.grpo_options import parser
from shmbridge.consumers.stopping import Stopped, StopSignals


class Source:
    """A blocking iterator that a test feeds; says how often it was asked and in which thread it was closed."""

    def __init__(self, *batches):
        self.queue = queue.SimpleQueue()
        for batch in batches:
            self.queue.put(batch)
        self.asked = 0
        self.closed = threading.Event()

    def __iter__(self):
        return self

    def __next__(self):
        self.asked += 1
        batch = self.queue.get()
        if isinstance(batch, BaseException):
            raise batch
        return batch

    def close(self):
        self.closed.set()


def wait_for(source, patience, said=None):
    return BatchWait(source, patience, lambda: "nobody is there", [].append if said is None else said)


def test_batches_come_one_by_one_as_they_are_asked_for():
    source = Source("a", "b", StopIteration())
    with wait_for(source, Patience()) as waiting:
        assert next(waiting) == "a"
        assert source.asked == 1
        assert list(waiting) == ["b"]
    assert source.closed.is_set()


def test_a_limit_may_be_beyond_any_clock():
    for patience in (Patience(timeout_s=math.inf), Patience(timeout_s=0.01, retry_delay_s=1e300)):
        source = Source()
        with wait_for(source, patience) as waiting:
            threading.Timer(0.1, source.queue.put, ["late"]).start()
            assert next(waiting) == "late"


def test_an_error_of_the_source_is_an_error_here():
    with wait_for(Source(ValueError("broken")), None) as waiting, pytest.raises(ValueError, match="broken"):
        next(waiting)


def test_attempts_end_and_each_says_who_is_missing():
    said, source = [], Source()
    patience = Patience(timeout_s=0.05, attempts=3, retry_delay_s=0.02)
    with wait_for(source, patience, said.append) as waiting, pytest.raises(NoBatch) as given_up:
        next(waiting)
    assert source.asked == 1  # the lanes are asked once, not polled
    assert len(said) == 2
    assert "attempt 1 of 3" in said[0]
    assert "nobody is there; the next begins in 0.0 s" in said[0]
    for part in ("3 of 3 attempts of 0.05 s", "nobody is there", "--max-wait-time"):
        assert part in str(given_up.value)


def test_the_limit_over_all_attempts_counts_too():
    with (
        wait_for(Source(), Patience(timeout_s=0.04, attempts=1000, max_wait_s=0.1)) as waiting,
        pytest.raises(NoBatch, match="1 of 1000 attempts"),  # 0.04 s, and the delay up to the limit
    ):
        next(waiting)


@pytest.mark.parametrize("when", ["attempt", "delay"])
def test_a_batch_that_comes_in_a_later_attempt_or_in_a_delay_is_taken(when):
    source = Source()

    def feed(line):
        if "attempt 2" in line or when == "delay":
            source.queue.put("late")

    delay = 0.05 if when == "attempt" else 60.0
    with wait_for(source, Patience(timeout_s=0.05, attempts=20, retry_delay_s=delay), feed) as waiting:
        assert next(waiting) == "late"


def test_without_limits_it_waits_and_reminds(monkeypatch):
    monkeypatch.setattr(batch_wait, "_REMINDER_S", 0.02)
    source, said = Source(), []

    def feed(line):
        said.append(line)
        if len(said) == 3:
            source.queue.put("at last")

    with wait_for(source, None, feed) as waiting:
        assert next(waiting) == "at last"
    assert all("nobody is there" in line for line in said)


def test_a_signal_ends_the_wait_and_leaves_the_source_to_its_consumer():
    source = Source()
    timer = threading.Timer(0.2, lambda: signal.pthread_kill(threading.main_thread().ident, signal.SIGTERM))
    with StopSignals(), pytest.raises(Stopped), wait_for(source, None) as waiting:
        timer.start()
        next(waiting)
    assert not source.closed.is_set()
    source.queue.put(StopIteration())  # as a consumer does that closes
    assert source.closed.wait(10.0)


def test_a_batch_is_kept_by_nobody():
    class Batch:
        pass

    with wait_for(Source(Batch()), None) as waiting:
        batch = weakref.ref(next(waiting))
        deadline = time.monotonic() + 10.0
        while batch() is not None and time.monotonic() < deadline:  # the thread may be about to let go of it
            gc.collect()
            time.sleep(0.01)
        assert batch() is None


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
    assert patience_of(parser().parse_args(base)) is None
    some = patience_of(parser().parse_args([*base, "--batch-attempts", "3"]))
    assert some == Patience(timeout_s=30.0, attempts=3, retry_delay_s=0.5, max_wait_s=math.inf)
    flags = ["--batch-timeout", "2", "--batch-retry-delay", "0", "--max-wait-time", "9.5"]
    assert patience_of(parser().parse_args([*base, *flags])) == Patience(2.0, 10, 0.0, 9.5)
    for wrong in (["--batch-timeout", "0"], ["--batch-attempts", "0"], ["--batch-retry-delay", "-1"]):
        with pytest.raises(SystemExit):
            parser().parse_args([*base, *wrong])
