"""Policy "fair": fair in tokens by weight, oldest first; shares are waited for but never for ever, and no
batch is null for ever.
"""

from collections import Counter
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shmbridge._ext.groups import FairScheduler
from shmbridge.control.environments import EnvWeight
from shmbridge.hub import Want, scheduler_of
from shmbridge.record import Group


def group(producer: str, rows: int = 1, tokens: int = 10, name: object = None) -> Group:
    made = Group(rows, 0.0)
    made.append(
        SimpleNamespace(
            _lane_reader=SimpleNamespace(about=SimpleNamespace(producer_id=producer)),
            rows=rows,
            token_count=tokens,
            env_id=-1,
            name=name,
        )
    )
    return made


def name(each: Group) -> object:
    return each.records[0].name


def share(number: int, weight: float = 1.0, part: float | None = None) -> EnvWeight:
    return EnvWeight(number, f"env{number}", weight, part, 1)


class Bench:
    """A scheduler, with the shares of environments and the living producers that it sees."""

    def __init__(self, wait_s: float = 10.0, **shares: EnvWeight) -> None:
        self.shares = shares
        self.dead: set[str] = set()
        self.all = FairScheduler(wait_s)
        self._put = 0

    def put(self, producer: str, count: int = 1, **like) -> None:
        for _ in range(count):
            self.all.apply(self.shares)
            self.all.add(group(producer, name=(producer, self._put), **like))
            self._put += 1

    def take(
        self, groups: int | None = None, rows: int | None = None, now_s: float = 0.0, last: bool = False
    ) -> list[Group] | None:
        size = Want(groups, rows)
        self.all.apply(self.shares)
        live = {*self.shares} - self.dead
        return self.all.take(size.size, size.by_rows, now_s, last=last, live=live)

    def mix(self, **how) -> dict[str, int] | None:
        taken = self.take(**how)
        return taken and dict(Counter(each.producer_id for each in taken))


def test_one_producer_is_a_plain_queue() -> None:
    bench = Bench()
    bench.put("a", 5)
    assert [name(each)[1] for each in bench.take(groups=3)] == [0, 1, 2]
    assert (bench.take(groups=3), len(bench.all), bench.all.queued("a")) == (None, 2, 2)


def test_equal_weights_are_equal_in_tokens_and_not_in_groups() -> None:
    bench = Bench()
    bench.put("long", 100, tokens=300)
    bench.put("short", 300, tokens=100)
    taken = [each for _ in range(20) for each in bench.take(groups=8)]
    tokens = Counter()
    for each in taken:
        tokens[each.producer_id] += each.tokens
    assert tokens["long"] == pytest.approx(tokens["short"], abs=600)


def test_a_weight_is_a_part_of_the_tokens() -> None:
    bench = Bench(a=share(0, 3.0), b=share(1, 1.0))
    for producer in ("a", "b", "nobody"):
        bench.put(producer, 200)
    taken = Counter(each.producer_id for _ in range(20) for each in bench.take(groups=10))
    assert [taken[producer] for producer in ("a", "b", "nobody")] == pytest.approx([120, 40, 40], abs=3)


def test_a_batch_is_handed_out_oldest_first() -> None:
    bench = Bench(a=share(0, 0.1))
    for _ in range(10):
        bench.put("a")
        bench.put("b")
    for _ in range(4):
        order = [each.number for each in bench.take(groups=4)]
        assert order == sorted(order)


@given(
    st.lists(st.tuples(st.floats(0.01, 100), st.integers(1, 500)), min_size=2, max_size=5),
    st.lists(st.integers(1, 500), min_size=1, max_size=5),
)
@settings(deadline=None, max_examples=150)
def test_nobody_with_a_backlog_is_further_behind_than_a_round(
    flows: list[tuple[float, int]], sizes: list[int]
) -> None:
    """The bound of Shreedhar and Varghese: between flows with a backlog, service by weight differs by a few
    quanta.
    """
    bench = Bench(**{str(number): share(number, weight) for number, (weight, _) in enumerate(flows)})
    for number, (_, tokens) in enumerate(flows):
        for place in range(120):
            bench.put(str(number), tokens=tokens if place % 2 else sizes[place % len(sizes)])
    served = dict.fromkeys(map(str, range(len(flows))), 0)
    for _ in range(12):
        for each in bench.take(groups=8):
            served[each.producer_id] += each.tokens
    heaviest = max(weight for weight, _ in flows)
    largest = 500
    by_weight = [served[str(number)] / (weight / heaviest) for number, (weight, _) in enumerate(flows)]
    slack = [2 * largest + largest / (weight / heaviest) for weight, _ in flows]
    for one, its in zip(by_weight, slack, strict=True):
        for other, others in zip(by_weight, slack, strict=True):
            assert one - other <= its + others


