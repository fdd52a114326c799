"""The numbers and names of admitted environments, and the remains of dead ones."""

from collections.abc import Callable

import pytest

import shmbridge
from shmbridge.control import environments
from shmbridge.control.environments import Environments, Queued
from shmbridge.control.messages import Register
from shmbridge.hub import LaneSet
from shmbridge.testing.fixtures import FakeHub


def env(name: str, producer_id: str, **changes: object) -> Register:
    fields = {"max_token_length": 512, "group_size": 4, "producer_id": producer_id}
    return Register(desired_name=name, **(fields | changes))


def test_asking_twice_does_not_admit_twice() -> None:
    table = Environments(FakeHub())
    first, again, other = (table.admit(env("gsm8k", producer)) for producer in ("a", "a", "b"))
    assert (first.env_id, again.env_id, other.env_id) == (0, 0, 1)
    assert (first.wandb_name, again.wandb_name, other.wandb_name) == ("gsm8k_0", "gsm8k_0", "gsm8k_1")


def test_a_dead_environment_takes_its_weight_and_share_with_it() -> None:
    hub = FakeHub(live={"a", "b"})
    table = Environments(hub)
    a = table.admit(env("gsm8k", "a", weight=1.0)).env_id
    table.admit(env("code", "b", weight=3.0, min_batch_allocation=0.5))
    assert (table.status(a).env_weight, table.status(a).unallocated_fraction) == (0.25, 0.5)
    hub.live.remove("b")
    assert (table.status(a).env_weight, table.status(a).unallocated_fraction) == (1.0, 1.0)
    assert table.admit(env("code", "c")).wandb_name == "code_0"


def test_an_environment_that_was_never_seen_alive_is_not_buried() -> None:
    table = Environments(FakeHub())
    a = table.admit(env("gsm8k", "a")).env_id
    table.admit(env("code", "b", min_batch_allocation=0.5))
    assert table.status(a).unallocated_fraction == 0.5


def test_an_environment_without_a_lane_goes_when_it_is_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that asks stays, and so does one with a living lane; one that comes back is admitted under its old
    number.
    """
    now = [1000.0]
    monkeypatch.setattr(environments.time, "monotonic", lambda: now[0])
    table = Environments(FakeHub(live={"a"}))
    table.admit(env("gsm8k", "a"))
    asking, silent = (table.admit(env(name, "")).env_id for name in ("asks", "silent"))
    for _ in range(3):
        now[0] += environments.SILENCE_S / 2
        table.status(asking)
    assert (asking in table, silent in table, len(table)) == (True, False, 2)
    assert table.admit(env("silent", "", env_id=silent)).env_id == silent


def test_environments_without_a_lane_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many register and never come back, the one that has been silent for longest is removed."""
    monkeypatch.setattr(environments, "MOST_WITHOUT_LANE", 10)
    table = Environments(FakeHub(live={"a"}))
    table.admit(env("gsm8k", "a"))
    last = [table.admit(env("stranger", "")).env_id for _ in range(50)][-1]
    assert (len(table), last in table, 0 in table) == (11, True, True)


def test_groups_of_producers_that_never_registered_count_as_queued() -> None:
    hub = FakeHub(queued={"a": 2, "plain": 3})
    table = Environments(hub)
    status = table.status(table.admit(env("gsm8k", "a")).env_id)
    assert (status.queue_groups, status.self_queue_groups, status.max_group_size) == (5, 2, 4)


def test_a_weight_of_zero_or_less_is_not_a_division_by_zero() -> None:
    table = Environments(FakeHub())
    a = table.admit(env("gsm8k", "a", weight=-1.0)).env_id
    assert table.status(a).env_weight == 0.01


def test_shares_that_environments_request_are_published_and_never_changed() -> None:
    hub = FakeHub(live={"a", "b"})
    table = Environments(hub)
    snapshots = [table.shares]
    a = table.admit(env("gsm8k", "a", weight=2.0, min_batch_allocation=0.25)).env_id
    snapshots.append(table.shares)
    b = table.admit(env("code", "b")).env_id
    snapshots.append(table.shares)
    table.status(a)
    hub.live.remove("b")
    table.status(a)
    snapshots.append(table.shares)
    table.forget(a)
    snapshots.append(table.shares)
    assert [sorted(each) for each in snapshots] == [[], ["a"], ["a", "b"], ["a"], []]
    first = snapshots[1]["a"]
    assert (first.env_id, first.name, first.weight, first.min_allocation, first.group_size) == (
        a,
        "gsm8k_0",
        2.0,
        0.25,
        4,
    )
    assert snapshots[2]["b"].env_id == b


def test_a_question_walks_the_lanes_a_few_times_however_many_environments_there_are(
    make_consumer: Callable[..., shmbridge.Consumer],
    make_producer: Callable[..., shmbridge.Producer],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    consumer = make_consumer(run=shmbridge.Run(batch_size=8))
    table, walks = Environments(consumer._hub), []
    producers = [make_producer() for _ in range(12)]
    producers[3].put({"tokens": [[1], [2]]})
    assert consumer.poll(0) == []  # the lanes are adopted
    ids = [table.admit(env("gsm8k", producer.producer_id)).env_id for producer in producers]
    known = [producer.producer_id for producer in producers]
    live = consumer._lanes.live_producers().__contains__
    assert consumer.queue.look_at_producers(known) == {
        each: (live(each), consumer.queue.groups(each)) for each in known
    }
    walk = LaneSet.__iter__
    monkeypatch.setattr(LaneSet, "__iter__", lambda lanes: walks.append(lanes) or walk(lanes))
    told = [table.status(env_id) for env_id in ids]
    assert [each.self_queue_groups for each in told] == [int(number == 3) for number in range(12)]
    assert len(walks) <= 3 * len(ids)


class Queue:
    """A queue that knows its content."""

    def __init__(self, **sizes: int) -> None:
        self.sizes = {int(env_id.removeprefix("env")): size for env_id, size in sizes.items()}

    def by_env(self) -> dict[int | None, Queued]:
        return {env_id: Queued(1, size, size) for env_id, size in self.sizes.items()}

    def queued(self, producer_id: str) -> int:
        return 1 if ord(producer_id) - ord("a") in self.sizes else 0

    def __len__(self) -> int:
        return len(self.sizes)


def test_an_environment_is_as_large_as_the_largest_of_its_groups_that_was_seen() -> None:
    hub, queue = FakeHub(queued={"a": 1}), Queue(env0=12)
    table = Environments(hub, queue)
    a = table.admit(env("gsm8k", "a")).env_id
    assert (
        table.status(a).self_queue_groups,
        table.status(a).max_group_size,
        table.shares["a"].group_size,
    ) == (1, 12, 12)
    hub.queued, queue.sizes = {"a": 3}, {}
    assert (table.status(a).self_queue_groups, table.status(a).max_group_size) == (3, 12)
