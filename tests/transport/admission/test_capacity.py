"""The capacity rule bounds the staleness of trained groups over random schedules with the scheduler's own
order; with one group more it does not.

The machine is docs/explanation/staleness.md in code: producers begin, put in any order and give up, a learner
takes a batch, trains with it and publishes. The tests assert the theorem there.
"""

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from shmbridge._ext.groups import GroupQueues, OldestScheduler
from shmbridge.hub import PROMISE_NS, OffPolicyLimit, Promises, limit_of
from shmbridge.record import Group


@dataclass
class Begun:
    """A group under way: the version it began under, and how many newer groups were trained before it."""

    version: int
    ordinal: int
    group: Group
    overtaken_by: int = 0


def queued(version: int, producer: str = "p", rows: int = 1) -> Group:
    group = Group(1, 0.0)
    group.append(
        SimpleNamespace(
            _min_policy_version=version,
            _split="train",
            _group_size=1,
            rows=rows,
            token_count=1,
            _lane_reader=SimpleNamespace(about=SimpleNamespace(producer_id=producer)),
        )
    )
    return group


@dataclass
class Machine:
    """A bridge under the rule.

    `most` is how many groups may be under way: the rule's own number, or a wrong one.

    A step raises the version that is trained with; every `publish_every` steps it is published, and groups
    begin under it.
    """

    limit: OffPolicyLimit
    most: int
    publish_every: int = 1
    shrinks: bool = True  # as the rule does, during steps that are not published
    version: int = 0
    published: int = 0
    begun: int = 0
    running: list[Begun] = field(default_factory=list)
    by_group: dict[int, Begun] = field(default_factory=dict)
    queues: GroupQueues = field(default_factory=lambda: GroupQueues(OldestScheduler(), 60.0))
    ahead: list[list[Group]] = field(default_factory=list)
    trained: list[tuple[Begun, int]] = field(default_factory=list)

    def begin(self) -> None:
        used_up = (
            self.limit.groups() - self.limit.groups(self.version - self.published) if self.shrinks else 0
        )
        if len(self.running) + len(self.queues.complete) + self.queues.in_flight < self.most - used_up:
            begun = Begun(self.published, self.begun, queued(self.published, f"p{self.begun % 3}"))
            self.begun += 1
            self.running.append(begun)

    def put(self, place: int) -> None:
        if self.running:
            begun = self.running.pop(place % len(self.running))
            self.by_group[id(begun.group)] = begun
            self.queues.scheduler.add(begun.group)

    def give_up(self, place: int) -> None:
        if self.running:
            self.running.pop(place % len(self.running))

    def form(self) -> None:
        """A batch is gathered ahead of the step."""
        size = self.limit.groups_per_step
        groups, *_ = self.queues.take(size, False, 0.0, last=False, shares={}, live=(), counted=True)
        if groups is not None:
            self.ahead.append(groups)
            waiting = [*self.running, *(self.by_group[id(group)] for group in self.queues.complete)]
            for other in (self.by_group[id(group)] for group in groups):
                for begun in waiting:
                    begun.overtaken_by += other.version > begun.version

    def take_and_train(self, *, publish_late: bool = False) -> None:
        if not self.ahead:
            self.form()
        if not self.ahead:
            return
        groups = self.ahead.pop(0)
        self.queues.begin_step(groups)
        if publish_late:  # others begin while it is trained with
            self.begin()
        self.trained += [(self.by_group[id(group)], self.version) for group in groups]
        self.version += 1
        if self.version % self.publish_every == 0:
            self.published = self.version
        self.queues.end_step()


ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("begin"), st.just(0)),
        st.tuples(st.just("begin"), st.just(0)),
        st.tuples(st.just("put"), st.integers(0, 30)),
        st.tuples(st.just("put"), st.integers(0, 30)),
        st.tuples(st.just("give_up"), st.integers(0, 30)),
        st.tuples(st.just("form"), st.just(0)),
        st.tuples(st.just("train"), st.just(0)),
        st.tuples(st.just("train_while_others_begin"), st.just(0)),
    ),
    max_size=120,
)


