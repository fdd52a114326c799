"""A feed that deals its steps out to ranks: what ends a step, what counts as its failure, who gets what."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
from itertools import permutations

import pytest

import shmbridge
from shmbridge.archive.folder import read_archive
from shmbridge.consumers.feed import Drained, Feed

LOST = "[../third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:22222"


@pytest.fixture
def producer(bridge):
    with shmbridge.Producer(bridge, env_name="sums", lane_bytes="2M") as producer:
        yield producer


@pytest.fixture
def ranks(bridge):
    with shmbridge.Rank(bridge, 0, 2) as first, shmbridge.Rank(bridge, 1, 2) as second:
        yield first, second


def put(producer, numbers) -> None:
    for number in numbers:
        group = {"tokens": [[number, 1]] * 2, "loss_mask": [[0, 1]] * 2, "score": [0.0, 1.0]}
        producer.put(group, group_id=f"g{number}")


def numbers_of(share) -> list[int]:
    return [record.meta.sequence for record in share.records]


def left_over(bridge) -> list[tuple[int, bool]]:
    with shmbridge.Consumer(bridge) as consumer:
        return [(record.meta.sequence, record.meta.redelivered) for record in consumer.poll(1000)]


@pytest.mark.parametrize("order", permutations(["trained", 0, 1]), ids=str)
@pytest.mark.parametrize("mode", ["sharded", "broadcast"])
def test_a_step_is_released_when_it_is_trained_and_no_rank_reads_it(
    bridge, producer, ranks, tmp_path, mode, order
) -> None:
    put(producer, range(4))
    with Feed(bridge, groups=4, run_dir=tmp_path) as feed:
        feed.serve_ranks(2, mode)
        step = feed.take(5)
        shares = [rank.next_share(5) for rank in ranks]
        read = [numbers_of(share) for share in shares]
        assert read == ([[*range(4)]] * 2 if mode == "broadcast" else [[0, 2], [1, 3]])
        for number, each in enumerate(order):
            assert feed.stats()["released_total"] == 0, order[:number]
            if each == "trained":
                feed.trained(step)
            else:
                shares[each].release()
                ranks[each].report_done()
        assert feed.stats()["released_total"] == 4
        assert feed.consumer.current_step == 1
    assert left_over(bridge) == []


def test_a_dealt_step_waits_for_its_checkpoint_which_lists_it(bridge, producer, ranks, tmp_path) -> None:
    put(producer, range(6))
    with Feed(bridge, groups=2, release_at="checkpoint", run_dir=tmp_path) as feed:
        feed.serve_ranks(2)
        for _ in range(2):
            step = feed.take(5)
            for rank in ranks:
                rank.next_share(5).release()
                rank.report_done()
            feed.trained(step)
        state = json.loads(json.dumps(feed.state_dict()))
        assert list(state["held"].values()) == [[0, 1, 2, 3]]
        late = feed.take(5)
        shares = [rank.next_share(5) for rank in ranks]
        feed.checkpointed()
        assert feed.stats()["released_total"] == 4
        feed.trained(late)
        del shares
    with Feed(bridge, groups=2, run_dir=tmp_path) as feed:
        feed.load_state_dict(state)
        assert [record.meta.sequence for group in feed.take(5).groups for record in group.records] == [4, 5]


HUB = """
import os, signal, sys
import shmbridge
from shmbridge.consumers import Feed

bridge, folder, at = sys.argv[1:]
feed = Feed(bridge, groups=4, release_at="checkpoint", run_dir=folder)
feed.serve_ranks(2)
print("serving", flush=True)
step = feed.take(30)
def reach(point):
    if point == at:
        os.kill(os.getpid(), signal.SIGKILL)
