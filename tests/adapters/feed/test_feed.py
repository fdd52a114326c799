"""A feed: what it hands out, when it releases, and what becomes of a step that fails or that nobody ends."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import weakref

import pytest

import shmbridge
from shmbridge import sizing
from shmbridge.archive.folder import read_archive
from shmbridge.consumers.feed import BridgeAhead, Drained, Feed
from shmbridge.consumers.trajectories import UnfitRow
from shmbridge.producers.replay import replay
from shmbridge.testing import wait_until

STEP = """
import os, signal, sys
from shmbridge import ConsumerEmpty
from shmbridge.consumers import Feed

bridge, folder, way, poison = sys.argv[1:5]
with Feed(bridge, groups=8, run_dir=folder) as feed:
    while True:
        try:
            step = feed.take(10 if not feed.counts else 0)
        except ConsumerEmpty:
            break
        numbers = [int(row.tokens[0]) for row in step.rows[::2]]
        if int(poison) in numbers:
            print("failing", numbers, flush=True)
            if way == "exception":
                raise FloatingPointError("nan loss")
            os.kill(os.getpid(), getattr(signal, way)) if way == "SIGKILL" else os.abort()
        feed.trained(step)
        print("trained", numbers, flush=True)
"""


@pytest.fixture
def producer(bridge):
    with shmbridge.Producer(bridge, env_name="sums", lane_bytes="2M") as producer:
        yield producer


def put(producer, numbers, **more) -> None:
    for number in numbers:
        group = {"tokens": [[number, 1]] * 2, "loss_mask": [[0, 1]] * 2, "score": [0.0, 1.0]}
        producer.put(group | more, group_id=f"g{number}")


def numbers_of(step) -> list[int]:
    return [int(row.tokens[0]) for row in step.rows[::2]]


def left_over(bridge) -> list[tuple[int, bool]]:
    with shmbridge.Consumer(bridge) as consumer:
        return [(record.meta.sequence, record.meta.redelivered) for record in consumer.poll(1000)]


def test_steps_come_in_order_and_are_released_when_trained(bridge, producer, tmp_path) -> None:
    put(producer, range(6))
    with Feed(bridge, groups=2, run_dir=tmp_path) as feed:
        first, second = feed.take(5), feed.take(5)
        assert (numbers_of(first), numbers_of(second)) == ([0, 1], [2, 3])
        assert first.metrics["groups_fallback"] == 2
        feed.trained(first, version=3)
        assert (producer.policy_version, feed.stats()["released_total"]) == (3, 2)
        with pytest.raises(ValueError, match="is over"):
            feed.trained(first)
    assert left_over(bridge) == [(2, True), (3, True), (4, False), (5, False)]


def test_steps_are_held_until_the_checkpoint_that_lists_them(bridge, producer, tmp_path) -> None:
    put(producer, range(8))
    run = shmbridge.Run(save_checkpoint_interval=2)
    with Feed(bridge, groups=2, run=run, run_dir=tmp_path) as feed:
        assert feed.release_at == "checkpoint"
        for _ in range(2):
            feed.trained(feed.take(5))
        state = json.loads(json.dumps(feed.state_dict()))
        feed.trained(feed.take(5))  # while the checkpoint is written
        feed.checkpointed()
        assert feed.stats()["released_total"] == 4
    with Feed(bridge, groups=2, run_dir=tmp_path) as feed:
        assert numbers_of(feed.take(5)) == [4, 5]
    assert list(state["held"].values()) == [[0, 1, 2, 3]]


def test_a_checkpoint_releases_its_own_steps_while_the_next_is_written(bridge, producer, tmp_path) -> None:
    put(producer, range(6))
    with Feed(bridge, groups=1, release_at="checkpoint", run_dir=tmp_path) as feed:
        states = []
        for number in range(3):
            feed.trained(feed.take(5))
            states.append(json.loads(json.dumps(feed.state_dict())))
            if number:
                feed.checkpointed(states[number - 1])
                assert feed.stats()["released_total"] == number
        feed.checkpointed(states[0])  # again
        feed.trained(feed.take(5))
        feed.checkpointed()
        assert feed.stats()["released_total"] == 3
    with Feed(bridge, groups=1, run_dir=tmp_path) as feed:
        feed.load_state_dict(states[2])
        assert numbers_of(feed.take(5)) == [3]


def test_what_waits_for_a_checkpoint_keeps_its_lanes_and_no_arrays(bridge, producer, tmp_path) -> None:
    with Feed(bridge, groups=2, release_at="checkpoint", run_dir=tmp_path) as feed:
        put(producer, range(255))
        batches = weakref.WeakSet()
        for _ in range(127):
            step = feed.take(5)
            feed.trained(step)
            batches.add(step.batch)
        assert len(batches) == 1
        more = threading.Thread(target=put, args=(producer, range(3)))  # the lane has 256 slots
        more.start()
        feed.trained(feed.take(5))
        with pytest.raises(shmbridge.BatchTooBig, match=r"has 0 of the 2 .*, and 128 steps wait for a check"):
            feed.take(20)
        state = feed.state_dict()  # as the checkpoint begins to be written
        later = threading.Timer(3, feed.checkpointed, args=(state,))
        later.start()
        assert numbers_of(feed.take(20)) == [1, 2]
        later.join()
        more.join(20)
        assert feed.stats()["held"] == 2  # those that were just taken


def test_a_kill_between_save_and_release_loses_nothing_and_repeats_nothing(
    bridge, producer, tmp_path
) -> None:
    put(producer, range(6))
    feed = Feed(bridge, groups=2, release_at="checkpoint", run_dir=tmp_path)
    feed.trained(feed.take(5))
    feed.trained(feed.take(5))
    state = json.loads(json.dumps(feed.state_dict()))
    feed.close()  # releases nothing: as after a kill
    with Feed(bridge, groups=2, run_dir=tmp_path) as feed:
        feed.load_state_dict(state)
        assert numbers_of(feed.take(5)) == [4, 5]
        assert (feed.stats()["feed_groups_in_checkpoint_total"], feed.stats()["released_total"]) == (4, 4)
        assert feed.state_dict()["held"] == {}
        with pytest.raises(ValueError, match="before the first take"):
            feed.load_state_dict(state)


@pytest.mark.parametrize(
    "state",
    [
        [],
        {"format": 7},
        {"format": 1},
        {"format": 1, "held": [], "mounts": {}},
        {"format": 1, "held": {"a": [1]}, "mounts": None},
        {"format": 1, "held": {"a": [float("inf")]}, "mounts": {}},
    ],
)
def test_a_state_of_something_else_is_named(bridge, tmp_path, state) -> None:
    with Feed(bridge, run_dir=tmp_path) as feed, pytest.raises(ValueError, match="not a Feed state"):
        feed.load_state_dict(state)


def test_a_failed_step_is_tried_in_halves_until_the_group_at_fault_is_found(
    bridge, producer, tmp_path
) -> None:
    put(producer, range(16))
    tried, trained = [], []
    with Feed(bridge, groups=8, run_dir=tmp_path) as feed:
        while len(trained) < 15:
            step = feed.take(5)
            numbers = numbers_of(step)
            tried.append(numbers)
            if 5 in numbers:
                feed.failed(step, FloatingPointError("nan loss"))
            else:
                feed.trained(step)
                trained += numbers
        stats = feed.stats()
        assert (stats["feed_groups_set_aside_total"], stats["held"], stats["released_total"]) == (1, 0, 16)
    whole = [*range(8)]
    assert tried == [whole, whole, [0, 1, 2, 3], [4, 5, 6, 7], [4, 5], [4], [5], [6, 7], [*range(8, 16)]]
    (aside,) = read_archive(tmp_path / "set_aside")
    assert (aside.group_id, left_over(bridge)) == ("g5", [])
    assert replay(tmp_path / "set_aside", bridge).records == 1
    assert [sequence for sequence, _ in left_over(bridge)] == [0]


@pytest.mark.parametrize("way", ["exception", "SIGABRT"])
def test_a_group_that_ends_the_process_at_every_resume_is_set_aside(bridge, producer, tmp_path, way) -> None:
    put(producer, range(40))
    run = [sys.executable, "-c", STEP, bridge, str(tmp_path), way, "2"]
    trained: list[int] = []
    for _ in range(12):
        ended = subprocess.run(run, capture_output=True, text=True, timeout=60)
        lines = ended.stdout.splitlines()
        trained += [n for line in lines if line.startswith("trained") for n in json.loads(line[8:])]
        if ended.returncode == 0:
            break
        assert ended.returncode == (1 if way == "exception" else -signal.SIGABRT), ended.stderr
    assert len(trained) == len(set(trained)) >= 32
    assert {*range(8)} - {2} <= {*trained} <= {*range(40)} - {2}
    assert [record.group_id for record in read_archive(tmp_path / "set_aside")] == ["g2"]
    assert len(left_over(bridge)) == 39 - len(trained)


def test_kills_from_outside_are_not_counted(bridge, producer, tmp_path) -> None:
    put(producer, range(8))
    run = [sys.executable, "-c", STEP, bridge, str(tmp_path), "SIGKILL", "2"]
    for _ in range(4):
        ended = subprocess.run(run, capture_output=True, text=True, timeout=60)
        assert ended.stdout.startswith("failing [0, 1, 2, 3, 4, 5, 6, 7]"), ended
    assert not (tmp_path / "set_aside").exists()


def test_interrupts_count_nothing_and_the_groups_come_again(bridge, producer, tmp_path) -> None:
    put(producer, range(2))
    with Feed(bridge, groups=2, run_dir=tmp_path, set_aside_after=1) as feed:
        for error in (KeyboardInterrupt(), SystemExit(), asyncio.CancelledError()):
            feed.failed(feed.take(5), error)
        step = feed.take(5)
        feed.give_back(step)
        assert numbers_of(feed.take(5)) == [0, 1]
        assert feed.stats()["batches_total"] == 1


OutOfMemoryError = type("OutOfMemoryError", (RuntimeError,), {})  # as torch's


@pytest.mark.parametrize("kind", [MemoryError, OutOfMemoryError, type("Remote", (OutOfMemoryError,), {})])
def test_no_memory_is_raised_and_names_the_longest_row(bridge, producer, tmp_path, kind) -> None:
    put(producer, [1])
    producer.put({"tokens": [[7] * 50], "loss_mask": [[1] * 50], "score": [1.0]}, group_id="long")
    with Feed(bridge, groups=2, run_dir=tmp_path) as feed:
        for _ in range(3):
            with pytest.raises(kind) as raised:
                feed.failed(feed.take(5), kind("alloc"))
            assert "50 tokens: group long of environment 'sums'" in raised.value.__notes__[0]
        assert len(feed.take(5).groups) == 2


def test_failures_that_no_group_explains_end_the_run(bridge, producer, tmp_path) -> None:
    put(producer, range(8))
    with Feed(bridge, groups=1, run_dir=tmp_path) as feed, pytest.raises(RuntimeError) as raised:
        while True:
            feed.failed(feed.take(5), RuntimeError("bug in the loss"))
    assert "3 groups in a row were set aside" in raised.value.__notes__[0]
    assert len(list(read_archive(tmp_path / "set_aside"))) == 3
    assert [sequence for sequence, _ in left_over(bridge)] == [3, 4, 5, 6, 7]


def test_a_failure_is_raised_where_nothing_is_set_aside(bridge, producer, tmp_path) -> None:
    put(producer, range(2))
    with Feed(bridge, groups=2, set_aside_after=0, run_dir=tmp_path / "run") as feed:
        for _ in range(3):
            with pytest.raises(RuntimeError, match="bug"):
                feed.failed(feed.take(5), RuntimeError("bug"))
        assert numbers_of(feed.take(5)) == [0, 1]
    assert not (tmp_path / "run").exists()


UNFIT = {
    "too_long": (
        {"tokens": [[9, 1], [9] * 40], "loss_mask": [[0, 1], [1] * 40]},
        "row 1 .* has 40 tokens, and .* takes 32",
    ),
    "unknown_token": ({"tokens": [[9, 1], [9, 99]]}, "row 1 .* has token 99, and the model knows 50"),
}


@pytest.mark.parametrize("kind", UNFIT)
@pytest.mark.parametrize("unfit", ["refuse", "leave_out"])
def test_rows_that_cannot_be_trained_are_named_or_left_out(bridge, producer, tmp_path, kind, unfit) -> None:
    columns, said = UNFIT[kind]
    put(producer, [3])
    put(producer, [9], **columns)
    options = {"run_dir": tmp_path, "unfit": unfit, "longest_row": 32, "vocabulary": 50}
    with Feed(bridge, groups=2, **options) as feed:
        if unfit == "leave_out":
            step = feed.take(5)
            assert [int(row.tokens[0]) for row in step.rows] == [3, 3, 9]
            assert feed.stats()[f"feed_rows_left_out_{kind}_total"] == 1
            return
        for _ in range(2):  # the second time it is set aside
            with pytest.raises(UnfitRow, match=f"{said}.*leave_out") as raised:
                feed.take(5)
            assert "of group g9 of environment 'sums'" in str(raised.value)
        assert numbers_of(feed.take(5)) == [3]
    assert [record.group_id for record in read_archive(tmp_path / "set_aside")] == ["g9"]


def test_a_feed_that_is_only_asked_now_and_then_gets_all(bridge, producer, tmp_path) -> None:
    put(producer, range(40))
    numbers: list[int] = []
    with Feed(bridge, groups=2, run_dir=tmp_path, prefetch=2) as feed:
        while len(numbers) < 40:
            step = feed.take(0)
            numbers += numbers_of(step)
            feed.trained(step)
    assert numbers == [*range(40)]


def test_counters_are_read_while_another_thread_counts(bridge, tmp_path) -> None:
    with Feed(bridge, run_dir=tmp_path) as feed:
        counting = threading.Thread(target=lambda: [feed.counts.update([f"n{n}"]) for n in range(20_000)])
        often, _ = sys.getswitchinterval(), sys.setswitchinterval(1e-6)
        try:
            counting.start()
            while counting.is_alive():
                feed.stats()
        finally:
            sys.setswitchinterval(often)
        assert feed.stats()["feed_n19999_total"] == 1


def test_a_wait_in_one_thread_does_not_hold_up_another(bridge, tmp_path) -> None:
    raises = pytest.raises(shmbridge.ConsumerEmpty)
    with Feed(bridge, run_dir=tmp_path) as feed, feed._taking, raises:  # as while another thread waits
        feed.take(0.05)


def test_waits_end_with_numbers_and_drained_bridges_with_one_error(bridge, producer, tmp_path) -> None:
    put(producer, range(3))
    with Feed(bridge, groups=2, run_dir=tmp_path) as feed:
        feed.take(5)
        with pytest.raises(
            shmbridge.ConsumerEmpty, match="1 groups are there for a step of 2 groups; 1 of 1"
        ):
            feed.take(0.1)
        assert numbers_of(feed.take(5, groups=1)) == [2]
        feed.drain()
        with pytest.raises(Drained, match="0 groups are there"):
            feed.take()


def test_stale_groups_are_cut_also_when_they_come_again(bridge, producer, tmp_path) -> None:
    with Feed(bridge, groups=2, run_dir=tmp_path, max_staleness=1) as feed:
        feed.consumer.publish_policy_version(0)
        put(producer, range(2))
        step = feed.take(5)
        feed.consumer.publish_policy_version(1)
        feed.failed(step, RuntimeError("flaky"))
        step = feed.take(5)
        assert step.metrics["staleness_max"] == 1
        feed.consumer.publish_policy_version(2)
        feed.failed(step, RuntimeError("flaky"))
        with pytest.raises(shmbridge.ConsumerEmpty):
            feed.take(0.1)
        assert feed.stats()["discarded_total{stale}"] == 2


def test_the_consumers_own_limit_holds_for_groups_that_come_again(bridge, producer, tmp_path) -> None:
    limit = {"policy": "oldest", "max_off_policy_steps": 1, "groups_per_step": 2}
    with Feed(bridge, groups=2, run_dir=tmp_path, **limit) as feed:
        feed.consumer.publish_policy_version(0)
        put(producer, range(2))
        step = feed.take(5)
        feed.consumer.publish_policy_version(2)
        feed.failed(step, RuntimeError("flaky"))
        with pytest.raises(shmbridge.ConsumerEmpty):
            feed.take(0.1)
        assert feed.stats()["discarded_total{stale}"] == 2
    assert list(tmp_path.iterdir()) == []  # what is discarded is forgotten


def test_an_event_loop_goes_on_and_cancelled_calls_lose_nothing(bridge, producer, tmp_path) -> None:
    async def main() -> list[int]:
        with Feed(bridge, groups=2, run_dir=tmp_path) as feed:
            call = asyncio.create_task(feed.take_async())
            await asyncio.sleep(0.05)
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
            put(producer, range(2))
            numbers = numbers_of(await feed.take_async(10))
        with pytest.raises(Drained, match="is closed"):
            await feed.take_async()
        return numbers

    assert asyncio.run(main()) == [0, 1]


def test_closing_ends_a_wait_in_another_thread(bridge, tmp_path) -> None:
    feed, ended = Feed(bridge, run_dir=tmp_path), []

    def wait() -> None:
        try:
            feed.take()
        except Drained as over:
            ended.append(str(over))

    thread = threading.Thread(target=wait)
    thread.start()
    feed.close()
    thread.join(10)
    assert ended == [f"the feed of bridge {bridge!r} is closed"]


@pytest.mark.parametrize(
    "wrong",
    [
        {"groups": 0},
        {"rows": 0},
        {"split": "evaluation"},
        {"release_at": "never"},
        {"unfit": "drop"},
        {"set_aside_after": -1},
    ],
)
def test_arguments_that_cannot_be_are_named(bridge, wrong) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        Feed(bridge, **wrong)
    assert not any(each.name == bridge for each in shmbridge.list_bridges())


DAMAGED = [
    b"",
    b"{",
    b"\xff",
    b"7",
    b"[1]",
    b"[" * 100_000,
    b'{"counts": 3}',
    b'{"counts": {"a": 1e999}, "apart": [], "at_fault": []}',
    b'{"counts": {"a": null}, "apart": [], "at_fault": []}',
    b'{"counts": {"KEY": 9}, "apart": ["KEY"], "at_fault": []}',
    b'{"counts": {"KEY": 9}, "apart": [], "at_fault": {"KEY": 1}}',
]


@pytest.mark.parametrize("damaged", DAMAGED, ids=range(len(DAMAGED)))
def test_damaged_files_begin_anew(bridge, producer, tmp_path, damaged, caplog) -> None:
    put(producer, range(2))
    with shmbridge.Consumer(bridge) as consumer:
        key = f"{consumer.poll()[0].meta.producer_id} 0".encode()
    folder = tmp_path / "set_aside"
    folder.mkdir()
    for name in ("failures.json", "crash"):
        (folder / name).write_bytes(damaged.replace(b"KEY", key))
    with Feed(bridge, groups=2, run_dir=tmp_path) as feed:
        feed.failed(feed.take(5), RuntimeError("flaky"))
        step = feed.take(5)
        assert numbers_of(step) == [0, 1]
        feed.trained(step)
    assert list(tmp_path.iterdir()) == []
    assert "failures.json cannot be read, so failures are counted from zero" in caplog.text


def test_groups_named_twice_in_the_file_come_once(bridge, producer, tmp_path) -> None:
    put(producer, range(2))
    with Feed(bridge, groups=1, run_dir=tmp_path) as feed:
        keys = [key for step in (feed.take(5), feed.take(5)) for key in step.keys]
    (tmp_path / "set_aside").mkdir()
    known = {"counts": dict.fromkeys(keys, 2), "apart": [[keys[0], *keys], [keys[0]]], "at_fault": []}
    (tmp_path / "set_aside/failures.json").write_text(json.dumps(known))
    with Feed(bridge, groups=2, run_dir=tmp_path) as feed:
        assert numbers_of(feed.take(5)) == [0, 1]
        with pytest.raises(shmbridge.ConsumerEmpty):
            feed.take(0)


CRASH = """
import ctypes, faulthandler, os, signal, sys
from shmbridge.consumers import Feed