def run(machine: Machine, actions: list[tuple[str, int]]) -> Machine:
    for action, place in actions:
        match action:
            case "begin":
                machine.begin()
            case "put":
                machine.put(place)
            case "give_up":
                machine.give_up(place)
            case "form":
                machine.form()
            case "train":
                machine.take_and_train()
            case _:
                machine.take_and_train(publish_late=True)
    return machine


def greedy(limit: OffPolicyLimit, most: int, steps: int, **options: Any) -> Machine:
    """Every producer begins as many groups as it may, and puts at once, in order; the learner is slow."""
    machine = Machine(limit, most, **options)
    for _ in range(steps):
        for _ in range(most + 1):
            machine.begin()
        while machine.running:
            machine.put(0)
        machine.take_and_train(publish_late=True)
        machine.put(0)
    return machine


@settings(max_examples=400, deadline=None)
@given(st.integers(0, 3), st.integers(1, 4), ACTIONS)
@example(0, 1, [("begin", 0), ("put", 0), ("train_while_others_begin", 0), ("put", 0), ("train", 0)])
def test_staleness_is_bounded_by_the_steps_and_by_who_overtook(steps, size, actions) -> None:
    limit = OffPolicyLimit(steps, size)
    machine = run(Machine(limit, limit.groups()), actions)
    for begun, version in machine.trained:
        assert version - begun.version <= (limit.groups() - 1 + begun.overtaken_by) // size


@settings(max_examples=400, deadline=None)
@given(st.integers(0, 3), st.integers(1, 4), ACTIONS)
def test_groups_that_no_newer_group_overtook_are_within_the_steps(steps, size, actions) -> None:
    limit = OffPolicyLimit(steps, size)
    machine = run(Machine(limit, limit.groups()), actions)
    late = [begun for begun, version in machine.trained if version - begun.version > steps]
    assert all(begun.overtaken_by for begun in late)


@pytest.mark.parametrize(("steps", "size"), [(0, 1), (0, 4), (1, 2), (3, 4)])
def test_the_bound_is_reached_and_with_one_group_more_it_does_not_hold(steps, size) -> None:
    limit = OffPolicyLimit(steps, size)
    kept = greedy(limit, limit.groups(), 12)
    assert max(version - begun.version for begun, version in kept.trained) == steps
    broken = greedy(limit, limit.groups() + 1, 12)
    assert any(
        version - begun.version > steps and not begun.overtaken_by for begun, version in broken.trained
    )


@settings(max_examples=400, deadline=None)
@given(st.integers(0, 3), st.integers(0, 3), st.integers(1, 4), ACTIONS)
def test_the_bound_holds_for_steps_that_are_not_published(every, more, size, actions) -> None:
    limit = OffPolicyLimit(every + more, size)
    machine = run(Machine(limit, limit.groups(), publish_every=every + 1), actions)
    for begun, version in machine.trained:
        assert version - begun.version <= (limit.groups() - 1 + begun.overtaken_by) // size


@pytest.mark.parametrize(("every", "steps", "size"), [(2, 1, 1), (2, 2, 3), (4, 3, 2)])
def test_steps_that_are_not_published_are_reached_and_must_use_places_up(every, steps, size) -> None:
    limit = OffPolicyLimit(steps, size)
    kept = greedy(limit, limit.groups(), 12, publish_every=every)
    assert len(kept.trained) == 12 * size
    assert max(version - begun.version for begun, version in kept.trained) == steps
    broken = greedy(limit, limit.groups(), 12, publish_every=every, shrinks=False)
    assert any(
        version - begun.version > steps and not begun.overtaken_by for begun, version in broken.trained
    )


def test_freeing_places_before_the_version_is_out_does_not_hold() -> None:
    """The batch in training counts: a count of waiting groups alone would be off by one."""
    limit = OffPolicyLimit(1, 2)
    machine = Machine(limit, limit.groups())
    for _ in range(8):
        while len(machine.running) + len(machine.queues.complete) < limit.groups():  # without chosen.count
            begun = Begun(machine.version, machine.begun, queued(machine.version))
            machine.begun += 1
            machine.by_group[id(begun.group)] = begun
            machine.queues.scheduler.add(begun.group)
        machine.form()
        while len(machine.queues.complete) < limit.groups():
            begun = Begun(machine.version, machine.begun, queued(machine.version))
            machine.begun += 1
            machine.by_group[id(begun.group)] = begun
            machine.queues.scheduler.add(begun.group)
        machine.take_and_train()
    assert max(version - begun.version for begun, version in machine.trained) > 1


