"""Learner ranks beside a hub: every group once, in place, until all its readers are done."""

import os
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

import shmbridge
from shmbridge import errors
from shmbridge.batch import Batch
from shmbridge.control.server import RequestRefused
from shmbridge.testing import wait_until
from shmbridge.watch.snapshot import look

LEAVES = """
import sys, shmbridge

rank = shmbridge.Rank(sys.argv[1], 0, 1)
done, held = rank.next_share(20), rank.next_share(20)
done.release()
"""


def numbers_of(batch) -> list[int]:
    return sorted({int(row) for row in batch.tokens})


def read_all(rank, out, **options) -> None:
    for batch in rank.batches(timeout_s=20, **options):
        out.append((batch.manifest, numbers_of(batch)))


@pytest.fixture
def read_in_threads(make_rank):
    """Ranks 0..world_size-1, each in a thread of its own, until the bridge is drained: [[(manifest, group
    numbers)]].
    """

    def read(consumer, world_size: int, **options):
        outs: list[list] = [[] for _ in range(world_size)]
        ranks = [make_rank(number, world_size) for number in range(world_size)]
        threads = [
            threading.Thread(target=read_all, args=(rank, out), kwargs=options)
            for rank, out in zip(ranks, outs, strict=True)
        ]
        for thread in threads:
            thread.start()
        return outs, threads

    return read


@pytest.mark.parametrize("hold", ["step", "gather"])
def test_two_ranks_share_every_batch_between_them(
    hold, make_producer, make_consumer, read_in_threads, put_groups
):
    consumer, producers = make_consumer(), [make_producer(), make_producer()]
    server = consumer.serve_ranks(2, groups=4)
    outs, threads = read_in_threads(consumer, 2, hold=hold)
    put_groups(producers[0], range(12), lambda number: 1 + number % 5)
    put_groups(producers[1], range(12, 24), lambda number: 1 + number % 5)
    consumer.drain()
    for thread in threads:
        thread.join()
    assert server.wait(5)
    seen = [number for out in outs for _, numbers in out for number in numbers]
    assert sorted(seen) == list(range(24))
    for one, other in zip(*outs, strict=True):
        assert (one[0].step, one[0].rank, other[0].rank) == (other[0].step, 0, 1)
        assert len(one[1]) == len(other[1]) == 2
        assert (
            one[0].batch_tokens
            == other[0].batch_tokens
            == sum(2 * (1 + number % 5) for number in one[1] + other[1])
        )
        assert (one[0].batch_groups, one[0].batch_rows) == (4, 8)
    stats = consumer.stats()
    assert (stats["released_total"], stats["held"], stats["ranks_groups_done_total"]) == (24, 0, 24)


def test_broadcast_is_released_when_the_last_reader_is_done(
    make_producer, make_consumer, make_rank, put_groups
):
    consumer, producer = make_consumer(), make_producer()
    put_groups(producer, range(2))
    consumer.serve_ranks(2, groups=2, mode="broadcast", prefetch=0)
    ranks = [make_rank(number, 2) for number in range(2)]
    shares = [rank.next_share(10) for rank in ranks]
    assert [[record._sequence for record in share.records] for share in shares] == [[0, 1], [0, 1]]
    shares[0].release()
    ranks[0].report_done()
    assert consumer.stats()["held"] == 2
    shares[1].release()
    ranks[1].report_done()
    assert consumer.stats()["held"] == 0


def test_reading_is_in_place_and_read_only(make_producer, make_consumer, make_rank):
    consumer, producer, tokens = make_consumer(), make_producer(), np.arange(1000, dtype=np.int32)
    producer.put({"tokens": [tokens]}, group_id="g", policy_version=3)
    consumer.serve_ranks(1, groups=1)
    rank = make_rank()
    share = rank.next_share(10)
    record = share.records[0]
    assert np.array_equal(record["tokens"].values, tokens)
    assert not record["tokens"].values.flags.writeable
    assert not record["tokens"].values.flags.owndata
    assert (record.meta.group_id, record.meta.producer_id, record.meta.min_policy_version) == (
        "g",
        producer.producer_id,
        3,
    )
    assert not record.meta.redelivered


def test_a_view_keeps_the_record_until_it_is_dropped(make_producer, make_consumer, make_rank, put_groups):
    consumer, producer = make_consumer(), make_producer()
    put_groups(producer, range(1))
    consumer.serve_ranks(1, groups=1, prefetch=0)
    rank = make_rank()
    share = rank.next_share(10)
    view = share.records[0]["tokens"].values
    share.release()
    rank.report_done()
    assert consumer.stats()["held"] == 1
    assert view.tolist() == [0] * 10
    del view
    rank.report_done()
    assert consumer.stats()["held"] == 0