bridge, folder, when, way = sys.argv[1:5]
if when == "before":
    faulthandler.enable()
with Feed(bridge, groups=2, run_dir=folder) as feed:
    step = feed.take(10)
    if when == "after":
        faulthandler.enable()
    if when == "trained":
        feed.trained(step)
    if when == "child":  # with handlers of its own, which lead back to the first ones
        faulthandler.enable()
        if os.fork():
            sys.exit(-os.waitstatus_to_exitcode(os.wait()[1]))
        with Feed(bridge + "-2", groups=1, run_dir=folder + "/child"):
            os.abort()
    os.abort() if way == "abort" else ctypes.string_at(0)
"""


@pytest.mark.parametrize(
    ("when", "way", "counted"),
    [
        ("never", "abort", True),
        ("before", "fault", True),
        ("after", "abort", True),
        ("after", "fault", True),
        ("trained", "abort", False),
        ("child", "abort", False),
    ],
)
def test_a_crash_counts_in_the_middle_of_a_step_only(bridge, producer, tmp_path, when, way, counted) -> None:
    put(producer, range(2))
    run = [sys.executable, "-c", CRASH, bridge, str(tmp_path), when, way]
    ended = subprocess.run(run, capture_output=True, text=True, timeout=60)
    number = signal.SIGABRT if way == "abort" else signal.SIGSEGV
    assert ended.returncode == (number if when == "child" else -number), ended.stderr
    assert ended.stderr.count("Fatal Python error") == (when in ("before", "after", "child")), ended.stderr
    with Feed(bridge, run_dir=tmp_path) as feed:
        assert len(feed._failures.counts) == (2 if counted else 0)
    assert not (tmp_path / "set_aside/crash").exists()


def test_a_child_of_fork_ends_no_step(bridge, producer, tmp_path) -> None:
    put(producer, range(2))
    with Feed(bridge, groups=2, run_dir=tmp_path) as feed:
        step = feed.take(5)
        if (child := os.fork()) == 0:
            code = 1
            try:
                with feed, pytest.raises(shmbridge.Closed, match="before fork"):
                    feed.trained(step)
                with feed:
                    raise RuntimeError("in the child")
            except RuntimeError:
                code = 0
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert list(tmp_path.iterdir()) == []
        feed.trained(step)
    assert left_over(bridge) == []


def test_a_folder_that_takes_no_file_does_not_end_the_run(bridge, producer, tmp_path, caplog) -> None:
    put(producer, range(4))
    (tmp_path / "set_aside").write_text("a file where a folder should be")
    with Feed(bridge, groups=2, run_dir=tmp_path) as feed:
        for _ in range(2):  # counted in memory
            feed.failed(feed.take(5), RuntimeError("poison"))
        assert "failures of steps are not written" in caplog.text
        step = feed.take(5)
        assert numbers_of(step) == [0]
        with pytest.raises(shmbridge.ShmBridgeError):
            feed.failed(step, RuntimeError("poison"))  # nowhere to set it aside: it is kept
        with pytest.raises(shmbridge.ShmBridgeError):
            feed.take(5)
        (tmp_path / "set_aside").unlink()
        assert numbers_of(feed.take(5)) == [1]
        assert feed.stats()["feed_groups_set_aside_total"] == 1
    assert [record.group_id for record in read_archive(tmp_path / "set_aside")] == ["g0"]
    assert len(left_over(bridge)) == 3


def test_exact_steps_fill_up_what_is_tried_apart(bridge, producer, tmp_path) -> None:
    put(producer, range(40))
    tried, trained = [], []
    with Feed(bridge, groups=8, exact=True, run_dir=tmp_path) as feed:
        while len(trained) < 32:
            step = feed.take(5)
            numbers = numbers_of(step)
            tried.append(numbers)
            if 5 in numbers:
                feed.failed(step, FloatingPointError("nan loss"))
            else:
                feed.trained(step)
                trained += numbers
        assert feed.stats()["feed_groups_set_aside_total"] == 1
    assert {len(numbers) for numbers in tried} == {8}
    assert len(trained) == len(set(trained))
    apart = [{*numbers} & {*range(8)} for numbers in tried]
    assert apart[:2] == [{*range(8)}] * 2
    assert all(len(numbers) <= 4 for numbers in apart[2:])
    assert [record.group_id for record in read_archive(tmp_path / "set_aside")] == ["g5"]


@pytest.mark.parametrize("how", ["trained one by one", "failed together"])
def test_an_asynchronous_trainer_gets_suspects_one_set_at_a_time(bridge, producer, tmp_path, how) -> None:
    """It takes group by group, keeps several, and resumes after each failure: as SkyRL and verl."""
    put(producer, range(30))
    trained: list[int] = []
    for _ in range(12):
        with Feed(bridge, groups=4, exact=True, start="from-scratch", run_dir=tmp_path) as feed:
            held = []
            while len(trained) < 24:
                (taken,) = feed.parts(feed.take(5, groups=1))
                held.append((numbers_of(taken)[0], taken))
                if len(held) < 4:
                    continue
                if any(number == 2 for number, _ in held) and how == "failed together":
                    feed.failed([step for _, step in held], FloatingPointError("nan loss"))
                    break
                feed.trained([step for _, step in held], version=len(trained) // 4 + 1)
                trained += [number for number, _ in held]
                held = []
            else:
                break
    assert len(trained) == len(set(trained)) == 24
    aside = (
        [f.group_id for f in read_archive(tmp_path / "set_aside")]
        if (tmp_path / "set_aside").exists()
        else []
    )
    assert aside == (["g2"] if how == "failed together" else [])
    assert 2 not in trained or how == "trained one by one"


def test_parts_of_a_step_end_by_themselves(bridge, producer, tmp_path) -> None:
    put(producer, range(5))
    with Feed(bridge, groups=4, release_at="checkpoint", run_dir=tmp_path) as feed:
        step = feed.take(5)
        first, second, third, fourth = feed.parts(step)
        assert [numbers_of(each) for each in (first, second, third, fourth)] == [[0], [1], [2], [3]]
        with pytest.raises(ValueError, match="is over"):
            feed.trained(step)
        feed.trained([first, third])
        feed.dropped(second, "stale")
        feed.give_back(fourth)
        stats = feed.stats()
        assert (stats["released_total"], stats["feed_steps_trained_held"]) == (1, 2)
        assert feed.consumer.current_step == 1  # environments end by the trainer's steps
        assert stats["feed_groups_dropped_total{stale}"] == 1
        (last,) = feed.parts(feed.take(5, groups=1))
        assert numbers_of(last) == [3]
        assert feed.consumer.current_step == 1
        feed.failed(last, RuntimeError("flaky"))
        assert numbers_of(feed.take(5, groups=1)) == [3]
        assert feed.consumer.current_step == 2
        (held,) = feed.state_dict()["held"].values()
        assert held == [0, 2]
        assert feed.state_of(third) == feed.state_dict() | {"held": {producer.producer_id: [2]}}
        feed.checkpointed()
        assert feed.stats()["released_total"] == 3


def test_full_lanes_are_waited_for_while_the_trainer_has_a_step_to_release(
    bridge, producer, tmp_path
) -> None:
    with Feed(bridge, groups=2, run_dir=tmp_path) as feed:
        put(producer, range(256))  # the lane has that many slots
        out = [feed.take(5) for _ in range(128)]
        more = threading.Thread(target=put, args=(producer, range(256, 258)))
        more.start()
        for step in out:
            step.early = True
        with pytest.raises(shmbridge.BatchTooBig, match="has 0 of the 2 groups"):
            feed.take(20)
        out[0].early = False
        later = threading.Timer(3, feed.trained, args=(out[0],))
        later.start()
        assert numbers_of(feed.take(20)) == [256, 257]
        later.join()
        more.join()


def test_rows_that_did_not_stop_train_nothing_if_asked(bridge, producer, tmp_path) -> None:
    """Codes of finish_reason: stop, length, abort; a row without one is trained."""
    rows = {"tokens": [[1, 1]] * 4, "loss_mask": [[0, 1]] * 4, "score": [0.0, 1.0, 2.0, 3.0]}
    producer.put(rows | {"finish_reason": [0, 1, 2, None]})
    with Feed(bridge, groups=1, run_dir=tmp_path, mask_truncated=True) as feed:
        step = feed.take(5)
        assert [row.trained.sum() for row in step.rows] == [1, 0, 0, 1]
        assert step.metrics["trajectories_truncated"] == 2


TRAINED = """
import os, signal, sys
from shmbridge.consumers import Feed