# -- the parts
# ------------------------------------------------------------------------------------------------------------


def test_promises_count_until_they_are_shown_or_over() -> None:
    promises = Promises()
    promises.promise("a", 3, 0)
    assert promises.running({"a": 2, "b": 5}, 1) == 8
    assert promises.running({"a": 3, "b": 5}, 2) == 8
    assert promises.running({"a": 1, "b": 5}, 3) == 6  # shown once, and some have ended
    promises.promise("b", 6, 0)
    assert promises.running({"a": 1, "b": 5}, PROMISE_NS - 1) == 7
    assert promises.running({"a": 1, "b": 5}, PROMISE_NS) == 6
    promises.promise("b", 6, 0)
    promises.void("b")
    assert promises.running({"a": 1, "b": 5}, 1) == 6


def test_a_step_ends_once_whatever_says_so() -> None:
    queues = GroupQueues(OldestScheduler(), 60.0)

    def taken(*versions: int) -> list[Group]:
        for version in versions:
            queues.scheduler.add(queued(version))
        return queues.take(len(versions), False, 0.0, last=False, shares={}, live=(), counted=True)[0]

    first, second = taken(0, 0), taken(1)
    assert queues.in_flight == 3
    queues.begin_step(first)
    assert queues.in_flight == 3
    queues.end_step()
    queues.end_step()
    queues.finish(first)
    assert queues.in_flight == 1
    queues.begin_step(second)
    queues.put_back(second)
    queues.end_step()
    assert queues.in_flight == 0


def test_a_group_that_is_lost_before_its_step_no_longer_counts() -> None:
    queues = GroupQueues(OldestScheduler(), 60.0)
    for _ in range(2):
        queues.scheduler.add(queued(0))
    groups, *_ = queues.take(2, False, 0.0, last=False, shares={}, live=(), counted=True)
    assert queues.in_flight == 2
    del groups[0]
    assert queues.in_flight == 1
    queues.begin_again()
    del groups[:]
    assert queues.in_flight == 0


def test_the_oldest_version_goes_first_and_within_it_the_first_to_come() -> None:
    scheduler = OldestScheduler()
    groups = [queued(version) for version in (2, 1, 2, -1, 1)]
    for group in groups:
        scheduler.add(group)
    first = scheduler.take(3, False, 0.0, last=False)
    assert first == [groups[3], groups[1], groups[4]]
    scheduler.put_back(first)
    assert scheduler.queued("p") == len(scheduler) == 5
    scheduler.remove([groups[3]])
    assert groups[3] not in scheduler
    assert scheduler.take(5, False, 0.0, last=True) is None
    assert scheduler.take(4, False, 0.0, last=False) == [groups[1], groups[4], groups[0], groups[2]]


def test_rows_are_filled_in_order_and_a_large_group_comes_alone() -> None:
    scheduler = OldestScheduler()
    large, small, other = (queued(version, rows=rows) for version, rows in ((0, 9), (1, 3), (2, 3)))
    for group in (large, small, other):
        scheduler.add(group)
    assert scheduler.take(4, True, 0.0, last=False) == [large]
    assert scheduler.take(5, True, 0.0, last=False) == [small]
    assert scheduler.take(5, True, 0.0, last=False) is None
    assert scheduler.take(5, True, 0.0, last=True) == [other]


def test_limit_of_returns_the_limit_or_none() -> None:
    assert limit_of(None, None, "fair") is None
    assert limit_of(2, 8, "oldest") == OffPolicyLimit(2, 8)
    assert OffPolicyLimit(2, 8).groups() == 24
    assert OffPolicyLimit(2, 8).groups(unpublished=2) == 8
