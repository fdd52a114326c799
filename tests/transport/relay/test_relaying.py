"""A source and a destination on two bridges: order, deaths of either, room, staleness, refusals, ends."""

import sys
import threading
import time

import numpy as np
import pytest
from relaying import balanced, exchange, group, send, take, taken

import shmbridge
from shmbridge.config import Run
from shmbridge.relay import wire
from shmbridge.schema import LOGPROBS, recorded_logprobs
from shmbridge.segments import LockByte, lane_names, lock_exclusive, open_mapping, read_receipts, unlock
from shmbridge.testing import wait_until
from shmbridge.testing.fixtures import known_groups

NODE = "env-1"


def keys_of(producer: shmbridge.Producer, count: int, start: int = 0) -> list[tuple[str, int]]:
    return [(producer.producer_id, number) for number in range(start, start + count)]


def test_all_come_once_and_in_order_per_source(make_source, make_destination, put_there, consumer):
    source, destination = make_source(), make_destination()
    producers = [put_there(env_name=name) for name in ("gsm8k", "math", "math")]
    sent = []
    for number in range(60):
        producer = producers[number % 3]
        sent.append((producer.producer_id, producer.put(group(number), policy_version=4)))
    exchange(source, destination, 3)
    came = taken(consumer)
    assert sorted(came) == sorted(sent)
    for producer in producers:
        assert [each for each in came if each[0] == producer.producer_id] == keys_of(producer, 20)
    exchange(source, destination)  # brings the acknowledgement
    assert source.stats()["acknowledged_total"] == source.stats()["taken_total"] == 60
    assert balanced(source.stats())
    assert destination.stats()["duplicates_total"] == 0
    assert all(producer.held == 0 for producer in producers)


def test_records_are_what_they_were(make_source, make_destination, put_there, consumer):
    """Ragged rows, absent columns, a group in two fragments, two versions; and columns of the user's own."""
    import pyarrow as pa

    producer = put_there(schema=pa.schema([("mine", pa.list_(pa.float32()))]))
    groups = known_groups(seed=5)
    for each in groups:
        each.put(producer)
    producer.put({**group(1), "mine": [[0.5], [0.25, 2.0]]}, split="eval")
    exchange(make_source(), make_destination(), 2)
    came = consumer.poll()
    for record in came:
        assert record.meta.env_name == "gsm8k"
        assert record.meta.origin.node == NODE
        assert record.meta.origin.waited_ns > 0
        assert record.meta.origin.transfer_ns > 0
    fragments = [fragment for each in groups for fragment in each.fragments]
    for record, fragment in zip(came, fragments, strict=False):
        assert set(record.columns) == set(fragment)
        for name, rows in fragment.items():
            column = record[name]
            mine = [column[at] for at in range(len(column))] if hasattr(column, "lengths") else column
            if name in LOGPROBS:  # where there was none, put has its mark
                rows = [recorded_logprobs(row) for row in rows]
            assert all(
                np.array_equal(a, b, equal_nan=name in LOGPROBS) for a, b in zip(mine, rows, strict=True)
            )
    assert came[-1].meta.split == "eval"
    assert [row.tolist() for row in came[-1]["mine"]] == [[0.5], [0.25, 2.0]]
    assert [(each.meta.min_policy_version, each.meta.max_policy_version) for each in came[-2:-1]] == [(2, 4)]


def test_another_source_relay_sends_only_what_is_not_committed(
    make_source, make_destination, put_there, consumer
):
    producer, destination = put_there(), make_destination()
    first = make_source()
    for number in range(10):
        producer.put(group(number))
    exchange(first, destination)  # committed there, and not acknowledged here
    for number in range(10, 20):
        producer.put(group(number))
    first.close()  # releases nothing, as a kill
    second = make_source()
    exchange(second, destination, 2)
    assert taken(consumer) == keys_of(producer, 20)
    assert destination.stats()["duplicates_total"] == 0  # the ask said what is there
    assert second.stats()["acknowledged_total"] == 20
    assert balanced(second.stats())


def test_a_lane_that_is_gone_left_what_another_destination_needs(
    bridge, make_source, make_destination, put_there, consumer
):
    """The first relay dies after a commit and before it acknowledges; its lane is read and removed."""
    producer, source = put_there(), make_source()
    first = make_destination()
    for number in range(10):
        producer.put(group(number))
    exchange(source, first)
    assert taken(consumer) == keys_of(producer, 10)
    first.close()
    wait_until(lambda: not lane_names(bridge))
    assert [each.sequence for each in read_receipts(bridge)] == [9]
    producer.put(group(10))
    second = make_destination()
    exchange(source, second, 2)
    assert taken(consumer) == keys_of(producer, 1, 10)
    assert second.stats()["duplicates_total"] == 0
    assert not read_receipts(bridge)  # the new lane says it