reach("dealt")
sys.stdin.readline()  # the ranks are done
reach("read")
feed.trained(step)
feed.save_state(folder)
reach("saved")
feed.checkpointed()
reach("released")
"""


@pytest.mark.parametrize(
    ("at", "comes"), [("dealt", [*range(4)]), ("read", [*range(4)]), ("saved", []), ("released", [])]
)
def test_a_killed_hub_loses_no_step_and_repeats_none_that_is_saved(
    bridge, producer, ranks, tmp_path, at, comes
) -> None:
    put(producer, range(4))
    run = [sys.executable, "-c", HUB, bridge, str(tmp_path), at]
    with subprocess.Popen(run, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as hub:
        assert hub.stdout.readline() == "serving\n"
        if at != "dealt":
            for rank in ranks:
                with rank.next_share(30) as share:
                    assert len(share.groups) == 2
                rank.report_done()
            hub.stdin.write("done\n")
            hub.stdin.flush()
        assert hub.wait(30) == -signal.SIGKILL
    with Feed(bridge, groups=4, run_dir=tmp_path) as feed:
        assert feed.load_state(tmp_path) == (at in ("saved", "released"))
        put(producer, range(4, 8))
        feed.serve_ranks(2)
        feed.take(5)
        read = sorted(number for rank in ranks for number in numbers_of(rank.next_share(5)))
        assert read == (comes or [*range(4, 8)])
        assert feed.stats()["feed_groups_in_checkpoint_total"] == (4 if at == "saved" else 0)


def fail(ranks, feed, at: int) -> list[int]:
    """Deals a step; the rank that reads the group fails. Returns what was read where no rank did."""
    step, shares = feed.take(1), [rank.next_share(5) for rank in ranks]
    read = [numbers_of(share) for share in shares]
    for rank, numbers in zip(ranks, read, strict=True):
        if at in numbers:
            rank.report_failed()
            rank.report_failed()  # once
            return []
    for rank, share in zip(ranks, shares, strict=True):
        share.release()
        rank.report_done()
    feed.trained(step)
    return [number for numbers in read for number in numbers]


@pytest.mark.parametrize("at", [1, 6])
@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("error", [RuntimeError(LOST), SystemExit(1), FloatingPointError("rank 0, too")])
def test_a_group_that_fails_on_its_rank_is_found_over_the_runs(
    bridge, producer, tmp_path, exact, at, error
) -> None:
    put(producer, range(64))
    aside, runs, trained = tmp_path / "set_aside", 0, []
    while not (aside.is_dir() and any(aside.glob("*.parquet"))):
        runs += 1
        assert runs < 9, trained
        with (
            pytest.raises((type(error), shmbridge.ConsumerEmpty)),
            Feed(bridge, groups=8, exact=exact, run_dir=tmp_path) as feed,
            shmbridge.Rank(bridge, 0, 2) as first,
            shmbridge.Rank(bridge, 1, 2) as second,
        ):
            feed.serve_ranks(2)
            while True:
                if not (read := fail((first, second), feed, at)):
                    raise error  # of the process that has the hub: the peer is gone, or it fails itself
                trained += read
    assert len(trained) == len({*trained} - {at}) >= 8
    assert [record.sequence for record in read_archive(aside)] == [at]


def test_only_the_groups_that_a_rank_names_are_counted_and_each_share_once(
    bridge, producer, ranks, tmp_path
) -> None:
    put(producer, range(8))
    with pytest.raises(RuntimeError), Feed(bridge, groups=8, run_dir=tmp_path) as feed:
        feed.serve_ranks(2)
        feed.take(5)
        share = ranks[1].next_share(5)
        ranks[1].report_failed([share.groups[2]])
        named = share.groups[2].records[0].meta.sequence
        ranks[1].report_failed()
        raise RuntimeError(LOST)
    ((name, count),) = json.loads((tmp_path / "set_aside/failures.json").read_text())["counts"].items()
    assert (int(name.rpartition(" ")[2]), count) == (named, 1)


@pytest.mark.parametrize(
    ("error", "counted"),
    [
        (RuntimeError(LOST), 0),
        (type("DistBackendError", (type("DistError", (RuntimeError,), {}),), {})("timed out"), 0),
        (OSError(28, "No space left on device"), 0),
        (FloatingPointError("nan loss"), 4),
    ],
)
@pytest.mark.parametrize("dealt", [False, True])
def test_the_hubs_own_error_counts_if_a_group_may_be_at_fault(
    bridge, producer, tmp_path, dealt, error, counted
) -> None:
    put(producer, range(4))
    with pytest.raises(type(error)), Feed(bridge, groups=4, run_dir=tmp_path) as feed:
        if dealt:
            feed.serve_ranks(2)
        feed.take(5)
        raise error
    file = tmp_path / "set_aside/failures.json"
    assert (len(json.loads(file.read_text())["counts"]) if file.exists() else 0) == counted


@pytest.mark.parametrize("error", [FloatingPointError("nan loss"), RuntimeError(LOST)])
def test_failed_raises_for_a_dealt_step_and_counts_it_once(bridge, producer, tmp_path, error) -> None:
    put(producer, range(4))
    with pytest.raises(type(error)), Feed(bridge, groups=4, run_dir=tmp_path) as feed:
        feed.serve_ranks(2)
        feed.failed(feed.take(5), error)
    file = tmp_path / "set_aside/failures.json"
    counts = json.loads(file.read_text())["counts"] if file.exists() else {}
    assert [*counts.values()] == ([1] * 4 if isinstance(error, FloatingPointError) else [])
    assert left_over(bridge) == [(number, True) for number in range(4)]


def test_what_ranks_read_is_not_taken_back(bridge, producer, ranks, tmp_path) -> None:
    put(producer, range(4))
    with Feed(bridge, groups=4, run_dir=tmp_path) as feed:
        feed.serve_ranks(2)
        step = feed.take(5)
        for call in (feed.give_back, feed.parts):
            with pytest.raises(ValueError, match="dealt out to ranks"):
                call(step)
        feed.dropped(step, "late")
        assert feed.stats()["released_total"] == 0
        for rank in ranks:
            rank.next_share(5).release()
            rank.report_done()
        assert (feed.stats()["released_total"], feed.stats()["feed_groups_dropped_total{late}"]) == (4, 4)


def test_a_small_step_leaves_a_rank_without_groups_and_the_end_is_everybodys(
    bridge, producer, ranks, tmp_path
) -> None:
    put(producer, range(3))
    with Feed(bridge, groups=1, run_dir=tmp_path) as feed:
        server = feed.serve_ranks(2)
        for number in range(3):
            step = feed.take(5)
            shares = [rank.next_share(5) for rank in ranks]
            assert [numbers_of(share) for share in shares] == [[number], []]
            assert (ranks[0].gather(shares[0]) is None, ranks[1].gather(shares[1])) == (False, None)
            shares[0].release()
            feed.trained(step)
        feed.drain()
        with pytest.raises(Drained):
            feed.take(5)
        assert [rank.next_share(5) for rank in ranks] == [None, None]
        assert server.wait(5)
        assert feed.stats()["released_total"] == 3


def test_a_drained_feed_hears_the_ranks_before_it_ends(bridge, producer, ranks, tmp_path) -> None:
    put(producer, range(2))
    with Feed(bridge, groups=2, run_dir=tmp_path) as feed:
        server = feed.serve_ranks(2)
        step, shares = feed.take(5), [rank.next_share(5) for rank in ranks]
        feed.trained(step)
        feed.drain()
        for rank, share in zip(ranks, shares, strict=True):
            share.release()
        ranks[0].report_done()
        late = threading.Timer(0.1, ranks[1].report_done)
        late.start()
        with pytest.raises(Drained):
            feed.take(5)
        assert server.idle
        late.join()


def test_versions_below_the_published_one_are_refused_before_a_step_is_over(
    bridge, producer, tmp_path
) -> None:
    put(producer, range(2))
    with Feed(bridge, groups=1, run_dir=tmp_path) as feed:
        feed.trained(feed.take(5), version=4)
        step = feed.take(5)
        with pytest.raises(ValueError, match="version=3 is below 4"):
            feed.trained(step, version=3)
        feed.trained(step, version=4)
        assert feed.stats()["released_total"] == 2


def test_a_group_known_to_be_at_fault_is_set_aside_before_a_whole_step_is_there(
    bridge, producer, tmp_path
) -> None:
    put(producer, [0])
    for _ in range(2):
        with pytest.raises(FloatingPointError), Feed(bridge, groups=1, run_dir=tmp_path) as feed:
            feed.take(5)
            raise FloatingPointError
    with Feed(bridge, groups=8, run_dir=tmp_path) as feed:
        with pytest.raises(shmbridge.ConsumerEmpty):
            feed.take(0.5)
        stats = feed.stats()
        assert (stats["feed_groups_set_aside_total"], stats["released_total"]) == (1, 1)
    assert [record.sequence for record in read_archive(tmp_path / "set_aside")] == [0]
    assert not (tmp_path / "set_aside/failures.json").exists()


RANK = """
import os, signal, sys
import shmbridge