def test_a_batch_that_is_let_go_is_not_done_until_it_is_taken_back(
    make_producer, make_consumer, make_rank, put_groups
):
    consumer, producer = make_consumer(), make_producer()
    put_groups(producer, range(4))
    consumer.serve_ranks(1, groups=1, prefetch=0)
    rank = make_rank()
    for batch in rank.batches(timeout_s=10):
        break
    del batch
    with pytest.raises(errors.ConsumerEmpty, match="1 of its shares were dropped without release"):
        next(rank.batches(timeout_s=0.3))
    assert (rank.stats()["leases_dropped_total"], rank.take_back_dropped()) == (1, 1)
    with next(rank.batches(timeout_s=10)) as batch:
        assert (numbers_of(batch), batch.meta[0].redelivered) == ([0], True)
    assert numbers_of(next(rank.batches(timeout_s=10))) == [1]


def test_a_share_that_nobody_read_comes_again(make_producer, make_consumer, make_rank, put_groups):
    consumer, producer = make_consumer(), make_producer()
    put_groups(producer, range(4))
    consumer.serve_ranks(1, groups=1, prefetch=0)
    rank = make_rank()
    for _ in range(3):
        assert [record._sequence for record in rank.next_share(10).records] == [0]
    rank.next_share(10).release()
    with rank.next_share(10) as share:
        assert [record._sequence for record in share.records] == [1]
    assert rank.stats()["leases_dropped_total"] == 0


def test_a_share_of_which_a_part_was_held_for_longer_comes_again(
    make_producer, make_consumer, make_rank, put_groups
):
    """One record was let go unread and the other released later: the first stays un-released."""
    consumer, producer = make_consumer(), make_producer()
    put_groups(producer, range(3))
    consumer.serve_ranks(1, groups=2, prefetch=0)
    rank = make_rank()
    kept = rank.next_share(10).records[1]
    with pytest.raises(errors.ConsumerEmpty):
        rank.next_share(0.2)
    kept.release()
    with rank.next_share(10) as share:
        assert [record._sequence for record in share.records] == [0]
    rank.report_done()
    assert consumer.stats()["released_total"] == 2


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
@pytest.mark.parametrize("hold", ["step", "gather", "caller"])
def test_a_gather_that_is_interrupted_is_made_again(
    error, hold, make_producer, make_consumer, make_rank, put_groups, monkeypatch
):
    """Its reads do not count as the user's."""
    consumer, producer = make_consumer(), make_producer()
    put_groups(producer, range(2))
    consumer.serve_ranks(1, groups=1, prefetch=0)
    rank = make_rank()

    def interrupted(groups, layout):
        Batch(groups, layout)
        raise error

    with monkeypatch.context() as late:
        late.setattr("shmbridge.hub.rank.Batch", interrupted)
        with pytest.raises(error):
            next(rank.batches(timeout_s=10, hold=hold))
    with next(rank.batches(timeout_s=10, hold=hold)) as batch:
        assert numbers_of(batch) == [0]
    assert rank.stats()["leases_dropped_total"] == 0


def test_records_that_the_user_read_before_the_gather_stay_read(
    make_producer, make_consumer, make_rank, put_groups, monkeypatch
):
    consumer, producer = make_consumer(), make_producer()
    put_groups(producer, range(2))
    consumer.serve_ranks(1, groups=1, prefetch=0)
    rank = make_rank()
    share = rank.next_share(10)
    assert share.records[0].meta.sequence == 0
    monkeypatch.setattr("shmbridge.hub.rank.Batch", lambda *_: (_ for _ in ()).throw(MemoryError))
    with pytest.raises(MemoryError):
        rank.gather(share)
    del share
    with pytest.raises(errors.ConsumerEmpty, match="1 of its shares were dropped"):
        rank.next_share(0.3)


def test_a_batch_that_was_handed_out_counts_as_looked_at(make_producer, make_consumer, make_rank, put_groups):
    """It counts although only the gather read its records."""
    consumer, producer = make_consumer(), make_producer()
    put_groups(producer, range(2))
    consumer.serve_ranks(1, groups=1, prefetch=0)
    rank = make_rank()
    next(rank.batches(timeout_s=10))
    with pytest.raises(errors.ConsumerEmpty, match="1 of its shares were dropped"):
        rank.next_share(0.3)
    assert (rank.stats()["leases_dropped_total"], rank.take_back_dropped()) == (1, 1)