def test_another_source_relay_between_two_asks_repeats_what_waits(
    make_source, make_destination, put_there, consumer
):
    """No ask of the destination fails: it does not hear of the death."""
    producer, source, destination = put_there(), make_source(), make_destination()
    for number in range(20):
        producer.put(group(number))
    consumer.pause()
    exchange(source, destination)
    assert destination.stats()["waiting"] == 20
    source.close()
    source = make_source()
    exchange(source, destination)
    consumer.resume()
    assert take(consumer, 20, lambda: exchange(source, destination)) == keys_of(producer, 20)
    exchange(source, destination)
    assert source.stats()["held"] == 0
    assert not any(name.startswith("refused") for name in destination.stats() | source.stats())
    assert balanced(source.stats())


def test_a_lost_answer_is_sent_again(make_source, make_destination, put_there, consumer):
    producer, source, destination = put_there(), make_source(), make_destination()
    for number in range(10):
        producer.put(group(number))
    send(source, destination.request(NODE))  # and never comes
    destination.cancel(NODE)
    exchange(source, destination, 2)
    assert taken(consumer) == keys_of(producer, 10)
    assert source.stats()["sent_again_total"] == 10
    assert balanced(source.stats())


def test_an_answer_out_of_turn_is_not_believed(make_source, make_destination, put_there, consumer):
    """Its records would come after a gap, and all before them would be taken for duplicates."""
    producer, source, destination = put_there(), make_source(), make_destination()
    producer.put(group(0))
    exchange(source, destination)
    producer.put(group(1))
    send(source, destination.request(NODE))
    producer.put(group(2))
    late = send(source, destination.request(NODE))
    assert [each.sequence for each in late.records] == [2]
    assert destination.accept(NODE, late, time.monotonic_ns()) == 0
    exchange(source, destination, 2)
    assert taken(consumer) == keys_of(producer, 3)


def test_what_is_sent_twice_is_put_once(make_source, make_destination, put_there, consumer):
    """The commit happened, and the next ask, which says so, was lost: a session that begins again."""
    producer, source, destination = put_there(), make_source(), make_destination()
    for number in range(5):
        producer.put(group(number))
    ask = destination.request(NODE)
    parcel = send(source, ask)
    destination.accept(NODE, parcel, time.monotonic_ns())
    destination.cancel(NODE)
    again = destination.request(NODE)
    parcel.state.session = again.session
    destination.accept(NODE, parcel, time.monotonic_ns())
    assert destination.stats()["duplicates_total"] == 5
    assert taken(consumer) == keys_of(producer, 5)


def test_a_full_lane_holds_its_own_producer_back_and_nobody_else(
    make_source, make_destination, put_there, consumer, bridge
):
    """Memory stays within the lanes here and the credits; the remote producer waits; all come in the end."""
    source, destination = make_source(), make_destination(lane_bytes=64 << 10)
    greedy, modest = put_there(on_full="raise", lane_bytes="64K"), put_there(env_name="math")
    put = 0
    for _ in range(2000):
        try:
            greedy.put(group(put, tokens=64))
            put += 1
        except shmbridge.LaneFull:
            before = greedy.held
            exchange(source, destination, 3)
            if greedy.held == before:
                break
    else:
        pytest.fail("the producer never waited")
    assert destination.stats()["waiting_bytes"] <= 64 << 10
    assert source.stats()["held"] <= put
    modest.put(group(1))
    exchange(source, destination, 2)
    came = take(consumer, put + 1, lambda: exchange(source, destination))
    assert [each for each in came if each[0] == greedy.producer_id] == keys_of(greedy, put)
    assert [each for each in came if each[0] == modest.producer_id] == keys_of(modest, 1)
    assert balanced(source.stats())


def test_a_record_too_large_for_its_lane_gets_a_larger_one(
    bridge, make_source, make_destination, put_there, consumer
):
    producer = put_there(lane_bytes="16M")
    source, destination = make_source(), make_destination(lane_bytes=64 << 10)
    producer.put(group(0))
    exchange(source, destination, 2)
    producer.put(group(1, tokens=100_000))
    producer.put(group(2))
    exchange(source, destination, 2)
    assert taken(consumer) == keys_of(producer, 1)  # nothing may overtake it before it is taken
    assert take(consumer, 2, lambda: exchange(source, destination)) == keys_of(producer, 2, 1)


