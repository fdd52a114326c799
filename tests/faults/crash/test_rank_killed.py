"""Ranks and the hub that serves them die at every step: every record is read, marked where it may have been,
and never changes in use.
"""

import signal
import time

import pytest

from shmbridge import errors
from shmbridge.segments import LockByte, is_locked
from shmbridge.testing import faults
from shmbridge.testing.faults import Fault

GROUPS = 4


@pytest.fixture
def filled(make_producer, roles):
    """A living producer with four records in its lane."""
    producer = make_producer(producer_id="p", lane_bytes="256K", on_full="raise")
    for sequence in range(GROUPS):
        producer.put(roles.pattern("p", sequence), group_id=sequence)
    return producer


@pytest.fixture
def read(roles):
    """Reads so many shares: [(sequence, redelivered)], each byte as it was put."""

    def read(rank, shares, timeout_s=20):
        found = []
        for _ in range(shares):
            share = rank.next_share(timeout_s)
            found += [(roles.check(record), record.meta.redelivered) for record in share.records]
            share.release()
        rank.report_done()
        return found

    return read


def fill(producer, roles) -> int:
    """Puts until the lane is full; how many records it has taken in its life."""
    while True:
        try:
            sequence = producer.stats()["records_total"]
            producer.put(roles.pattern(producer.producer_id, int(sequence)), group_id=int(sequence))
        except errors.LaneFull:
            return int(sequence)


# -- the rank dies
# ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("label", faults.RANK_JOINING + faults.RANK_READING)
def test_a_rank_is_killed(label, filled, faulty, make_consumer, make_rank, read):
    """Its successor gets what it was not done with, `redelivered` where it may have seen it; afterwards
    nothing is held.
    """
    consumer = make_consumer()
    consumer.serve_ranks(1, groups=1, prefetch=0)
    done, seen = int(label == "rank.told_done"), label in ("rank.looking", "rank.holding")
    # told_done is passed once before anything is read
    faulty("read_shares", 0, 1, GROUPS, fault=Fault(label, skip=done)).end_on_fault()
    assert read(make_rank(), GROUPS - done) == [
        (sequence, seen and sequence == 0) for sequence in range(done, GROUPS)
    ]
    stats = consumer.stats()
    assert (stats["held"], stats["released_total"], stats["ranks_reissued_total"]) == (0, GROUPS, seen)


def test_a_rank_is_killed_after_it_was_done(filled, faulty, make_consumer, make_rank, read):
    """Shares reported to the hub do not come again."""
    consumer = make_consumer()
    consumer.serve_ranks(1, groups=1, prefetch=0)
    child = faulty("read_shares", 0, 1, 2)
    child.until("done 1")
    child.kill()
    assert read(make_rank(), GROUPS - 2) == [(sequence, False) for sequence in range(2, GROUPS)]
    assert consumer.stats()["held"] == 0


@pytest.mark.parametrize("label", faults.RANK_JOINING + faults.RANK_READING)
def test_a_rank_is_stopped(label, filled, faulty, make_consumer, make_rank, read):
    """The other rank reads on, and the stopped one continues as before: every record once, none marked."""
    consumer = make_consumer()
    consumer.serve_ranks(2, groups=2, prefetch=1)
    child = faulty("read_shares", 0, 2, 2, fault=Fault(label, 0, signal.SIGSTOP))
    child.wait_stopped()
    other = read(make_rank(1, 2), 2)
    child.go_on()
    while len([line for line in child.said if line.startswith("done ")]) < 2:
        assert child.line() is not None
    words = [line.split() for line in child.said if line.startswith("read ")]
    found = other + [(int(sequence), marked == "True") for _, sequence, marked in words]
    assert sorted(found) == [(sequence, False) for sequence in range(GROUPS)]
    assert consumer.stats()["held"] == 0