def test_backpressure_of_an_open_share(make_producer, make_consumer, make_rank, put_groups):
    """With prefetch=0 no second batch is formed while the first is read."""
    consumer, producer = make_consumer(), make_producer()
    put_groups(producer, range(2))
    consumer.serve_ranks(1, groups=1, prefetch=0)
    rank = make_rank()
    share = rank.next_share(10)
    with pytest.raises(errors.ConsumerEmpty, match="no share for rank 0"):
        rank.next_share(0.3)
    share.release()
    assert rank.next_share(10).manifest.step == 1


def test_one_process_per_rank(make_rank):
    make_rank(1, 2)
    with pytest.raises(errors.RankTaken, match="rank 1"):
        make_rank(1, 2)
    make_rank(0, 2)


def test_a_closed_rank_can_be_taken_again(make_rank):
    make_rank().close()
    make_rank()


def test_a_missing_hub_is_an_error_within_the_timeout(make_rank):
    with pytest.raises(errors.NoConsumer, match="had no consumer"):
        make_rank().next_share(0.2)


def test_a_hub_that_serves_no_ranks_is_waited_for(make_rank, make_consumer, make_producer, put_groups):
    consumer, rank, producer = make_consumer(), make_rank(), make_producer()
    put_groups(producer, range(1))
    with pytest.raises(errors.ConsumerEmpty):
        rank.next_share(0.2)
    consumer.serve_ranks(1, groups=1)
    assert rank.next_share(10) is not None


def test_another_world_size_is_refused(make_rank, make_consumer):
    make_consumer().serve_ranks(4, groups=4)
    with pytest.raises(RequestRefused, match="serves 4 ranks"):
        make_rank(0, 2).next_share(5)


def test_arguments_of_ranks_that_cannot_be_are_refused(make_consumer, bridge):
    consumer = make_consumer()
    wrongs = (
        {"world_size": 0},
        {"world_size": 4, "groups": 3},
        {"world_size": 1, "mode": "both"},
        {"world_size": 1, "dead_rank": "?"},
    )
    for wrong in wrongs:
        with pytest.raises(ValueError):
            consumer.serve_ranks(**{"groups": 8, **wrong})
    for rank, world_size in ((-1, 2), (2, 2), (0, 0)):
        with pytest.raises(ValueError):
            shmbridge.Rank(bridge, rank, world_size)
    consumer.serve_ranks(1)
    with pytest.raises(ValueError, match="already"):
        consumer.serve_ranks(1)


def test_a_batch_that_can_never_be_filled_is_said_to_the_ranks(make_rank, make_consumer, make_producer):
    """The lanes are full and hold fewer groups than a batch needs: an error with the numbers, not a wait
    without end.
    """
    consumer, producer = make_consumer(), make_producer(on_full="drop")
    while producer.put({"tokens": [np.zeros(2000, np.int32)]}) is not None:
        pass
    consumer.serve_ranks(1, groups=500)
    with pytest.raises(RequestRefused, match="cannot be filled"):
        make_rank().next_share(20)


def test_a_batch_that_grows_stale_while_it_waits_is_not_handed_out(
    make_rank, make_consumer, make_producer, put_groups, until
):
    consumer, producer = make_consumer(), make_producer()
    consumer.publish_policy_version(1)
    put_groups(producer, range(1), policy_version=1)
    consumer.serve_ranks(1, groups=1, max_staleness=1)
    until(lambda: consumer.stats()["ranks_steps_open"] == 1)
    consumer.publish_policy_version(3)
    rank = make_rank()
    with pytest.raises(errors.ConsumerEmpty):
        rank.next_share(0.5)
    put_groups(producer, range(1, 2), policy_version=3)
    assert consumer.stats()["batches_total"] == 0
    assert numbers_of(next(rank.batches(timeout_s=10))) == [1]
    assert consumer.stats()["discarded_total{stale}"] == 1
    assert consumer.stats()["batches_total"] == consumer.current_step == 1