def test_a_group_id_may_be_used_again_after_a_relay_ended_in_its_group(
    make_source, make_destination, put_there, consumer
):
    """The second relay's lane has only the last fragment of the first group, which is whole."""
    producer, source, first = put_there(), make_source(), make_destination()
    producer.put(group(0), group_id="prompt 1", group_size=4)
    exchange(source, first)
    assert consumer.take_groups(groups=1) is None
    first.close()
    producer.put(group(1), group_id="prompt 1", group_size=4)
    producer.put(group(2, rows=6), group_id="prompt 1")
    second = make_destination()
    exchange(source, second, 2)
    groups = []
    until = time.monotonic() + 10
    while len(groups) < 2 and time.monotonic() < until:
        exchange(source, second)
        groups += consumer.take_groups(groups=1, timeout_s=0.1) or []
    assert [[each.meta.origin.sequence for each in found.records] for found in groups] == [[0, 1], [2]]
    assert not any(name.startswith("refused") for name in second.stats())


def test_a_fragment_too_large_for_its_lane_completes_its_group(
    make_source, make_destination, put_there, consumer
):
    """The lane's own record is released with its group, and so after the larger lane is needed."""
    producer = put_there(lane_bytes="16M")
    source, destination = make_source(), make_destination(lane_bytes=64 << 10)
    for number, tokens in enumerate((8, 100_000)):
        producer.put(group(number, tokens=tokens), group_id="whole", group_size=4)
    whole = None
    until = time.monotonic() + 10
    while whole is None and time.monotonic() < until:
        exchange(source, destination)
        whole = consumer.take_groups(groups=1, timeout_s=0.1)
    assert [each.meta.origin.sequence for each in whole[0].records] == [0, 1]


def test_stale_records_never_travel(make_source, make_destination, put_there, consumer):
    producer, source = put_there(), make_source()
    destination = make_destination(max_staleness=1)
    consumer.publish_policy_version(3)
    for version in (1, 2, 3, 0):
        producer.put(group(version), policy_version=version)
    exchange(source, destination, 2)
    assert [sequence for _, sequence in taken(consumer)] == [1, 2]
    stats = source.stats()
    assert stats["discarded_total{stale}"] == 2
    assert balanced(stats)
    bridge_stats = source.consumer_stats()
    assert bridge_stats["discarded_total{stale}"] == 2
    assert bridge_stats["records_total"] == 4


def test_versions_pauses_and_runs_reach_the_other_node(
    make_source, make_destination, put_there, make_consumer
):
    consumer = make_consumer(run=Run(num_steps=7))
    producer, source, destination = put_there(), make_source(), make_destination()
    consumer.publish_policy_version(5)
    consumer.step_done()
    consumer.pause()
    wait_until(lambda: destination.work() or destination.request(NODE).run is not None)
    destination.cancel(NODE)
    exchange(source, destination)
    assert producer.policy_version == 5
    assert producer.paused
    assert source._consumer.run.num_steps == 7
    assert source._consumer.current_step == 1
    consumer.resume()
    consumer.step_done()
    time.sleep(1.1)  # the run is looked at once a second
    exchange(source, destination, 2)
    assert not producer.paused
    assert source._consumer.current_step == 2


def test_what_the_lane_cannot_carry_is_refused_and_counted(
    make_source, make_destination, put_there, consumer
):
    producer, source, destination = put_there(), make_source(), make_destination()
    for number in range(3):
        producer.put(group(number))
    destination.accept(NODE, spoiled(send(source, destination.request(NODE)), 1), time.monotonic_ns())
    assert destination.stats()["refused_total{SB204}"] == 1
    exchange(source, destination, 2)
    assert [sequence for _, sequence in taken(consumer)] == [0, 2]
    assert source.stats()["refused_total{SB204}"] == 1
    assert source.stats()["acknowledged_total"] == 2
    assert balanced(source.stats())


def spoiled(parcel: wire.PullReply, at: int) -> wire.PullReply:
    """The parcel, one of whose records no lane can take."""
    parcel.records[at].extent[:4] = 255  # its directory
    return parcel


def test_two_asks_may_say_the_same_refusal(make_source, make_destination, put_there, consumer):
    producer, source, destination = put_there(), make_source(), make_destination()
    for number in range(2):
        producer.put(group(number))
    destination.accept(NODE, spoiled(send(source, destination.request(NODE)), 1), time.monotonic_ns())
    answers = []
    for number in range(2, 4):
        producer.put(group(number))
        answers.append(send(source, destination.request(NODE)))
    for each in answers:
        destination.accept(NODE, each, time.monotonic_ns())
    assert [sequence for _, sequence in taken(consumer)] == [0, 2, 3]