@pytest.mark.parametrize("label", faults.SERVING_RANKS)
def test_a_serving_hub_is_stopped(label, filled, faulty, make_rank, read):
    """It is alive: a rank waits for it, and nothing comes twice."""
    hub = faulty("serve_ranks", 1, 1, fault=Fault(label, 0, signal.SIGSTOP))
    hub.until("ready")
    rank = make_rank()
    if label == "hub.share_done":
        first = read(rank, 1)
        hub.wait_stopped()
    else:
        first = []
        with pytest.raises(errors.ConsumerEmpty):
            rank.next_share(0.2)
        hub.wait_stopped()
    hub.go_on()
    assert first + read(rank, GROUPS - len(first)) == [(sequence, False) for sequence in range(GROUPS)]


def test_a_stopped_rank_is_alive(filled, faulty, make_consumer, make_rank, bridge, read):
    """No process takes its number, no part of its share is given away; then it continues as before."""
    consumer = make_consumer()
    consumer.serve_ranks(1, groups=1, prefetch=0)
    child = faulty("read_shares", 0, 1, GROUPS, fault=Fault("rank.holding", 0, signal.SIGSTOP))
    child.wait_stopped()
    with pytest.raises(errors.RankTaken):
        make_rank()
    assert consumer.stats()["held"] == GROUPS
    child.go_on()
    child.until(f"done {GROUPS - 1}")
    assert [line for line in child.said if line.startswith("read ")] == [
        f"read {sequence} False" for sequence in range(GROUPS)
    ]
    assert consumer.stats()["held"] == 0


def test_a_dead_ranks_share_goes_to_the_living(filled, faulty, make_consumer, make_rank, read, until):
    consumer = make_consumer()
    consumer.serve_ranks(2, groups=4, prefetch=0, dead_rank="spread")
    child = faulty("read_shares", 1, 2, 1, fault=Fault("rank.epoch_locked", 0, signal.SIGSTOP))
    child.wait_stopped()
    rank = make_rank(0, 2)
    first = read(rank, 1)
    with pytest.raises(errors.ConsumerEmpty):
        rank.next_share(0.3)  # a stopped rank is alive: no other rank reads its share
    child.kill()
    assert sorted(first + read(rank, 1)) == [(sequence, False) for sequence in range(4)]
    assert consumer.stats()["held"] == 0


# -- the hub dies
# ------------------------------------------------------------------------------------------------------------


def test_nothing_changes_under_a_rank_when_another_hub_comes(
    filled, faulty, make_consumer, make_rank, roles, until
):
    """The next hub gets the record again and releases it, twice over; the producer gets the room only when
    the rank has let go.
    """
    hub = faulty("serve_ranks", 1, 1)
    hub.until("ready")
    rank = make_rank()
    share = rank.next_share(20)
    record = share.records[0]
    before = record["tokens"].values
    wanted = before.tolist()
    committed = fill(filled, roles)
    for _ in range(2):
        hub.kill()
        consumer = make_consumer()
        again = consumer.poll()
        assert [(each.meta.sequence, each.meta.redelivered) for each in again[:1]] == [(0, True)]
        for each in again:
            each.release()
        del each, again
        marked = consumer.stats()
        assert marked["put_off"] >= 1
        assert (
            marked["records_total"] == marked["released_total"] + marked["held"] + marked["discarded_total"]
        )
        assert fill(filled, roles) >= committed
        assert roles.check(record) == 0
        assert before.tolist() == wanted
        consumer.close()
        hub = faulty("serve_ranks", 1, 1)
        hub.until("ready")
    del record, before
    share.release()
    del share
    rank.close()
    hub.kill()
    consumer = make_consumer()
    for each in consumer.poll():
        each.release()
    until(lambda: consumer.stats()["put_off"] == 0)
    room = fill(filled, roles)
    assert room > committed