def test_tiny_weights_cost_no_rounds() -> None:
    bench = Bench(heavy=share(0, 1e6), a=share(1, 0.01), b=share(2, 0.01))
    bench.put("a", 50)
    bench.put("b", 50)
    assert bench.mix(groups=40) == {"a": 20, "b": 20}
    assert bench.all.visits < 40 * 10


def test_a_flow_that_comes_back_brings_no_savings() -> None:
    bench = Bench()
    bench.put("a", 100)
    bench.put("b", 1)
    for _ in range(5):
        bench.take(groups=10)
    bench.put("b", 40)
    assert bench.mix(groups=20) == {"a": 10, "b": 10}


def test_the_cost_of_a_batch_does_not_depend_on_what_is_queued() -> None:
    class Counted(SimpleNamespace):
        looks = 0

        @property
        def token_count(self) -> int:
            Counted.looks += 1
            return 10

    bench = Bench()
    for producer in ("a", "b") * 5000:
        made = Group(1, 0.0)
        made.append(
            Counted(
                _lane_reader=SimpleNamespace(about=SimpleNamespace(producer_id=producer)), rows=1, env_id=-1
            )
        )
        bench.all.add(made)
    bench.take(groups=10)
    assert Counted.looks <= 20


# -- guaranteed shares
# ------------------------------------------------------------------------------------------------------------


def test_a_guaranteed_share_is_in_every_batch() -> None:
    bench = Bench(small=share(0, 0.01, part=0.3), big=share(1, 1.0))
    bench.put("big", 100)
    bench.put("small", 20)
    assert [bench.mix(groups=10) for _ in range(4)] == [{"small": 3, "big": 7}] * 4
    assert bench.all.stats()["allocations_missed_total"] == 0


def test_a_share_is_a_floor_and_no_bonus() -> None:
    bench = Bench(a=share(0, 1.0, part=0.25), b=share(1, 1.0))
    bench.put("a", 50)
    bench.put("b", 50)
    assert [bench.mix(groups=8) for _ in range(5)] == [{"a": 4, "b": 4}] * 5


def test_a_share_that_cannot_be_met_is_waited_for_and_then_counted() -> None:
    bench = Bench(a=share(0, part=0.5), b=share(1))
    bench.put("b", 20)
    assert bench.take(groups=4, now_s=100.0) is None
    assert bench.all.waits_until_s == 110.0
    assert bench.take(groups=4, now_s=109.9) is None
    assert bench.mix(groups=4, now_s=110.0) == {"b": 4}
    assert bench.all.waits_until_s == float("inf")
    assert bench.all.stats()["allocations_missed_total"] == 1
    assert bench.take(groups=4, now_s=110.1) is None
    bench.put("a", 2)
    assert bench.mix(groups=4, now_s=110.2) == {"a": 2, "b": 2}
    assert bench.all.stats()["allocations_missed_total"] == 1


def test_the_wait_begins_when_a_batch_could_be_formed() -> None:
    bench = Bench(a=share(0, part=0.5), b=share(1))
    bench.put("b", 3)
    assert bench.take(groups=4, now_s=0.0) is None
    assert bench.all.waits_until_s == float("inf")
    bench.put("b", 1)
    assert bench.take(groups=4, now_s=50.0) is None
    assert bench.all.waits_until_s == 60.0


def test_nobody_waits_for_the_dead_nor_when_nothing_more_can_come() -> None:
    bench = Bench(a=share(0, part=0.5), b=share(1))
    bench.put("b", 8)
    assert bench.take(groups=4) is None
    bench.dead.add("a")
    assert bench.mix(groups=4) == {"b": 4}
    assert bench.all.stats()["allocations_missed_total"] == 0
    bench.dead.clear()
    assert bench.mix(groups=4, last=True) == {"b": 4}