def test_a_refusal_after_an_ask_is_said_with_the_next_one(make_source, make_destination, put_there, consumer):
    producer, source, destination = put_there(), make_source(), make_destination()
    answers = []
    for number in range(2):
        producer.put(group(number))
        answers.append(spoiled(send(source, destination.request(NODE)), 0))
    destination.accept(NODE, answers[0], time.monotonic_ns())
    third = send(source, destination.request(NODE))  # which says that the first is refused
    destination.accept(NODE, answers[1], time.monotonic_ns())
    destination.accept(NODE, third, time.monotonic_ns())
    exchange(source, destination)
    assert source.stats()["held"] == 0
    assert source.stats()["refused_total{SB204}"] == 2
    assert balanced(source.stats())


def test_a_parcel_that_could_not_be_put_is_sent_again(
    make_source, make_destination, put_there, consumer, monkeypatch
):
    """What comes after it would make its records look committed."""
    producer, source, destination = put_there(), make_source(), make_destination()
    for number in range(3):
        producer.put(group(number))
    parcel, put = send(source, destination.request(NODE)), shmbridge.Producer.put

    def without_memory(self, record, **options):
        if record.sequence == 1:
            raise MemoryError
        return put(self, record, **options)

    monkeypatch.setattr(shmbridge.Producer, "put", without_memory)
    with pytest.raises(MemoryError):
        destination.accept(NODE, parcel, time.monotonic_ns())
    monkeypatch.undo()
    producer.put(group(3))
    exchange(source, destination, 2)
    assert taken(consumer) == keys_of(producer, 4)


def test_a_node_may_have_another_name(make_source, make_destination, put_there, consumer):
    """As when a second node of the same host name joins a cluster."""
    producer, source, first = put_there(), make_source("host"), make_destination()
    producer.put(group(0))
    exchange(source, first)
    first.close()
    source.close()
    renamed, second = make_source("host-0a1b2c3d"), make_destination()
    exchange(renamed, second, 2)
    assert renamed.stats()["held"] == 0
    assert taken(consumer) == keys_of(producer, 1)


@pytest.mark.parametrize("how", ["refused", "stale"])
def test_a_source_that_ends_without_a_committed_record_is_finished(
    how, bridge, elsewhere, make_source, make_destination, put_there, consumer
):
    producer, source = put_there(), make_source()
    destination = make_destination(max_staleness=0)
    consumer.publish_policy_version(1)
    exchange(source, destination)
    producer.put(group(0), policy_version=0 if how == "stale" else 1)
    parcel = send(source, destination.request(NODE))
    destination.accept(NODE, spoiled(parcel, 0) if parcel.records else parcel, time.monotonic_ns())
    exchange(source, destination)
    producer.close()
    wait_until(lambda: exchange(source, destination) or not lane_names(elsewhere))
    exchange(source, destination)
    assert source.stats()["lanes"] == destination.stats()["lanes"] == 0
    wait_until(lambda: not lane_names(bridge))


def test_a_source_that_ends_is_finished_on_both_nodes(
    bridge, elsewhere, make_source, make_destination, put_there, consumer
):
    producer, source, destination = put_there(), make_source(), make_destination()
    producer.put(group(0))
    exchange(source, destination)
    producer.close()
    assert taken(consumer) == keys_of(producer, 1)
    wait_until(lambda: exchange(source, destination) or not lane_names(elsewhere))
    wait_until(lambda: exchange(source, destination) or destination.stats()["lanes"] == 0)
    wait_until(lambda: not lane_names(bridge))
    assert not read_receipts(bridge)
    assert not destination.request(NODE).committed


def after_part_of_a_group(put_there, make_source, make_destination):
    """A source, and the next destination: the first one and the producer end after part of a group."""
    producer, source, first = put_there(), make_source(), make_destination()
    producer.put(group(0), group_id="whole", group_size=4)
    exchange(source, first, 2)
    first.close()
    producer.close()
    second = make_destination()
    return source, second


def test_the_end_of_a_source_of_an_earlier_destination_is_said(
    bridge, elsewhere, make_source, make_destination, put_there, consumer
):
    """A partial group of a source that is gone would wait for an end that a dead relay cannot say."""
    source, second = after_part_of_a_group(put_there, make_source, make_destination)
    wait_until(lambda: exchange(source, second) or not lane_names(elsewhere))
    wait_until(lambda: exchange(source, second) or not second.request(NODE).committed)
    assert consumer.take_groups(groups=1, timeout_s=0.1) is None
    wait_until(lambda: consumer.take_groups(groups=1) or consumer.stats()["discarded_total{partial}"] == 1)


