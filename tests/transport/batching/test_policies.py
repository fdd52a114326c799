"""Both policies through real lanes: the groups of a batch, the waits, a run's steps, the numbers for
environments.
"""

import threading
import time
from collections import Counter

import numpy as np
import pytest

import shmbridge
from shmbridge.control.environments import AtroposQueue, EnvWeight
from shmbridge.control.messages import Register, StatusRequest
from shmbridge.control.server import ControlClient


def group(number: int, rows: int = 1, env_id: int | None = None) -> dict:
    return {"tokens": [[number]] * rows} | ({} if env_id is None else {"env_id": env_id})


def firsts(groups) -> list[int]:
    return [int(each.records[0]["tokens"].values[0]) for each in groups]


def let_go(groups) -> None:
    for each in groups:
        for record in each.records:
            record.release()


@pytest.fixture
def register(bridge):
    """Call it to register a producer's environment; returns its number."""

    def call(producer, **asks) -> int:
        with ControlClient(bridge, role="test", name="t") as control:
            fields = {
                "desired_name": "env",
                "max_token_length": 64,
                "group_size": 1,
                "producer_id": producer.producer_id,
            }
            return control.request(Register(**(fields | asks))).env_id

    return call


@pytest.fixture
def status(bridge):
    def call(env_id: int):
        with ControlClient(bridge, role="test", name="t") as control:
            return control.request(StatusRequest(env_id))

    return call


# -- fair
# ------------------------------------------------------------------------------------------------------------


def test_a_batch_is_fair_over_what_all_lanes_hold(make_producer, make_consumer, register) -> None:
    """One environment is far ahead; the other still gets its part by weight."""
    fast, slow = make_producer(), make_producer()
    consumer = make_consumer(run=shmbridge.Run(batch_size=8))
    register(fast, weight=1.0)
    register(slow, weight=3.0)
    for number in range(60):
        fast.put(group(number))
    for number in range(100, 130):
        slow.put(group(number))
    mixes = []
    for _ in range(4):
        taken = consumer.take_groups(groups=8, timeout_s=5)
        mixes.append(sum(number >= 100 for number in firsts(taken)))
        let_go(taken)
    assert sum(mixes) == pytest.approx(24, abs=2)


def test_records_are_not_taken_ahead_while_nobody_asks_for_a_weight(make_producer, make_consumer) -> None:
    producers, consumer = [make_producer(), make_producer()], make_consumer()
    for number in range(10):
        producers[number % 2].put(group(number))
    let_go(consumer.take_groups(groups=4, timeout_s=5))
    consumer.close()
    assert [record.meta.redelivered for record in make_consumer().poll()] == [False] * 6


def test_a_share_is_waited_for_without_an_error_and_then_counted(
    make_producer, make_consumer, register
) -> None:
    """All lanes are full during the wait, with too few groups of one environment: no sizing error, since the
    wait has an end.
    """
    eager, late = make_producer(on_full="raise"), make_producer(on_full="raise")
    consumer = make_consumer(run=shmbridge.Run(batch_size=4), allocation_wait_s=1.8)
    register(eager)
    register(late, min_batch_allocation=0.5)
    for producer, tokens in ((eager, 3000), (late, 7000)):
        with pytest.raises(shmbridge.LaneFull):
            for _ in range(100):
                producer.put({"tokens": [np.arange(tokens)]}, timeout_s=0)
    began = time.monotonic()
    batch = next(consumer.batches(groups=6, prefetch=0))
    assert 1.8 <= time.monotonic() - began < 10
    assert sum(meta.producer_id == late.producer_id for meta in batch.meta) < 3
    assert consumer.stats()["allocations_missed_total"] == 1


def test_a_share_that_comes_ends_the_wait(make_producer, make_consumer, register) -> None:
    eager, late = make_producer(), make_producer()
    consumer = make_consumer(run=shmbridge.Run(batch_size=4), allocation_wait_s=60)
    register(eager)
    register(late, min_batch_allocation=0.5)
    for number in range(4):
        eager.put(group(number))
    assert consumer.take_groups(groups=2, timeout_s=0.2) is None
    threading.Timer(0.2, lambda: late.put(group(100))).start()
    taken = consumer.take_groups(groups=2, timeout_s=20)
    assert (firsts(taken), consumer.stats()["allocations_missed_total"]) == ([0, 100], 0)
    let_go(taken)