def test_an_exception_tells_what_was_released(bridge, make_consumer, make_producer, put_groups):
    """The end of the `with` is a close: released shares are done, the others go to the successor."""
    consumer, producer = make_consumer(), make_producer()
    put_groups(producer, range(3))
    consumer.serve_ranks(1, groups=1, prefetch=1)
    with pytest.raises(ZeroDivisionError), shmbridge.Rank(bridge, 0, 1) as rank:
        done, held = rank.next_share(10), rank.next_share(10)
        done.release()
        raise ZeroDivisionError
    assert consumer.stats()["released_total"] == 1
    del done, held, rank
    with shmbridge.Rank(bridge, 0, 1) as successor, successor.next_share(10) as share:
        assert ([record._sequence for record in share.records], share.manifest.reissued) == ([1], True)


def test_the_end_of_the_process_tells_what_was_released(bridge, make_consumer, make_producer, put_groups):
    consumer, producer = make_consumer(), make_producer()
    put_groups(producer, range(3))
    consumer.serve_ranks(1, groups=1, prefetch=1)
    subprocess.run([sys.executable, "-c", LEAVES, bridge], check=True, timeout=60)
    assert consumer.stats()["released_total"] == 1
    with shmbridge.Rank(bridge, 0, 1) as successor, successor.next_share(10) as share:
        assert ([record._sequence for record in share.records], share.manifest.reissued) == ([1], True)


def test_a_child_of_fork_is_told(make_rank):
    rank = make_rank()
    child = os.fork()
    if child == 0:
        try:
            rank.next_share(0.1)
        except errors.Closed:
            os._exit(0)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.mark.parametrize("how", ["closes", "fails"])
def test_a_hub_that_goes_is_no_end_of_the_run(how, bridge, make_rank, make_producer, put_groups):
    """A rank that asks is not told that the bridge was drained: another consumer may come."""
    producer, rank = make_producer(), make_rank()
    put_groups(producer, range(1))
    consumer = shmbridge.Consumer(bridge)
    server = consumer.serve_ranks(1, groups=1, prefetch=0)
    rank.next_share(10).release()
    asking = threading.Timer(
        0.3, consumer.close if how == "closes" else lambda: consumer.__exit__(ValueError, None, None)
    )
    asking.start()
    with pytest.raises(errors.NoConsumer):
        rank.next_share(1.5)
    asking.join()
    assert not server.wait(0)


def test_a_finished_part_of_a_batch_is_not_dealt_out_again(
    make_rank, make_consumer, make_producer, put_groups
):
    """One rank is done before the other has asked; then the batch grows stale."""
    consumer, producer = make_consumer(), make_producer()
    consumer.publish_policy_version(1)
    put_groups(producer, range(2), policy_version=1)
    consumer.serve_ranks(2, groups=2, max_staleness=0, prefetch=0)
    quick, slow = make_rank(0, 2), make_rank(1, 2)
    quick.next_share(10).release()
    quick.report_done()
    consumer.publish_policy_version(2)
    with slow.next_share(10) as share:
        assert share.manifest.step == 0
    slow.report_done()
    assert consumer.stats()["released_total"] == 2