def test_the_end_of_a_source_waits_for_the_lock_of_its_lane(
    bridge, elsewhere, make_source, make_destination, put_there, consumer
):
    """A process holds that lock while it tries to remove the lane, or reads its memory map."""
    source, second = after_part_of_a_group(put_there, make_source, make_destination)
    lane = open_mapping(lane_names(bridge)[0])
    wait_until(lambda: lock_exclusive(lane.fd, LockByte.PRODUCER))
    wait_until(lambda: exchange(source, second) or not lane_names(elsewhere))
    exchange(source, second, 2)
    unlock(lane.fd, LockByte.PRODUCER)
    wait_until(lambda: exchange(source, second) or not second.request(NODE).committed)
    wait_until(lambda: consumer.take_groups(groups=1) or consumer.stats()["discarded_total{partial}"] == 1)


def test_a_node_that_is_gone_says_how_many_were_never_relayed(
    make_source, make_destination, put_there, consumer
):
    producer, source, destination = put_there(), make_source(), make_destination(max_bytes=1)
    for number in range(5):
        producer.put(group(number))
    exchange(source, destination, 2)  # a record each
    assert destination.gone(NODE)[:2] == (3, 1)
    assert destination.stats()["never_relayed_total"] == 3
    assert taken(consumer) == keys_of(producer, 2)
    # It was not gone.
    assert take(consumer, 3, lambda: exchange(source, destination)) == keys_of(producer, 3, 2)


def test_a_lane_that_is_being_removed_is_no_second_relay(
    bridge, make_source, make_destination, put_there, consumer
):
    """Whoever removes it holds its lock meanwhile."""
    producer, source, first = put_there(), make_source(), make_destination()
    producer.put(group(0))
    exchange(source, first)
    first.close()
    lane = open_mapping(lane_names(bridge)[0])
    wait_until(lambda: lock_exclusive(lane.fd, LockByte.PRODUCER))
    ends = threading.Timer(0.1, unlock, (lane.fd, LockByte.PRODUCER))
    ends.start()
    make_destination()
    ends.join()


def test_counters_are_for_any_thread(make_source, make_destination, put_there, consumer):
    producer, source, destination = put_there(), make_source(), make_destination()
    producer.put(group(0))
    exchange(source, destination)
    destination.cancel(NODE)
    counts, ended, wrong = destination._nodes[NODE].counts, threading.Event(), []

    def look() -> None:
        while not (ended.is_set() or wrong):
            try:
                destination.stats()
            except RuntimeError as changed:
                wrong.append(changed)

    looker, before = threading.Thread(target=look), sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        looker.start()
        for number in range(100_000):
            counts[f"refused_total{{SB{number % 7}}}"] += 1
            if number % 7 == 6:
                counts.clear()
    finally:
        sys.setswitchinterval(before)
        ended.set()
        looker.join()
    assert not wrong


def test_a_drained_learner_drains_the_other_node(make_source, make_destination, put_there, consumer):
    producer, source, destination = put_there(), make_source(), make_destination()
    consumer.drain()
    exchange(source, destination)
    with pytest.raises(shmbridge.BridgeDraining):
        producer.put(group(0))


@pytest.mark.parametrize("seed", range(4))
def test_any_order_of_deaths_loses_and_repeats_nothing(
    seed, bridge, make_source, make_destination, put_there, consumer
):
    """Relays of both nodes begin again at any point, answers are lost, the learner takes when it likes."""
    random = np.random.default_rng(seed)
    producers = [put_there(lane_bytes="1M") for _ in range(3)]
    source, destination = make_source(), make_destination(max_bytes=2000)
    put, came = 0, []
    for _ in range(150):
        what = random.integers(0, 8)
        if what <= 1 and put < 400:
            for _ in range(random.integers(1, 10)):
                producers[put % 3].put(group(put, tokens=int(random.integers(1, 100))))
                put += 1
        elif what <= 3:
            exchange(source, destination, int(random.integers(1, 4)))
        elif what == 4:
            came += taken(consumer)
        elif what == 5:
            source.close()
            source = make_source()
            if random.integers(0, 2):  # else nothing was on its way
                destination.cancel(NODE)
        elif what == 6:
            destination.close()
            destination = make_destination(max_bytes=2000)
        else:
            send(source, destination.request(NODE))
            destination.cancel(NODE)
    came += take(consumer, put - len(came), lambda: exchange(source, destination))
    for producer in producers:
        mine = [each for each in came if each[0] == producer.producer_id]
        assert mine == keys_of(producer, len(mine))
    assert len(came) == put
    exchange(source, destination)
    assert balanced(source.stats())
    assert consumer.stats()["held"] == 0