def test_nobody_waits_for_an_environment_that_has_left(make_producer, make_consumer, register, until) -> None:
    eager, gone = make_producer(), make_producer()
    consumer = make_consumer(run=shmbridge.Run(batch_size=4), allocation_wait_s=60)
    register(eager)
    register(gone, min_batch_allocation=0.5)
    for number in range(4):
        eager.put(group(number))
    gone.close()
    until(lambda: gone.producer_id not in consumer._lanes.live_producers())
    taken = consumer.take_groups(groups=2, timeout_s=10)
    assert firsts(taken) == [0, 1]
    let_go(taken)


def test_trajectories_that_are_left_when_the_bridge_drains_come_in_a_short_batch(
    make_producer, make_consumer
) -> None:
    producer, consumer = make_producer(), make_consumer()
    for number in range(5):
        producer.put(group(number, rows=3))
    consumer.drain()
    assert [len(batch) for batch in consumer.batches(rows=7)] == [6, 6, 3]
    assert (consumer.stats()["batches_short_total"], consumer.stats()["released_total"]) == (3, 5)


def test_groups_that_are_stale_when_put_back_are_cut(make_producer, make_consumer) -> None:
    producer, consumer = make_producer(), make_consumer()
    for number in range(4):
        producer.put(group(number), policy_version=5)
    consumer.publish_policy_version(5)
    taken = consumer.take_groups(groups=2, max_staleness=1, timeout_s=5)
    consumer.publish_policy_version(9)
    assert consumer.take_groups(groups=1, max_staleness=1) is None
    consumer.put_back(taken)
    assert consumer.take_groups(groups=1, max_staleness=1) is None
    assert consumer.stats()["discarded_total{stale}"] == 4


def test_staleness_is_looked_at_once_per_group_and_version(make_producer, make_consumer) -> None:
    producer, consumer = make_producer(), make_consumer()
    for number in range(40):
        producer.put(group(number), policy_version=0)
    consumer.publish_policy_version(0)
    assert consumer.take_groups(groups=1000, max_staleness=3, timeout_s=0.6) is None
    assert consumer._hub.former._queues.looks <= 80


@pytest.mark.parametrize("policy", ["fair", "atropos"])
def test_a_version_that_makes_nothing_stale_costs_no_look_at_what_is_queued(
    make_producer, make_consumer, policy
) -> None:
    producer, consumer = make_producer(), make_consumer(run=shmbridge.Run(batch_size=1000), policy=policy)
    for number in range(40):
        producer.put(group(number), policy_version=2 if number < 20 else 6)
    consumer.publish_policy_version(6)
    assert consumer.take_groups(groups=1000, max_staleness=5, timeout_s=0.3) is None
    looks = consumer._hub.former._queues.looks
    consumer.publish_policy_version(7)
    assert consumer.take_groups(groups=1000, max_staleness=5, timeout_s=0.3) is None
    assert consumer._hub.former._queues.looks == looks
    for version, left in ((8, 20), (11, 20), (12, 0)):
        consumer.publish_policy_version(version)
        assert consumer.take_groups(groups=1000, max_staleness=5, timeout_s=0.3) is None
        assert consumer.queue.groups() == left
    assert consumer.stats()["discarded_total{stale}"] == 40


@pytest.mark.parametrize("prefetch", [0, 1])
def test_a_batch_that_does_not_come_in_time_is_an_error_that_says_who_lives(
    make_producer, make_consumer, prefetch
) -> None:
    producer, consumer = make_producer(), make_consumer()
    producer.put(group(1))
    with pytest.raises(
        shmbridge.ConsumerEmpty,
        match=r"no batch of 2 groups within 0.2 s; 1 of 1 lane has .* 1 group is queued",
    ):
        next(consumer.batches(groups=2, prefetch=prefetch, timeout_s=0.2))
    producer.put(group(2))
    assert len(next(consumer.batches(groups=2, prefetch=prefetch, timeout_s=20))) == 2


def test_a_timeout_does_not_hide_the_end(make_producer, make_consumer) -> None:
    consumer = make_consumer()
    consumer.drain()
    for prefetch in (0, 1):
        assert list(consumer.batches(groups=2, prefetch=prefetch, timeout_s=5)) == []
    assert list(consumer.batches(groups=2, prefetch=0, timeout_s=0)) == []


def test_stats_say_how_much_of_each_environment_is_queued(make_producer, make_consumer, register) -> None:
    producer, consumer = make_producer(), make_consumer(run=shmbridge.Run())
    register(producer, desired_name="gsm8k")
    producer.put(group(1))
    assert consumer.stats()["queue_groups{gsm8k_0}"] == 1


# -- atropos
# ------------------------------------------------------------------------------------------------------------