bridge, folder, end = sys.argv[1:4]
with Feed(bridge, groups=2, release_at="checkpoint", run_dir=folder) as feed:
    feed.begin_run(4)
    later = end in ("published later", "trained on")  # as trainers that publish after their save
    feed.trained(feed.take(10), version=None if later else 5)
    state = feed.save_state(folder)
    if end == "saved" or later:
        feed.checkpointed(state)
    if later:
        feed.publish(5)
    if end == "trained on":
        feed.trained(feed.take(10))
        feed.publish(6)
    if end != "exit":
        os.kill(os.getpid(), signal.SIGKILL)
"""


def trained(bridge, folder, end) -> None:
    """Another process trains one step on a bridge."""
    ended = subprocess.run([sys.executable, "-c", TRAINED, bridge, str(folder), end], timeout=60)
    assert ended.returncode == (0 if end == "exit" else -signal.SIGKILL)


@pytest.mark.parametrize("environments", ["live", "gone"])
def test_a_trained_bridge_is_refused_without_its_state(bridge, tmp_path, environments) -> None:
    (one := tmp_path / "one").mkdir()
    (other := tmp_path / "other").mkdir()
    with shmbridge.Producer(bridge, lane_bytes="2M") as producer:
        put(producer, range(20))
        if environments == "gone":
            producer.close()
        trained(bridge, one, "killed")
        other_state = json.loads((one / "shmbridge.json").read_text()) | {"run_id": "0123456789abcdef"}
        (other / "shmbridge.json").write_text(json.dumps(other_state))
        for folder, why in ((None, "no checkpoint was loaded"), (other, "is of another run")):
            with Feed(bridge, groups=2, run_dir=tmp_path) as feed:
                assert folder is None or feed.load_state(folder)
                for refused in (feed.require_start, lambda: feed.take(0), lambda: feed.begin_run(6)):
                    with pytest.raises(BridgeAhead, match=f"trained up to version 5, and .*{why}"):
                        refused()
                assert feed.consumer.policy_version == 5
        with Feed(bridge, groups=2, run_dir=tmp_path) as feed:
            assert not feed.load_state(tmp_path)
            assert feed.load_state(one)
            feed.begin_run(5)
            assert numbers_of(feed.take(5)) == [2, 3]
        for start in ("from-scratch", "from-bridge"):
            with Feed(bridge, groups=2, start=start, run_dir=tmp_path) as feed:
                feed.begin_run(6)
                numbers_of(feed.take(5))


@pytest.mark.parametrize(
    ("end", "kept"),
    [("saved", []), ("exit", [5]), ("killed", [5]), ("published later", []), ("trained on", [6])],
)
def test_a_bridge_keeps_what_no_checkpoint_has(bridge, producer, tmp_path, end, kept) -> None:
    put(producer, range(4))
    producer.close()
    trained(bridge, tmp_path, end)
    assert list(shmbridge.clean(bridge, dry_run=False).trained.values()) == kept


def test_full_lanes_release_early_only_where_the_checkpoint_was_not_asked_for(
    bridge, producer, tmp_path, caplog
) -> None:
    run = shmbridge.Run(save_checkpoint_interval=1000)
    with Feed(bridge, groups=2, run=run, run_dir=tmp_path) as feed:
        put(producer, range(256))
        for _ in range(128):
            feed.trained(feed.take(5))
        more = threading.Thread(target=put, args=(producer, range(256, 258)))
        more.start()
        assert numbers_of(feed.take(20)) == [256, 257]
        more.join()
        assert feed.stats()["feed_steps_released_early_total"] == 128
    assert "128 steps are released before a checkpoint has them" in caplog.text


def test_a_trainer_keeps_groups_out_and_a_loaded_state_too(bridge, producer, tmp_path) -> None:
    put(producer, range(6))
    with Feed(bridge, groups=1, release_at="checkpoint", run_dir=tmp_path) as feed:
        feed.trained(feed.take(5))
        state = feed.state_dict()
    odd = {"screen": lambda group: int(group.group_id[1:]) % 2 == 0}
    with Feed(bridge, groups=1, run_dir=tmp_path, **odd) as feed:
        feed.load_state_dict(state)
        assert [numbers_of(feed.take(5)) for _ in range(2)] == [[2], [4]]
        stats = feed.stats()
    assert (stats["feed_groups_in_checkpoint_total"], stats["screened_total"]) == (1, 3)


def test_a_version_published_after_a_save_opens_the_run_again(bridge, producer, tmp_path) -> None:
    put(producer, range(2))
    feed = Feed(bridge, groups=1, release_at="checkpoint", run_dir=tmp_path)
    feed.begin_run(0)
    feed.trained(feed.take(5))
    feed.publish(1)
    feed.checkpointed()
    feed.trained(feed.take(5))
    feed.publish(2)
    assert producer.policy_version == 2
    producer.close()
    feed.close()
    assert list(shmbridge.clean(bridge, dry_run=False).trained.values()) == [2]


def test_a_feed_that_holds_for_a_checkpoint_may_be_closed_twice(bridge, producer, tmp_path) -> None:
    put(producer, range(2))
    with Feed(bridge, groups=1, release_at="checkpoint", run_dir=tmp_path) as feed:
        feed.begin_run(0)
        feed.trained(feed.take(5), version=1)
        feed.close()
    producer.close()
    assert list(shmbridge.clean(bridge, dry_run=False).trained.values()) == [1]


def test_lanes_have_room_for_the_steps_that_they_are_sized_for(bridge, tmp_path) -> None:
    record = sizing.record_bytes(2000, columns=["tokens"])
    lane = sizing.lane_bytes_for(record, groups=4, prefetch=0, steps=5, same_size=True)
    group = {"tokens": [[7] * 2000]}
    with (
        shmbridge.Producer(bridge, lane_bytes=lane, on_full="raise") as producer,
        Feed(bridge, groups=4, release_at="checkpoint", whole_rows=True, run_dir=tmp_path) as feed,
    ):
        for _ in range(5):
            for _ in range(4):
                producer.put(group)
            feed.trained(feed.take(5))
        producer.put(group)
        assert feed.stats()["feed_steps_trained_held"] == 5


def test_each_asynchronous_call_has_its_own_timeout(bridge, tmp_path) -> None:
    async def main(feed) -> bool:
        first = asyncio.create_task(feed.take_async(20))
        await asyncio.sleep(0.05)
        with pytest.raises(shmbridge.ConsumerEmpty):
            await feed.take_async(0.3)
        alone = first.done()
        first.cancel()
        return alone

    with Feed(bridge, groups=1, run_dir=tmp_path) as feed:
        assert not asyncio.run(main(feed))


def test_a_group_that_comes_after_the_loop_has_ended_comes_again(bridge, producer, tmp_path) -> None:
    async def main(feed) -> None:
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(feed.take_async(), 1.3)  # by now the thread waits for longer at a time

    with Feed(bridge, groups=1, run_dir=tmp_path) as feed:
        asyncio.run(main(feed))
        put(producer, [7])
        assert numbers_of(feed.take(5)) == [7]


@pytest.mark.parametrize("error", [shmbridge.ConsumerEmpty, shmbridge.BatchTooBig])
def test_a_wait_that_ends_the_run_is_no_failure_of_the_steps_that_are_out(
    bridge, producer, tmp_path, error
) -> None:
    put(producer, [1])
    for _ in range(3):
        with pytest.raises(error), Feed(bridge, groups=1, run_dir=tmp_path) as feed:
            assert numbers_of(feed.take(5)) == [1]
            raise error("no second step")
    assert not (tmp_path / "set_aside").exists()


def test_what_is_released_half_way_stays_in_the_next_state(bridge, producer, tmp_path, monkeypatch) -> None:
    put(producer, range(4))
    release = shmbridge.Record.release

    def interrupted(record) -> None:
        if record.meta.sequence == 1:
            raise KeyboardInterrupt
        release(record)

    with Feed(bridge, groups=2, run_dir=tmp_path, release_at="checkpoint") as feed:
        feed.trained(feed.take(5))
        feed.save_state(tmp_path)
        with monkeypatch.context() as patch:
            patch.setattr(shmbridge.Record, "release", interrupted)
            with pytest.raises(KeyboardInterrupt):
                feed.checkpointed()
        feed.save_state(tmp_path)
    with Feed(bridge, groups=2, run_dir=tmp_path) as feed:
        assert feed.load_state(tmp_path)
        assert numbers_of(feed.take(5)) == [2, 3]


def test_what_waits_for_an_exact_step_becomes_stale(bridge, producer, tmp_path) -> None:
    with Feed(bridge, groups=4, run_dir=tmp_path, exact=True, max_staleness=1) as feed:
        feed.publish(0)
        put(producer, range(4))
        parts = feed.parts(feed.take(5))
        feed.failed(parts[:2], ValueError())
        with pytest.raises(shmbridge.ConsumerEmpty):
            feed.take(0.2)
        feed.trained(parts[2:], version=9)
        put(producer, range(10, 14))
        assert numbers_of(feed.take(5)) == [10, 11, 12, 13]


PIPELINE = """
import os, sys
from shmbridge import ConsumerEmpty
from shmbridge.consumers import Feed

