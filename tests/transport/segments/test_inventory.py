"""Inspecting from outside and cleaning up, which never touches anything alive."""

import os
import signal

import numpy as np
import pytest

import shmbridge
from shmbridge.cli import main
from shmbridge.segments import LockByte, lock_exclusive, segment
from shmbridge.weights import WeightsReader, WeightsWriter, lease_from_outside

ABANDON = """
import shmbridge, time
producer = shmbridge.Producer(bridge, env_name="gsm8k", lane_bytes="64K")
for number in range(3):
    producer.put({"tokens": [[number]]})
print("ready", flush=True)
time.sleep(60)
"""


def info(bridge: str) -> shmbridge.BridgeInfo | None:
    return next((each for each in shmbridge.list_bridges() if each.name == bridge), None)


@pytest.fixture
def dead(child) -> None:
    process = child(ABANDON)
    process.send_signal(signal.SIGKILL)
    process.wait()


def test_a_bridge_nobody_uses_is_not_listed(bridge) -> None:
    assert info(bridge) is None
    assert shmbridge.clean(bridge).removed == []


def test_living_ends_are_listed(bridge, make_producer, make_consumer) -> None:
    producer = make_producer(env_name="gsm8k")
    producer.put({"tokens": [[1]]})
    assert info(bridge).consumer_pid is None
    make_consumer().publish_policy_version(3)
    it = info(bridge)
    (lane,) = it.lanes
    assert (it.consumer_pid, it.participants, it.policy_version) == (os.getpid(), True, 3)
    assert (lane.producer_id, lane.env_name, lane.pid, lane.alive) == (
        producer.producer_id,
        "gsm8k",
        os.getpid(),
        True,
    )
    assert (lane.held, lane.records, lane.name) == (1, 1, producer.lane_name)
    assert it.size_bytes == lane.size_bytes > 64 << 10


@pytest.mark.parametrize(
    ("published", "trained"),
    [
        ([(0, "11", None)], None),
        ([(0, "11", None), (1, None, None)], 1),
        ([(5, "11", None)], None),  # a model as it began, on a bridge that has counted before
        ([(5, "11", None), (6, "22", None)], None),
        ([(5, "11", None), (7, None, None), (8, "11", 7)], 7),
        ([(7, None, None), (8, "22", 3)], 3),
        ([(7, None, None), (8, "22", 3), (9, None, None)], 9),
        ([(4, None, None)], 4),  # of a program that says nothing of runs
    ],
)
def test_it_is_listed_which_version_holds_trained_steps(bridge, make_consumer, published, trained) -> None:
    consumer = make_consumer()
    for version, run, same_as in published:
        run_id = None if run is None else run.rjust(16, "0")
        consumer.publish_policy_version(version, run_id=run_id, same_as=same_as)
    it = info(bridge)
    assert it.trained_version == trained
    runs = [run.rjust(16, "0") for _, run, _ in published if run]
    assert it.run_id == (runs[-1] if runs else "")


LEARNER = """
import shmbridge, sys, time
consumer = shmbridge.Consumer(bridge)
consumer.publish_policy_version(0, run_id="00000000000000aa")
for version in range(1, {steps} + 1):
    consumer.publish_policy_version(version)
if {in_order}:
    consumer.end_run()
print("ready", flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize(
    ("steps", "in_order", "stays"), [(5, False, True), (5, True, False), (0, False, False)]
)
def test_what_a_killed_learner_has_trained_stays_for_the_next(
    bridge, child, make_consumer, capsys, steps, in_order, stays
) -> None:
    """Not what one has saved that ended in order, nor a model as it began."""
    process = child(LEARNER.format(steps=steps, in_order=in_order))
    process.kill()
    process.wait()
    with WeightsReader(bridge):
        pass  # the last participant leaves
    if not stays:
        assert info(bridge) is None
        return
    assert (info(bridge).trained_version, info(bridge).run_id) == (steps, "00000000000000aa")
    control = segment.control_name(bridge)
    assert shmbridge.clean(bridge).trained == {control: steps}
    assert main(["clean", bridge]) == 0
    words = f"with version {steps}, trained by a learner that was killed"
    assert f"would remove {control} {words}\n" in capsys.readouterr().out
    consumer = make_consumer()
    consumer.publish_policy_version(steps + 1, run_id="00000000000000aa", same_as=steps)
    consumer.end_run()
    consumer.close()
    assert info(bridge) is None


def test_what_a_killed_learner_has_trained_goes_with_a_word(bridge, child, capsys) -> None:
    process = child(LEARNER.format(steps=5, in_order=False))
    process.kill()
    process.wait()
    assert main(["clean", bridge, "--yes"]) == 0
    assert "with version 5, trained by a learner that was killed\n" in capsys.readouterr().out
    assert info(bridge) is None


def test_a_bridge_is_ready_while_it_has_a_living_consumer(
    bridge, make_producer, make_consumer, capsys
) -> None:
    producer = make_producer()
    assert main(["inspect", bridge, "--ready"]) == 4
    consumer = make_consumer()
    assert main(["inspect", bridge, "--ready"]) == 0
    consumer.close()
    assert main(["inspect", bridge, "--ready"]) == 4
    producer.close()
    assert main(["inspect", bridge, "--ready"]) == 3  # there is no such bridge any more
    assert capsys.readouterr().out == ""


def test_weights_without_a_hub_count_as_trained(bridge) -> None:
    with WeightsWriter(bridge) as writer:
        writer.publish(3, [("w", np.zeros(2, np.float32))])
        assert info(bridge).trained_version == 3
        os.unlink(f"/dev/shm{segment.control_name(bridge)}")  # what else there was is not known any more
        assert info(bridge).trained_version == 3


@pytest.mark.parametrize("wrong", ["", "12", "0" * 16, "x" * 16, "A" * 16, 7, b"0" * 16])
def test_an_id_of_a_run_that_is_none_is_refused(bridge, make_consumer, wrong) -> None:
    consumer = make_consumer()
    with pytest.raises(shmbridge.BadArgument, match="run_id"):
        consumer.publish_policy_version(1, run_id=wrong)
    assert (info(bridge).policy_version, info(bridge).run_id) == (-1, "")


def test_weights_are_leased_from_outside_and_stay_when_nobody_lives(bridge, child) -> None:
    process = child(
        """
