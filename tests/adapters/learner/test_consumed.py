"""The consumed records in a checkpoint: enough to recognise a redelivered one, and no more however long the
run.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest

import shmbridge
from shmbridge.consumers.feed import earlier_run
from shmbridge.consumers.learner import checkpoint
from shmbridge.consumers.learner.checkpoint import Consumed, Progress
from shmbridge.consumers.learner.train.training_step import TrainingScreen
from shmbridge.segments import membership

START = Progress(step=0, policy_version=-1)
GROUP = {"tokens": [[1, 2, 3]], "scores": [1.0]}


def meta(producer, sequence, redelivered=False):
    return SimpleNamespace(producer_id=producer, sequence=sequence, redelivered=redelivered)


def took(ledger, *metas):
    ledger.took(metas, groups=len(metas), trajectories=4 * len(metas), tokens=100)


def test_records_held_at_the_checkpoint_are_known_again_and_no_others():
    first = Consumed(START)
    took(first, meta("a", 0), meta("a", 2))
    first.released()
    took(first, meta("a", 1), meta("b", 7))
    saved = first.progress(2, 5)
    assert (saved.step, saved.policy_version, saved.groups, saved.trajectories, saved.tokens) == (
        2,
        5,
        4,
        16,
        200,
    )
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
    monkeypatch.setattr(checkpoint, "MOST_PRODUCERS", 3)
    ledger = Consumed(START)
    for number in range(10):
        took(ledger, meta(f"p{number}", number), meta("steady", number))
        ledger.released()
    found = ledger.progress(1, 1)
    assert found.last_sequences == {"p8": 8, "p9": 9, "steady": 9}
    assert found.held == {}


def test_records_held_by_the_loaded_checkpoint_stay_in_each_next_one():
    loaded = Progress(step=1, policy_version=1, held={"a": [0], "b": [0, 1, 2]})
    second = Consumed(loaded)
    assert second.contains(meta("b", 0, redelivered=True))  # its release comes after this, or never
    took(second, meta("a", 1), meta("c", 5))
    assert second.progress(2, 2).held == {"a": [0, 1], "b": [0, 1, 2], "c": [5]}
    second.released()
    assert second.progress(2, 2).held == loaded.held

    third = Consumed(second.progress(2, 2))
    assert third.contains(meta("b", 2, redelivered=True))


class Once:
    """A learner that takes some groups, saves, and ends: after the release, or before it.

    Nothing of torch.
    """

    def __init__(self, bridge: str) -> None:
        self._bridge, self.progress = bridge, START
        self.trained: list[tuple[str, int]] = []

    def run(self, groups: int, *, released: bool, steps: int = 1) -> dict[str, list[int]]:
        """Return what the last checkpoint holds."""
        ledger = Consumed(self.progress)
        with shmbridge.Consumer(self._bridge) as consumer:
            consumer.screen(TrainingScreen(ledger))
            batches = consumer.batches(groups=groups, hold="caller", timeout_s=10.0, prefetch=0)
            for step in range(1, steps + 1):
                batch = next(batches)
                self.trained += [(meta.producer_id, meta.sequence) for meta in batch.meta]
                took(ledger, *batch.meta)
                self.progress = ledger.progress(self.progress.step + 1, self.progress.step + 1)
                if released or step < steps:
                    batch.release()
                    ledger.released()
                else:
                    for record in batch.records:
                        record._abandon()
            batches.close()
        return self.progress.held


def test_two_resumes_over_uneven_lanes_train_each_record_once(bridge):
    """Each learner but the last ends after a save and before the release.

    The second takes few groups, so few records come to it.
    """
    learner = Once(bridge)
    with shmbridge.Producer(bridge, env_name="a") as few, shmbridge.Producer(bridge, env_name="b") as many:
        for producer, count in ((few, 1), (many, 9)):
            producer.put_many([GROUP] * count)
        learner.run(10, released=False)
        for producer in (few, many):
            producer.put_many([GROUP] * 8)
        learner.run(2, released=False)
        learner.run(2, released=True, steps=7)
    assert len(learner.trained) == 10 + 16 == len(set(learner.trained))


@pytest.mark.parametrize("released", [True, False])
def test_checkpoints_do_not_grow_with_resumes(bridge, released):
    learner = Once(bridge)
    with shmbridge.Producer(bridge, env_name="a") as producer:
        for _ in range(6):
            producer.put_many([GROUP] * 2)
            held = learner.run(2, released=released)
            # what this learner holds, and what the one before held
            assert len(held[producer.producer_id]) <= 4
        assert len(learner.trained) == 12 == len(set(learner.trained))


def test_a_checkpoint_forgets_lanes_that_are_gone(bridge):
    learner = Once(bridge)
    for _ in range(4):  # an environment that is started again each time, under the same name
        with shmbridge.Producer(bridge, env_name="a", producer_id="same") as producer:
            producer.put_many([GROUP] * 2)
            held = learner.run(2, released=True)
    assert held == {producer.producer_id: [0, 1]}
    assert list(learner.progress.mounts) == [producer.producer_id]


def test_records_on_another_mount_are_not_forgotten(bridge, monkeypatch):
    learner = Once(bridge)
    with shmbridge.Producer(bridge, env_name="a") as producer:
        producer.put_many([GROUP] * 2)
        learner.run(2, released=False)
        first = learner.progress
        monkeypatch.setattr(earlier_run, "mount_id", lambda: "another")
        monkeypatch.setattr(membership, "bridge_names", list)
        assert Consumed(first).progress(2, 2).held == first.held
        assert Consumed(first).progress(2, 2).mounts == first.mounts
        monkeypatch.undo()
        producer.put_many([GROUP] * 2)
        learner.progress = Consumed(Consumed(first).progress(2, 2)).progress(3, 3)
        learner.run(2, released=True)
        assert len(learner.trained) == 4 == len(set(learner.trained))


def test_a_lane_that_cannot_be_read_is_not_taken_for_released(bridge, monkeypatch):
    learner = Once(bridge)
    with shmbridge.Producer(bridge, env_name="a") as producer:
        producer.put_many([GROUP] * 2)
        held = learner.run(2, released=True)

        def garbage(_: object) -> list[int]:
            raise membership.header.LaneCorrupt("garbage")

        monkeypatch.setattr(membership.header, "unreleased", garbage)
        assert Consumed(learner.progress).progress(2, 2).held == held
        monkeypatch.undo()
        assert Consumed(learner.progress).progress(2, 2).held == {}