def test_an_error_in_forming_batches_reaches_the_ranks(
    make_rank, make_consumer, make_producer, put_groups, monkeypatch
):
    consumer = make_consumer()
    monkeypatch.setattr(consumer._hub.former, "choose", lambda *_: 1 // 0)
    server = consumer.serve_ranks(1, groups=1)
    with pytest.raises(RequestRefused, match="ZeroDivisionError"):
        make_rank().next_share(5)
    assert not server.wait(5)
    assert not server.idle


def test_a_look_that_fails_is_made_again(make_rank, make_consumer, make_producer, put_groups, monkeypatch):
    """It may fail for lack of a descriptor; the share must not be lost for a living rank."""
    consumer, producer, rank = make_consumer(), make_producer(), make_rank()
    put_groups(producer, range(1))
    consumer.serve_ranks(1, groups=1, prefetch=0)
    with monkeypatch.context() as broken:
        broken.setattr(rank, "_open_lane", lambda name: (_ for _ in ()).throw(OSError(24, "too many files")))
        with pytest.raises(OSError, match="too many"):
            rank.next_share(10)
    assert numbers_of(next(rank.batches(timeout_s=10))) == [0]


def test_fresh_groups_of_a_withdrawn_batch_are_dealt_out_although_the_bridge_is_drained(
    make_rank, make_consumer, make_producer, put_groups, until
):
    consumer, producer = make_consumer(), make_producer()
    consumer.publish_policy_version(1)
    put_groups(producer, range(1), policy_version=1)
    put_groups(producer, range(1, 3), policy_version=2)
    server = consumer.serve_ranks(1, groups=1, max_staleness=0, prefetch=3)
    consumer.drain()
    until(lambda: consumer.stats()["ranks_steps_open"] == 3)
    consumer.publish_policy_version(2)
    rank = make_rank()
    assert [numbers_of(batch) for batch in rank.batches(timeout_s=10)] == [[1], [2]]
    assert server.wait(5)
    until(lambda: consumer.stats()["discarded_total{stale}"] == 1)
    assert consumer.stats()["held"] == 0


def test_a_batch_withdrawn_while_the_bridge_drains_is_not_formed_again(
    make_rank, make_consumer, make_producer, put_groups, until, monkeypatch
):
    """Whenever the hub gives a put that is under way its time to commit, a rank's question takes back what
    has grown stale.
    """
    consumer, producer = make_consumer(), make_producer()
    consumer.publish_policy_version(1)
    put_groups(producer, range(1), policy_version=1)
    put_groups(producer, range(1, 3), policy_version=2)
    server = consumer.serve_ranks(1, groups=1, max_staleness=0, prefetch=3)
    until(lambda: consumer.stats()["ranks_steps_open"] == 3)
    consumer.publish_policy_version(2)
    drained = consumer._waiting.drained

    def asked_meanwhile() -> bool:
        ended = drained()
        with server._dealer._change:
            server._dealer._withdraw_stale()
        return ended

    monkeypatch.setattr(consumer._waiting, "drained", asked_meanwhile)
    consumer.drain()
    until(lambda: consumer.stats()["discarded_total{stale}"] == 1)
    assert [numbers_of(batch) for batch in make_rank().batches(timeout_s=10)] == [[1], [2]]
    assert server.wait(5)


def test_a_rank_that_has_not_come_yet_is_not_dead(make_rank, make_consumer, make_producer, put_groups):
    consumer, producer = make_consumer(), make_producer()
    put_groups(producer, range(2))
    consumer.serve_ranks(2, groups=2, dead_rank="spread", prefetch=0)
    first = make_rank(0, 2)
    share = first.next_share(10)
    assert len(share.groups) == 1
    with pytest.raises(errors.ConsumerEmpty):
        first.next_share(0.3)
    assert len(make_rank(1, 2).next_share(10).groups) == 1


def test_a_rank_that_came_back_reads_what_the_other_leaves(
    bridge, make_consumer, make_producer, put_groups, monkeypatch
):
    """Broadcast, "spread": both ranks end in turn, one is back in between.

    Unread batches are not released.
    """
    monkeypatch.setattr("shmbridge.hub.ranks._LOOK_EVERY_S", 0.0)  # each request finds the dead ranks
    consumer, producer = make_consumer(), make_producer()
    put_groups(producer, range(10))
    consumer.serve_ranks(2, groups=2, mode="broadcast", prefetch=2, dead_rank="spread")

    def read(rank: shmbridge.Rank) -> list[int]:
        with rank.next_share(10) as share:
            found = [record._sequence for record in share.records]
        rank.report_done()
        return found

    zero, one = shmbridge.Rank(bridge, 0, 2), shmbridge.Rank(bridge, 1, 2)
    assert read(zero) == read(one) == [0, 1]
    one.close()
    assert read(zero) == [2, 3]
    with shmbridge.Rank(bridge, 1, 2) as again:
        zero.close()
        found = [read(again) for _ in range(3)]
        assert sorted(found) == [[4, 5], [6, 7], [8, 9]]
        assert consumer.stats()["released_total"] == 10


def test_a_rank_that_dies_before_the_hub_looked_leaves_its_share_to_the_living(
    bridge, make_rank, make_consumer, make_producer, put_groups, monkeypatch
):
    """It came, got a share and died between two looks at who lives."""
    consumer, producer, first = make_consumer(), make_producer(), make_rank(0, 2)
    put_groups(producer, range(2))
    consumer.serve_ranks(2, groups=2, dead_rank="spread", prefetch=0)
    found = [record._sequence for record in first.next_share(10).records]  # the hub looks: rank 0 lives
    monkeypatch.setattr("shmbridge.hub.ranks._LOOK_EVERY_S", 1e9)
    second = shmbridge.Rank(bridge, 1, 2)
    assert len(second.next_share(10).groups) == 1
    second.close()
    monkeypatch.setattr("shmbridge.hub.ranks._LOOK_EVERY_S", 0.0)
    with first.next_share(10) as share:  # its own share, dropped before
        assert [record._sequence for record in share.records] == found
    with first.next_share(10) as share:
        assert (share.manifest.reissued, share.manifest.step) == (True, 0)
        found += [record._sequence for record in share.records]
    first.report_done()
    assert sorted(found) == [0, 1]
    assert consumer.stats()["released_total"] == 2


def test_an_idle_rank_and_its_hub_cost_nothing(make_rank, make_consumer):
    """Less than 1 % of a core for both together, also before serve_ranks was called."""
    make_consumer()
    rank = make_rank()
    with pytest.raises(errors.ConsumerEmpty):
        rank.next_share(0.2)
    began = time.process_time()
    with pytest.raises(errors.ConsumerEmpty):
        rank.next_share(2.0)
    assert time.process_time() - began < 0.04


def test_the_end_of_the_run_reaches_a_rank_that_asks_too_late(make_rank, make_producer, put_groups, bridge):
    """The consumer drains, waits until all is done, and is gone before the rank has asked once more."""
    producer, rank = make_producer(), make_rank()
    put_groups(producer, range(1))
    with shmbridge.Consumer(bridge) as consumer:
        server = consumer.serve_ranks(1, groups=1)
        rank.next_share(10).release()
        consumer.drain()
        rank.report_done()
        assert server.wait(10)
    assert rank.next_share(5) is None
    assert server.idle


def test_a_later_run_is_not_ended_by_an_earlier_one(
    make_rank, make_consumer, make_producer, put_groups, bridge
):
    rank = make_rank()
    with shmbridge.Consumer(bridge) as first:
        server = first.serve_ranks(1, groups=1)
        with pytest.raises(errors.ConsumerEmpty):
            rank.next_share(0.2)
        first.drain()
        assert server.wait(10)
    consumer, producer = make_consumer(), make_producer()
    put_groups(producer, range(1))
    consumer.serve_ranks(1, groups=1)
    assert numbers_of(next(rank.batches(timeout_s=10))) == [0]


def test_a_consumer_that_serves_ranks_gives_no_records_itself(make_consumer):
    consumer = make_consumer()
    consumer.serve_ranks(1)
    for ask in (
        consumer.poll,
        lambda: consumer.get(0.1),
        lambda: consumer.batches(groups=1),
        lambda: next(iter(consumer)),
    ):
        with pytest.raises(errors.ServesRanks, match="serves ranks"):
            ask()


def test_a_share_that_no_message_could_name_is_refused(
    make_rank, make_consumer, make_producer, monkeypatch, put_groups
):
    consumer, producer = make_consumer(), make_producer()
    monkeypatch.setattr("shmbridge.hub.ranks._MOST_RECORDS", 3)
    put_groups(producer, range(4))
    consumer.serve_ranks(1, groups=4)
    with pytest.raises(RequestRefused, match="4 records, and a manifest names 3"):
        make_rank().next_share(5)


@pytest.mark.parametrize("world_size", [4 / 2, True, "2", 0, 5000])
def test_a_world_size_that_is_no_count_is_refused_and_the_bridge_goes_on(
    world_size, bridge, consumer
) -> None:
    with pytest.raises(shmbridge.BadArgument, match="world_size="):
        consumer.serve_ranks(world_size)
    with pytest.raises(shmbridge.BadArgument, match="world_size="):
        shmbridge.Rank(bridge, 0, world_size)
    with pytest.raises(shmbridge.BadArgument, match="rank="):
        shmbridge.Rank(bridge, "0", 1)
    assert consumer.poll() == []


def test_a_consumer_whose_counters_fail_can_be_closed(bridge, make_consumer, monkeypatch, caplog) -> None:
    consumer = make_consumer()
    monkeypatch.setattr(consumer._hub, "stats", lambda: 1 / 0)
    consumer.close()
    assert "cannot be read" in caplog.text
    make_consumer()


def test_observers_see_that_a_rank_waits_for_a_batch(
    bridge, make_producer, make_consumer, make_rank, put_groups
):
    consumer, producer = make_consumer(), make_producer()
    consumer.serve_ranks(1, groups=1, prefetch=0)
    shares = []
    reading = threading.Thread(target=lambda: shares.extend(make_rank(0, 1).batches(timeout_s=20)))
    reading.start()
    wait_until(lambda: (look(bridge).consumer.asking_s or 0.0) > 0.02)
    put_groups(producer, range(1))
    consumer.drain()
    reading.join()
    assert len(shares) == 1
    assert look(bridge).consumer.asking_s is None
    assert consumer.stats()["batch_wait_s"] > 0.02
