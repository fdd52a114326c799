"""What a checkpoint says was consumed: enough to know a redelivered record, and no more however long the run."""

from __future__ import annotations

from types import SimpleNamespace

from shmbridge.consumers.learner import consumed
from shmbridge.consumers.learner.checkpoint import Progress
from shmbridge.consumers.learner.consumed import Consumed

START = Progress(step=0, policy_version=-1)


def meta(producer, sequence, redelivered=False):
    return SimpleNamespace(producer_id=producer, sequence=sequence, redelivered=redelivered)


def took(ledger, *metas):
    ledger.took(metas, groups=len(metas), trajectories=4 * len(metas), tokens=100)


def test_what_was_held_at_the_checkpoint_is_known_again_and_nothing_else():
    first = Consumed(START)
    took(first, meta("a", 0), meta("a", 2))
    first.released()
    took(first, meta("a", 1), meta("b", 7))
    saved = first.progress(2, 5)
    assert (saved.step, saved.policy_version, saved.groups, saved.trajectories, saved.tokens) == (2, 5, 4, 16, 200)
    assert saved.last_sequences == {"a": 2, "b": 7}
    assert saved.held == {"a": [1], "b": [7]}

    second = Consumed(saved)
    assert second.contains(meta("a", 1, redelivered=True))
    assert second.contains(meta("b", 7, redelivered=True))
    assert not second.contains(meta("a", 2, redelivered=True))
    assert not second.contains(meta("c", 1, redelivered=True))
    assert not second.contains(meta("a", 1)), "a producer that counts from 0 again"


def test_totals_and_wall_time_go_on():
    earlier = Progress(3, 3, groups=10, trajectories=40, tokens=1000, wall_s=50.0, last_sequences={"a": 9})
    ledger = Consumed(earlier)
    took(ledger, meta("a", 4))
    found = ledger.progress(4, 4)
    assert (found.groups, found.trajectories, found.tokens) == (11, 44, 1100)
    assert found.last_sequences == {"a": 9}
    assert 50.0 <= found.wall_s < 60.0


def test_memory_does_not_grow_with_producers_that_come_and_go(monkeypatch):
    monkeypatch.setattr(consumed, "MOST_PRODUCERS", 3)
    ledger = Consumed(START)
    for number in range(10):
        took(ledger, meta(f"p{number}", number), meta("steady", number))
        ledger.released()
    found = ledger.progress(1, 1)
    assert found.last_sequences == {"p8": 8, "p9": 9, "steady": 9}
    assert found.held == {}