def test_shares_of_more_than_all_are_scaled_down() -> None:
    bench = Bench(a=share(0, part=0.9), b=share(1, part=0.9), c=share(2))
    for producer in "abc":
        bench.put(producer, 20)
    assert bench.mix(groups=10) == {"a": 5, "b": 5}


def test_shares_that_do_not_fit_together_take_turns() -> None:
    bench = Bench(wait_s=0, a=share(0, part=0.5), b=share(1, part=0.5))
    bench.put("a", 10, rows=8)
    bench.put("b", 10, rows=8)
    served = [next(iter(bench.mix(rows=12))) for _ in range(6)]
    assert Counter(served) == {"a": 3, "b": 3}


def test_more_shares_than_fit_together_take_turns_all_of_them() -> None:
    bench = Bench(wait_s=0, **{producer: share(number, part=1 / 3) for number, producer in enumerate("abc")})
    for producer in "abc":
        bench.put(producer, 12, rows=16)
    served = [next(iter(bench.mix(rows=24))) for _ in range(12)]
    assert Counter(served) == {"a": 4, "b": 4, "c": 4}


@pytest.mark.parametrize("rows", [14, 16, 20])
def test_a_group_that_never_fits_beside_a_share_has_its_turn(rows: int) -> None:
    bench = Bench(a=share(0, part=0.25), b=share(1))
    bench.put("b", 3, rows=rows)
    bench.put("a", 100, rows=4)
    mixes = [bench.mix(rows=16) for _ in range(10)]
    assert sum(mix.get("b", 0) for mix in mixes) == 3
    assert sum("a" in mix for mix in mixes) >= 7


def test_shares_that_take_whole_batches_leave_others_their_turn() -> None:
    bench = Bench(a=share(0, part=0.2), b=share(1))
    bench.put("a", 100, rows=8)
    bench.put("b", 3, rows=2)
    mixes = [bench.mix(rows=8) for _ in range(10)]
    assert sum(mix.get("b", 0) for mix in mixes) == 3


def test_a_share_counts_rows_where_rows_are_wanted() -> None:
    bench = Bench(a=share(0, 0.01, part=0.25), b=share(1))
    bench.put("a", 10, rows=2)
    bench.put("b", 20, rows=4)
    assert bench.mix(rows=32) == {"a": 4, "b": 6}


# -- trajectories
# ------------------------------------------------------------------------------------------------------------


def test_rows_are_filled_with_what_fits() -> None:
    bench = Bench()
    bench.put("a", 2, rows=8)
    bench.put("b", 2, rows=4)
    assert sorted(each.rows for each in bench.take(rows=12)) == [4, 8]
    assert bench.all.stats()["batches_short_total"] == 0


def test_the_head_that_does_not_fit_comes_first_in_the_next_batch() -> None:
    bench = Bench()
    bench.put("a", 1, rows=2)
    bench.put("b", 5, rows=8)
    bench.put("a", 20, rows=2)
    # what filled the rest is a debt
    assert [bench.mix(rows=9) for _ in range(4)] == [{"a": 4}, {"b": 1}, {"b": 1}, {"a": 4}]


def test_a_flow_that_was_passed_over_comes_before_all_others() -> None:
    bench = Bench()
    for producer, rows in [("a", 2), ("b", 8), ("c", 2)]:
        bench.put(producer, 20, rows=rows)
    assert bench.mix(rows=8) == {"a": 2, "c": 2}
    assert bench.mix(rows=8) == {"b": 1}


def test_a_group_that_fits_is_found_behind_a_head_that_does_not() -> None:
    bench = Bench()
    for rows in (8, 6, 4):
        bench.put("a", rows=rows)
    assert [each.rows for each in bench.take(rows=12)] == [8, 4]
    assert [each.rows for each in bench.all] == [6]


def test_a_batch_that_nothing_fills_is_served_short_and_counted() -> None:
    bench = Bench()
    bench.put("a", 3, rows=8)
    assert [each.rows for each in bench.take(rows=12)] == [8]
    assert bench.all.stats()["batches_short_total"] == 1