import numpy, shmbridge.weights, time
writer = shmbridge.weights.WeightsWriter(bridge)
writer.publish(4, [("w", numpy.arange(6, dtype=numpy.float32))])
print("ready", flush=True)
time.sleep(60)
"""
    )
    process.kill()
    process.wait()
    for _ in range(2):
        with lease_from_outside(bridge) as lease:
            assert (lease.version, lease.tensors["w"].tolist()) == (4, list(range(6)))
    assert info(bridge).weights.version == 4
    shmbridge.clean(bridge, dry_run=False)
    with pytest.raises(shmbridge.NotReady, match="has no weights"), lease_from_outside(bridge):
        pass


def test_lanes_that_wait_are_listed_and_said(bridge, make_producer, make_consumer, capsys) -> None:
    consumer, producers = make_consumer(lanes=2), [make_producer() for _ in range(3)]
    for producer in producers:
        producer.put({"tokens": [[1]]})
    taken = consumer.poll()
    for lane in consumer._lanes:
        lock_exclusive(lane.reader.lane.fd, LockByte.READER)  # as the lane's reader does
    assert info(bridge).waiting == [producers[2].lane_name]
    assert main(["inspect", bridge, "--seconds", "0"]) == 0
    said = capsys.readouterr().out
    assert "waits for a lane" in said
    assert "1 of 3 environments waits for a lane: the consumer reads 2 at once -> start it with a" in said
    assert len(taken) == 2


def test_characters_that_a_terminal_would_act_on_are_escaped(bridge, make_producer, capsys) -> None:
    make_producer(producer_id="é\x1b[31mred\n")
    assert main(["inspect", bridge, "--seconds", "0"]) == 0
    said = capsys.readouterr().out
    assert "\x1b" not in said
    assert "é\\x1b[31mred\\n-" in said


def test_weights_are_listed(bridge, capsys) -> None:
    def said() -> str:
        assert main(["inspect", bridge, "--seconds", "0"]) == 0
        return capsys.readouterr().out.splitlines()[-1]

    with WeightsReader(bridge):
        assert (info(bridge).weights, "weights" in said()) == (None, False)
        with WeightsWriter(bridge) as writer:
            with pytest.raises(ZeroDivisionError), writer.fill(7, [("w", "float32", (3,))]):
                assert info(bridge).weights.version is None
                assert "weights no version yet" in said()
                raise ZeroDivisionError
            writer.publish(7, [("w", np.zeros(3, np.float32))])
            it = info(bridge).weights
            assert (it.version, it.writer_pid, it.size_bytes > 4096) == (7, os.getpid(), True)
            assert f"weights version 7  writer pid {os.getpid()}" in said()
        assert (info(bridge).weights.version, info(bridge).weights.writer_pid) == (7, None)
        assert "weights version 7  no writer" in said()


def test_clean_never_touches_what_is_alive(bridge, producer, consumer, segments) -> None:
    producer.put({"tokens": [[1]]})
    before = segments()
    report = shmbridge.clean(bridge, dry_run=False)
    assert report.removed == []
    assert report.kept[producer.lane_name] == "its producer is alive"
    assert segments() == before
    assert len(consumer.poll()) == 1


def test_a_dry_run_says_what_would_go_and_leaves_it(bridge, dead, segments) -> None:
    before = segments()
    report = shmbridge.clean(bridge)
    assert report.dry_run
    assert len(report.removed) == 2
    assert list(report.undelivered.values()) == [3]
    assert segments() == before
    assert shmbridge.clean(bridge, dry_run=False).removed == report.removed
    assert segments() == []


def test_a_start_leaves_undelivered_records_for_the_consumer(
    bridge, dead, make_producer, make_consumer, segments
) -> None:
    make_producer().close()
    assert sum(".l." in name for name in segments()) == 1
    assert len(make_consumer().poll()) == 3


def test_a_start_removes_what_died_before_it_was_ready(make_producer, segments, bridge) -> None:
    path = segment.MOUNT / f"shmbridge.{bridge}.l.0123456789abcdef"
    path.write_bytes(b"")
    make_producer()
    assert not path.exists()


def test_a_file_of_somebody_else_is_no_reason_to_fail(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(segment, "MOUNT", tmp_path)
    for name in ("shmbridge.no good.c", "shmbridge..c", "shmbridge.x", "other"):
        (tmp_path / name).write_bytes(b"x")
    assert [each.name for each in shmbridge.list_bridges()] == []


def test_a_paused_process_is_alive(bridge, child, make_consumer) -> None:
    process = child(ABANDON)
    process.send_signal(signal.SIGSTOP)
    assert info(bridge).lanes[0].alive
    assert shmbridge.clean(bridge, dry_run=False).removed == []
    assert len(make_consumer().poll()) == 3
    process.send_signal(signal.SIGCONT)