def test_atropos_forms_what_upstream_would_of_the_same_arrivals(
    make_producer, make_consumer, register
) -> None:
    producers = [make_producer(lane_bytes="256K") for _ in range(3)]
    consumer = make_consumer(run=shmbridge.Run(batch_size=8, starting_step=3), policy="atropos")
    asks = [{"group_size": 4}, {"group_size": 2, "min_batch_allocation": 0.25}, {"group_size": 1}]
    like: AtroposQueue[int] = AtroposQueue(8)
    env_ids = [register(producer, **asked) for producer, asked in zip(producers, asks, strict=True)]
    for env_id, asked in zip(env_ids, asks, strict=True):
        like.register(EnvWeight(env_id, "", 1.0, asked.get("min_batch_allocation"), asked["group_size"]))
    rng = np.random.default_rng(7)
    for number in range(120):
        who = int(rng.integers(3))
        rows = int(rng.choice([asks[who]["group_size"], 1, 2, 4]))
        producers[who].put(group(number, rows, env_ids[who]))
        like.add(number, rows, env_ids[who])
        if number % 40 == 39:
            taken, wanted = consumer.take_groups(timeout_s=0), like.next_batch()
            taken = taken or consumer.take_groups(timeout_s=0)  # the first look takes them from the lanes
            assert firsts(taken) == wanted
            assert consumer.current_step == 3 + like.step
            let_go(taken)
    while (wanted := like.next_batch()) is not None:
        taken = consumer.take_groups(timeout_s=0)
        assert firsts(taken) == wanted
        let_go(taken)
    assert consumer.take_groups(timeout_s=0) is None
    assert (len(consumer._hub.former), consumer.stats()["groups_buffered"]) == (
        like.queue_size,
        like.buffered,
    )


@pytest.mark.parametrize("prefetch", [0, 1])
def test_atropos_hands_out_the_newest_batch_first_and_counts_all_it_formed(
    make_producer, make_consumer, prefetch
) -> None:
    producer, consumer = make_producer(), make_consumer(run=shmbridge.Run(batch_size=4), policy="atropos")
    for number in range(7):
        producer.put(group(number, rows=2))
    consumer.drain()
    batches = consumer.batches(prefetch=prefetch)
    assert next(batches).tokens[::2].tolist() == [4, 5]
    assert (consumer.current_step, consumer.stats()["queue_groups"]) == (3, 1)
    assert [batch.tokens[::2].tolist() for batch in batches] == [[2, 3], [0, 1]]
    assert (consumer.stats()["batches_total"], consumer.current_step) == (3, 3)
    consumer.announce_run(shmbridge.Run(batch_size=4, starting_step=10))
    assert consumer.current_step == 10


def test_groups_that_atropos_never_batches_are_the_next_consumers(
    make_producer, make_consumer, register
) -> None:
    producer = make_producer()
    consumer = make_consumer(run=shmbridge.Run(batch_size=4), policy="atropos")
    env_id = register(producer, group_size=2)
    for rows in (2, 2, 2, 3):  # two groups make a batch, one waits, one is never made whole
        producer.put(group(rows, rows, env_id))
    consumer.drain()
    assert [len(batch) for batch in consumer.batches()] == [4]
    consumer.close()
    records = make_consumer().poll()
    assert [(record.meta.sequence, record.meta.redelivered) for record in records] == [(2, True), (3, True)]


def test_atropos_put_back_comes_again_and_is_no_further_step(make_producer, make_consumer) -> None:
    producer, consumer = make_producer(), make_consumer(run=shmbridge.Run(batch_size=2), policy="atropos")
    for number in range(4):
        producer.put(group(number))
    first = consumer.take_groups(timeout_s=5)
    consumer.put_back(first)
    assert consumer.take_groups(timeout_s=5) == first
    assert (firsts(first), consumer.current_step) == ([2, 3], 2)
    let_go(first)


def test_atropos_discards_what_is_stale(make_producer, make_consumer) -> None:
    producer, consumer = make_producer(), make_consumer(run=shmbridge.Run(batch_size=2), policy="atropos")
    for version in (0, 5, 5, 5):
        producer.put(group(version), policy_version=version)
    consumer.publish_policy_version(3)
    taken = consumer.take_groups(timeout_s=5)
    consumer.publish_policy_version(5)
    assert consumer.take_groups(max_staleness=1) is None
    assert (
        consumer.stats()["discarded_total{stale}"],
        consumer.stats()["queue_groups"],
        consumer.current_step,
    ) == (1, 1, 1)
    let_go(taken)


