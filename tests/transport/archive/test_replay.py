"""A replay puts every producer's records again, in the recorded order, at the recorded pace."""

import math
import threading

import numpy as np
import pytest

import shmbridge
from shmbridge.archive.recorder import Recorder
from shmbridge.producers import replay
from shmbridge.testing.fixtures import segments_of
from tests.transport.archive import recorded_groups as known


@pytest.fixture
def recording(tmp_path, make_consumer, make_producer):
    """A folder with nine records of three producers, and their contents in the order of hand-out."""
    consumer = make_consumer(tap=Recorder(tmp_path, rotate_bytes=30_000))
    producers = [make_producer(env_name=f"env{n}", producer_id=f"p{n}") for n in range(3)]
    for number in range(9):
        producers[number * 7 % 3].put(
            {"tokens": [[number] * (number + 1)], "loss_mask": [[1] * (number + 1)]}, policy_version=number
        )
    records = consumer.poll()
    wanted = [(record.meta.producer_id[:2], known.contents(record)) for record in records]
    for record in records:
        record.release()
    del records, record
    consumer.close()
    for producer in producers:
        producer.close()
    return tmp_path, wanted


@pytest.fixture
def other_bridge():
    name = known.fresh("replayed")
    yield name
    shmbridge.clean(name, dry_run=False)


def test_the_hub_hands_out_in_the_recorded_order(recording, other_bridge):
    folder, wanted = recording
    with shmbridge.Consumer(other_bridge) as consumer:
        done: list[replay.Replayed] = []
        putting = threading.Thread(
            target=lambda: done.append(replay.replay(folder, other_bridge, speed="max", timeout_s=20))
        )
        putting.start()
        found = []
        while len(found) < len(wanted):
            with consumer.get(timeout_s=20) as record:
                found.append((record.meta.producer_id[:2], known.contents(record)))
        putting.join()
    assert found == wanted
    assert done[0].records == 9
    assert sorted(done[0].reached.values()) == [2, 2, 2]


def test_without_a_hub_it_says_who_did_not_take(recording, other_bridge):
    folder, _ = recording
    with pytest.raises(shmbridge.LaneFull, match="no consumer of bridge"):
        replay.replay(folder, other_bridge, speed="max", timeout_s=0.05)


def test_any_order_needs_no_hub(recording, other_bridge, capsys):
    folder, wanted = recording
    assert replay.main([str(folder), "--bridge", other_bridge, "--speed", "max", "--any-order"]) == 0
    assert "9 records, 9 trajectories" in capsys.readouterr().out
    with shmbridge.Consumer(other_bridge) as consumer:
        records = consumer.poll()
        found = [(record.meta.producer_id[:2], known.contents(record)) for record in records]
        for record in records:
            record.release()
    assert sorted(map(repr, found)) == sorted(map(repr, wanted))


def test_pace_is_that_of_the_commits(recording):
    from dataclasses import replace

    from shmbridge.archive.folder import read_archive

    folder, _ = recording
    records = list(read_archive(folder))
    times = [5_000, 7_000, 6_000, 10_000, 1, 2, 3, 4, 5]  # in ms; the last five are of another session
    sessions = ["a"] * 4 + ["b"] * 5
    records = [
        replace(record, t_publish_ns=at * 10**6, session=session)
        for record, at, session in zip(records, times, sessions, strict=True)
    ]
    due = [at for _, at in replay.paced(iter(records), 2.0)]
    assert due == pytest.approx([0.0, 1.0, 1.0, 2.5, 2.5, 2.5005, 2.501, 2.5015, 2.502])
    assert {at for _, at in replay.paced(iter(records), "max")} == {0.0}


def test_speeds():
    assert [replay.parse_speed(text) for text in ("original", "2.0", "max")] == [1.0, 2.0, "max"]
    for text in ("0", "-1", "fast", "inf", "nan"):
        with pytest.raises(Exception, match="above 0"):
            replay.parse_speed(text)


def test_lanes_of_producers_whose_records_are_all_put_are_given_back(
    tmp_path, make_consumer, make_producer, other_bridge
):
    """Else the mount fills with a lane for every producer that ever was."""
    producers = 12
    with make_consumer(tap=Recorder(tmp_path)) as consumer:
        for number in range(producers):
            with make_producer(producer_id=f"p{number}") as producer:
                for _ in range(3):
                    producer.put({"tokens": [[number]], "loss_mask": [[1]]})
                for record in consumer.poll():
                    record.release()
                del record
    most = 0
    with shmbridge.Consumer(other_bridge) as consumer:
        putting = threading.Thread(
            target=replay.replay,
            args=(tmp_path, other_bridge),
            kwargs={"speed": "max", "lane_bytes": "1M", "timeout_s": 20},
        )
        putting.start()
        for number in range(producers * 3):
            with consumer.get(timeout_s=20) as record:
                assert record["tokens"].values.tolist() == [number // 3]
            del record
            most = max(most, lanes_of(other_bridge))
        putting.join()
    assert most <= 4


def lanes_of(bridge: str) -> int:
    return sum(".l." in name for name in segments_of(bridge))


def test_a_timeout_below_zero_is_refused(recording, other_bridge, capsys):
    folder, _ = recording
    with pytest.raises(SystemExit, match="2"):
        replay.main([str(folder), "--bridge", other_bridge, "--timeout", "nan"])
    assert "timeout" in capsys.readouterr().err


def test_old_marks_of_no_log_probability_become_todays(
    tmp_path, bridge, make_consumer, make_producer, other_bridge
):
    """Recorded from a lane whose producer wrote log-probabilities as they came."""
    old = [[1.0, -9999.0, -0.5, 1e-7], [math.inf, -math.inf, math.nan, -2.0]]
    consumer, producer = make_consumer(tap=Recorder(tmp_path)), make_producer()
    names = ("inference_logprobs", "ref_logprobs", "token_rewards")
    with producer.claim(2, {name: [4, 4] for name in ("tokens", *names)}) as slot:
        slot["tokens"][:] = range(8)
        views = [slot[name] for name in names]
        views[2][:] = 0.0
    for view in views[:2]:
        view[:] = [*old[0], *old[1]]
    consumer.get(timeout_s=10).release()
    consumer.close()
    replay.replay(tmp_path, other_bridge, speed="max")
    with shmbridge.Consumer(other_bridge) as again:
        with again.get(timeout_s=20) as record:
            for name in names[:2]:
                np.testing.assert_array_equal(
                    record[name].values, np.array([np.nan, np.nan, -0.5, 0, *[np.nan] * 3, -2], np.float32)
                )
        assert again.stats()["logprobs_unrecorded_total"] == 10