def test_a_rank_goes_on_with_the_next_hub(
    filled, faulty, make_consumer, make_rank, roles, read, bridge, until
):
    """It keeps its view of the old hub's share and reads the new one's; the old epoch's lock goes with the
    view.
    """
    hub = faulty("serve_ranks", 1, 1)
    hub.until("ready")
    rank = make_rank()
    old = rank.next_share(20)
    hub.kill()
    consumer = make_consumer()
    consumer.serve_ranks(1, groups=1, prefetch=0)
    assert read(rank, GROUPS) == [(0, True), *((sequence, False) for sequence in range(1, GROUPS))]
    seen, began = GROUPS, time.monotonic()
    while time.monotonic() < began + 0.3:  # several rounds of the watch that does deferred releases
        committed = fill(filled, roles)
        assert read(rank, committed - seen) == [(sequence, False) for sequence in range(seen, committed)]
        seen = committed
        assert roles.check(old.records[0]) == 0, "the record that is looked at"
    assert seen > 3 * GROUPS
    assert consumer.stats()["put_off"] == 1, "the record that is still looked at"
    old.release()
    rank.report_done()
    until(lambda: consumer.stats()["put_off"] == 0)


@pytest.mark.parametrize("looked_at", [False, True])
def test_records_dropped_of_an_earlier_hub_keep_no_room(
    looked_at, filled, faulty, make_consumer, make_rank, roles, read, until
):
    """The next hub hands it out again, so the rank's old share is over, released or not."""
    hub = faulty("serve_ranks", 1, 1)
    hub.until("ready")
    rank = make_rank()
    share = rank.next_share(20)
    if looked_at:
        roles.check(share.records[0])
    del share
    committed = fill(filled, roles)
    hub.kill()
    consumer = make_consumer()
    consumer.serve_ranks(1, groups=1, prefetch=0)
    assert read(rank, committed) == [(0, True), *((sequence, False) for sequence in range(1, committed))]
    until(lambda: consumer.stats()["put_off"] == 0)
    assert rank.stats()["open_shares"] == 0
    assert fill(filled, roles) == 2 * committed


def test_discards_that_are_put_off_add_up(filled, faulty, make_consumer, make_rank):
    hub = faulty("serve_ranks", 1, 1)
    hub.until("ready")
    rank = make_rank()
    share = rank.next_share(20)
    hub.kill()
    consumer = make_consumer(resume="discard")
    stats = consumer.stats()
    assert (stats["discarded_total{resume}"], stats["released_total"], stats["held"], stats["put_off"]) == (
        GROUPS,
        0,
        0,
        1,
    )
    consumer.close()  # the deferred one comes again, so it was not discarded
    stats = make_consumer().stats()
    assert (stats["discarded_total{resume}"], stats["released_total"], stats["held"], stats["put_off"]) == (
        GROUPS - 1,
        0,
        1,
        0,
    )
    del share


def test_a_hub_is_killed_while_it_serves(filled, faulty, make_consumer, make_rank, read):
    for label in faults.SERVING_RANKS:
        hub = faulty("serve_ranks", 1, 1, fault=Fault(label))
        hub.until("ready")
        rank = make_rank()
        with pytest.raises(errors.NoConsumer):
            for _ in range(2):
                rank.next_share(3).release()
        hub.end_on_fault()
        rank.close()
    consumer = make_consumer()
    consumer.serve_ranks(1, groups=1)
    found = read(make_rank(), GROUPS)
    assert [sequence for sequence, _ in found] == list(range(GROUPS))
    assert found[0] == (0, True)


def test_a_rank_that_joins_while_the_hub_changes(filled, faulty, make_consumer, bridge):
    """Stopped between loading the epoch and locking it, while another hub comes: it must not believe the old
    one.
    """
    first = make_consumer()
    first.serve_ranks(1, groups=1)
    child = faulty("read_shares", 0, 1, GROUPS, fault=Fault("rank.epoch_loaded", 0, signal.SIGSTOP))
    child.wait_stopped()
    first.close()
    consumer = make_consumer()
    consumer.serve_ranks(1, groups=1)
    child.go_on()
    child.until(f"done {GROUPS - 1}")
    assert not is_locked(consumer._state.control_fd, LockByte.FIRST_EPOCH, consumer.hub_epoch)
    assert is_locked(consumer._state.control_fd, LockByte.FIRST_EPOCH + consumer.hub_epoch)