def test_atropos_tells_environments_upstreams_numbers(make_producer, make_consumer, register, status) -> None:
    """Over what is queued, not over formed batches; groups of unusual sizes count as large as they are."""
    producers = [make_producer(), make_producer()]
    consumer = make_consumer(run=shmbridge.Run(batch_size=8), policy="atropos")
    like: AtroposQueue[int] = AtroposQueue(8)
    env_ids = [
        register(producer, group_size=4, weight=weight)
        for producer, weight in zip(producers, (1.0, 3.0), strict=True)
    ]
    for env_id, weight in zip(env_ids, (1.0, 3.0), strict=True):
        like.register(EnvWeight(env_id, "", weight, None, 4, 64))
    # a batch, two halves in the queue, one buffered
    for who, rows in [(0, 4), (0, 4), (1, 2), (1, 2), (1, 1)]:
        producers[who].put(group(who, rows, env_ids[who]))
        like.add(who, rows, env_ids[who])
    let_go(consumer.take_groups(timeout_s=5))
    like.next_batch()
    assert [consumer.queue.groups(producer.producer_id) for producer in producers] == [0, 2]
    for env_id in env_ids:
        told, wanted = status(env_id), like.status_env(env_id)
        ours = (
            told.queue_groups,
            told.self_queue_groups,
            told.max_group_size,
            told.unallocated_fraction,
            told.env_weight,
        )
        assert ours == tuple(
            wanted[key]
            for key in (
                "queue_size",
                "self_queue_size",
                "max_group_size",
                "unallocated_fraction",
                "env_weight",
            )
        )
        assert told.current_step == wanted["current_step"] == 1
    before = status(env_ids[0]).self_queue_groups
    producers[0].put(group(9, 4, env_ids[0]))  # not looked at yet
    assert status(env_ids[0]).self_queue_groups == before + 1


def test_a_dead_environments_allocation_does_not_stop_atropos(
    make_producer, make_consumer, register, status, until
) -> None:
    """Upstream never learns of a death; here the environment is removed when another one asks for status."""
    lives, dies = make_producer(), make_producer()
    consumer = make_consumer(run=shmbridge.Run(batch_size=2), policy="atropos")
    env_id, _ = register(lives), register(dies, min_batch_allocation=0.5)
    for number in range(2):
        lives.put(group(number, env_id=env_id))
    assert status(env_id).unallocated_fraction == 0.5  # both were seen alive
    assert consumer.take_groups(timeout_s=0.1) is None
    dies.close()
    until(lambda: status(env_id).unallocated_fraction == 1.0)
    taken = consumer.take_groups(timeout_s=5)
    assert firsts(taken) == [0, 1]
    let_go(taken)


def test_atropos_needs_a_run(make_consumer) -> None:
    with pytest.raises(ValueError, match="announce a run"):
        make_consumer(policy="atropos").batches()


def test_atropos_also_says_when_the_lanes_are_full_of_what_makes_no_batch(
    make_producer, make_consumer
) -> None:
    producer = make_producer(on_full="raise")
    consumer = make_consumer(run=shmbridge.Run(batch_size=100), policy="atropos")
    with pytest.raises(shmbridge.LaneFull):
        for _ in range(100):
            producer.put({"tokens": [np.arange(3000)]}, timeout_s=0)
    with pytest.raises(shmbridge.BatchTooBig, match="100 trajectories"):
        next(consumer.batches(prefetch=0))


@pytest.mark.parametrize("policy", ["fair", "atropos"])
def test_ranks_get_every_group_once(make_producer, make_consumer, make_rank, policy) -> None:
    consumer = make_consumer(run=shmbridge.Run(batch_size=8), policy=policy)
    producers = [make_producer(), make_producer()]
    server = consumer.serve_ranks(2, groups=4)
    seen: list[list[int]] = [[], []]
    rows: set[int] = set()

    def read(number: int, rank) -> None:
        for batch in rank.batches(timeout_s=20):
            seen[number] += batch.tokens[::2].tolist()
            rows.add(batch.manifest.batch_rows)

    threads = [threading.Thread(target=read, args=(number, make_rank(number, 2))) for number in range(2)]
    for thread in threads:
        thread.start()
    for number in range(16):
        producers[number % 2].put(group(number, rows=2))
    consumer.drain()
    for thread in threads:
        thread.join()
    assert server.wait(5)
    assert sorted(seen[0] + seen[1]) == list(range(16))
    assert (Counter(map(len, seen)), rows) == ({8: 2}, {8})