def test_a_group_larger_than_the_batch_is_served_alone_and_counted() -> None:
    bench = Bench()
    bench.put("a", 1, rows=20)
    bench.put("a", 3, rows=4)
    assert [each.rows for each in bench.take(rows=12)] == [20]
    assert [each.rows for each in bench.take(rows=12)] == [4, 4, 4]
    assert bench.all.stats() == {
        "allocations_missed_total": 0,
        "batches_short_total": 0,
        "batches_over_total": 1,
    }


def test_the_last_rows_are_served_short_and_the_last_groups_stay() -> None:
    bench = Bench()
    bench.put("a", 2, rows=4)
    assert bench.take(rows=12) is None
    assert bench.take(groups=3, last=True) is None
    assert len(bench.take(rows=12, last=True)) == 2
    assert bench.take(rows=12, last=True) is None


# -- all of it
# ------------------------------------------------------------------------------------------------------------

PUTS = st.tuples(
    st.just("put"), st.sampled_from("abcd"), st.sampled_from([1, 2, 3, 4, 8, 20]), st.integers(1, 400)
)
MOVES = st.one_of(
    PUTS,
    PUTS,
    PUTS,
    st.tuples(st.sampled_from(["take", "back", "remove"]), st.just(""), st.just(0), st.just(0)),
)


@given(st.lists(MOVES, max_size=80), st.booleans(), st.integers(1, 12), st.sampled_from([None, 0.25, 0.6]))
@settings(deadline=None, max_examples=300)
def test_nothing_is_lost_doubled_starved_or_out_of_order(
    moves: list[tuple], by_rows: bool, size: int, part: float | None
) -> None:
    bench = Bench(wait_s=0, a=share(0, 2.0, part), b=share(1, 0.02, part))
    want = {"rows": size} if by_rows else {"groups": size}
    put, gone, queued = 0, set(), {}
    for what, producer, rows, tokens in moves:
        if what == "put":
            bench.put(producer, rows=rows, tokens=tokens)
            put += 1
        elif what == "remove":
            unfit = [each for each in bench.all if each.tokens % 7 == 0]
            bench.all.remove(unfit)
            gone |= {each.number for each in unfit}
        else:
            waiting = list(bench.all)
            taken = bench.take(**want)
            enough = sum(each.rows for each in waiting) if by_rows else len(waiting)
            assert (taken is not None) == (enough >= size)
            if taken and what == "back":
                bench.all.put_back(taken)
            elif taken:
                assert not by_rows or len(taken) == 1 or sum(each.rows for each in taken) <= size
                assert by_rows or len(taken) == size
                numbers = {each.number for each in taken}
                assert not numbers & gone
                gone |= numbers
        queued = Counter(each.producer_id for each in bench.all)
        assert len(bench.all) == sum(queued.values()) == put - len(gone)
        assert all(bench.all.queued(producer) == queued[producer] for producer in "abcd")
    while (taken := bench.take(**want, last=True)) is not None:
        gone |= {each.number for each in taken}
    assert put - len(gone) == (0 if by_rows else len(bench.all))


def test_groups_put_back_come_before_all_others_in_their_order() -> None:
    bench = Bench()
    bench.put("a", 3)
    bench.put("b", 3)
    first = bench.take(groups=2)
    bench.all.put_back(first)
    assert bench.all.queued("a") + bench.all.queued("b") == 6
    assert bench.take(groups=2) == first


def test_a_dead_environments_backlog_keeps_the_weight_it_had() -> None:
    bench = Bench(a=share(0, 3.0), b=share(1, 1.0))
    bench.put("a", 100)
    bench.put("b", 100)
    bench.take(groups=4)
    bench.shares = {"b": share(1, 1.0)}
    taken = Counter(each.producer_id for _ in range(10) for each in bench.take(groups=8))
    assert taken["a"] == pytest.approx(60, abs=3)


def test_producers_that_come_and_go_leave_nothing_behind() -> None:
    bench = Bench(a=share(0, 3.0))
    for number in range(2000):
        bench.put(f"p{number}")
        bench.take(groups=1)
    assert bench.all.flows < 300


def test_another_policy_is_refused() -> None:
    with pytest.raises(ValueError, match="newest"):
        scheduler_of("newest", 1.0)
    with pytest.raises(ValueError, match="allocation_wait_s=-1"):
        scheduler_of("fair", -1)