out = []
with Feed(sys.argv[1], groups=4, run_dir=sys.argv[2]) as feed:
    while True:
        try:
            while len(out) < 2:
                out.append(feed.take(10 if not feed.counts else 0))
                out[-1].early = sys.argv[3] == "early"
        except ConsumerEmpty:
            if not out:
                break
        step = out.pop(0)
        step.early = False
        if 5 in [int(row.tokens[0]) for row in step.rows]:
            os.abort()
        feed.trained(step)
"""


@pytest.mark.parametrize("ahead", ["begun", "early"])
def test_a_trainer_with_two_steps_out_finds_the_group_that_ends_it(bridge, producer, tmp_path, ahead) -> None:
    put(producer, range(12))
    ends = []
    while len(ends) < 8 and (not ends or ends[-1]):
        ends.append(subprocess.run([sys.executable, "-c", PIPELINE, bridge, tmp_path, ahead]).returncode)
    assert ends[-1] == 0
    assert [record.sequence for record in read_archive(tmp_path / "set_aside")] == [5]


def test_steps_that_fail_together_are_tried_apart_and_grow_no_larger(bridge, producer, tmp_path) -> None:
    put(producer, range(16))
    trained, sizes = [], set()
    with Feed(bridge, groups=4, run_dir=tmp_path) as feed:
        for _ in range(40):
            steps = []
            try:
                while len(steps) < 2:
                    steps.append(feed.take(0.2))
            except shmbridge.ConsumerEmpty:
                if not steps:
                    break
            sizes |= {len(step.groups) for step in steps}
            numbers = [number for step in steps for number in numbers_of(step)]
            if 5 in numbers:
                feed.failed(steps, ValueError())
            else:
                feed.trained(steps)
                trained += numbers
    assert (sorted(trained), max(sizes)) == ([*range(5), *range(6, 16)], 4)


@pytest.mark.parametrize("poison", [(2,), (0,), (2, 13), (0, 8), (3, 9, 20)])
def test_exact_steps_set_the_groups_at_fault_aside_and_no_others(bridge, producer, tmp_path, poison) -> None:
    """Groups that are tried apart stand beside others, which may be at fault themselves."""
    put(producer, range(160))
    trained: list[int] = []
    with Feed(bridge, groups=8, exact=True, run_dir=tmp_path) as feed:
        for _ in range(100):
            if len(trained) >= 128:
                break
            step = feed.take(5)
            numbers = numbers_of(step)
            if {*poison} & {*numbers}:
                feed.failed(step, FloatingPointError("nan loss"))
            else:
                feed.trained(step)
                trained += numbers
    aside = [int(record.group_id[1:]) for record in read_archive(tmp_path / "set_aside")]
    assert sorted(aside) == sorted(poison)
    assert len(trained) == len({*trained}) >= 128


@pytest.mark.parametrize("timeout_s", [0.05, 0.5, 2.0])
@pytest.mark.parametrize("release_at", [None, "checkpoint"])
def test_short_waits_notice_full_lanes_as_a_long_one_does(
    bridge, producer, tmp_path, timeout_s, release_at
) -> None:
    run = shmbridge.Run(save_checkpoint_interval=1000)
    with Feed(bridge, groups=2, run=run, release_at=release_at, run_dir=tmp_path) as feed:
        put(producer, range(256))
        for _ in range(128):
            feed.trained(feed.take(5))
        more = threading.Thread(target=put, args=(producer, range(256, 258)))
        more.start()

        def came() -> bool:
            try:
                return numbers_of(feed.take(timeout_s)) == [256, 257]
            except shmbridge.ConsumerEmpty:
                return False

        if release_at is None:
            wait_until(came, timeout_s=20)
        else:
            with pytest.raises(shmbridge.BatchTooBig, match="wait for a checkpoint"):
                wait_until(came, timeout_s=20)
            feed.checkpointed()
        more.join(20)


def test_a_save_that_fails_holds_nothing_up(bridge, producer, tmp_path) -> None:
    with Feed(bridge, groups=1, release_at="checkpoint", run_dir=tmp_path) as feed:
        put(producer, range(256))
        for _ in range(256):
            feed.trained(feed.take(5))
        with pytest.raises(OSError, match="No such"):
            feed.save_state(tmp_path / "nowhere")
        more = threading.Thread(target=put, args=(producer, [256]))
        more.start()
        with pytest.raises(shmbridge.BatchTooBig, match="256 steps wait for a checkpoint"):
            feed.take(20)
        feed.checkpointed()
        more.join(20)


def test_groups_whose_arrays_cannot_be_made_come_again(bridge, producer, tmp_path) -> None:
    made = []

    def make(groups, layout):
        if len(groups) < 2 and not made:
            made.append(1)
            raise MemoryError("no room for the arrays")
        return shmbridge.Batch(groups, layout)

    put(producer, range(2))
    with Feed(bridge, groups=2, longest_row=9, make=make, run_dir=tmp_path) as feed:
        step = feed.take(5)
        for _ in range(2):
            feed.failed(step, ValueError("of the step"))
            if not made:
                try:
                    step = feed.take(5)
                except MemoryError:
                    step = feed.take(5)
        assert made
        assert numbers_of(step) == [0]


def test_a_step_named_twice_ends_once_and_a_run_begins_above_the_bridge(bridge, producer, tmp_path) -> None:
    put(producer, range(4))
    with Feed(bridge, groups=2, run_dir=tmp_path) as feed:
        assert feed.begin_run(3) == 3
        step = feed.take(5)
        feed.trained([step, step], version=7)
        assert feed.stats()["released_total"] == 2
    with Feed(bridge, groups=2, start="from-scratch", run_dir=tmp_path) as feed:
        assert feed.begin_run(5) == 8


def test_what_a_view_keeps_stays_in_the_states_until_it_is_released(bridge, producer, tmp_path) -> None:
    """A killed process releases nothing that a view or a rank still read, though a checkpoint contains it."""
    put(producer, range(4))
    with Feed(bridge, groups=2, release_at="checkpoint", run_dir=tmp_path) as feed:
        view = None
        for number in range(2):
            step = feed.take(5)
            view = step.groups[0].records[0]["tokens"].values if view is None else view
            feed.trained(step)
            del step
            state = feed.state_dict()
            feed.checkpointed()
            (listed,) = state["held"].values()
            assert sorted(listed) == [[0, 1], [0, 2, 3]][number]
        assert view.tolist() == [0, 1, 0, 1]
        del view
        assert feed.state_dict()["held"] == {}


def test_close_in_a_signal_handler_within_a_take_ends_the_take(bridge, tmp_path) -> None:
    feed = Feed(bridge, run_dir=tmp_path)
    before = signal.signal(signal.SIGALRM, lambda *_: feed.close())
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.6)
        with pytest.raises(Drained, match="is closed"):
            feed.take(30)
    finally:
        signal.signal(signal.SIGALRM, before)
    with shmbridge.Consumer(bridge):
        pass