bridge, folder, when, way = sys.argv[1:]
rank = shmbridge.Rank(bridge, 1, 2)
rank.note_crashes(folder)
share = rank.next_share(30)
if when == "done":
    share.release()
    rank.report_done()
if when == "failed":
    rank.report_failed()
os.kill(os.getpid(), getattr(signal, way))
"""


@pytest.mark.parametrize(
    ("when", "way", "counted"),
    [("reading", "SIGABRT", [1, 1]), ("failed", "SIGSEGV", [1, 1]), ("done", "SIGABRT", []),
     ("reading", "SIGKILL", []), ("reading", "SIGTERM", [])],
)  # fmt: skip
def test_a_crash_of_a_rank_counts_against_the_share_that_it_reads(
    bridge, producer, tmp_path, when, way, counted
) -> None:
    put(producer, range(4))
    aside = tmp_path / "set_aside"
    run = [sys.executable, "-c", RANK, bridge, str(aside), when, way]
    with pytest.raises(RuntimeError), Feed(bridge, groups=4, run_dir=tmp_path) as feed:
        feed.serve_ranks(2)
        feed.take(5)
        assert subprocess.run(run, timeout=60).returncode == -getattr(signal, way)
        raise RuntimeError(LOST)
    with Feed(bridge, groups=4, run_dir=tmp_path):
        file = aside / "failures.json"
        counts = json.loads(file.read_text())["counts"] if file.exists() else {}
        assert [*counts.values()] == counted
        assert sorted(int(name.rpartition(" ")[2]) for name in counts) == ([1, 3] if counted else [])


def test_a_step_that_fails_on_all_ranks_counts_once(bridge, producer, ranks, tmp_path) -> None:
    put(producer, range(2))
    with Feed(bridge, groups=2, run_dir=tmp_path) as feed:
        feed.serve_ranks(2, "broadcast")
        step = feed.take(5)
        shares = [rank.next_share(5) for rank in ranks]
        for rank in ranks:
            rank.report_failed()
        with pytest.raises(FloatingPointError):
            feed.failed(step, FloatingPointError("nan"))
        assert feed.counts["steps_failed"] == 1
        del shares, step
    noted = json.loads((tmp_path / "set_aside/failures.json").read_text())
    assert set(noted["counts"].values()) == {1}


def test_a_feed_that_ends_waits_for_the_ranks_last_word(bridge, producer, ranks, tmp_path) -> None:
    put(producer, range(4))
    feed = Feed(bridge, groups=4, run_dir=tmp_path)
    feed.serve_ranks(2)
    step = feed.take(5)
    shares = [rank.next_share(5) for rank in ranks]

    def done(rank, share) -> None:
        share.release()
        rank.report_done()

    done(ranks[0], shares[0])
    feed.trained(step)
    later = threading.Timer(0.7, done, (ranks[1], shares[1]))
    later.start()
    feed.close()
    later.join()
    assert left_over(bridge) == []
