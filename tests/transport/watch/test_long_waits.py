"""A process that waits for long says what for, on standard error: the line that `inspect` gives."""

import asyncio
import contextlib
import os
import re
import signal
import subprocess
import sys
import textwrap
import time

import pytest

import shmbridge
from shmbridge.testing import wait_until
from shmbridge.watch import diagnosis
from shmbridge.watch.diagnosis import headline
from shmbridge.watch.snapshot import look

LONG_S, EVERY_S = 0.6, 60.0  # what a batch has is known after a quarter of a second
ENVIRONMENT = """
import shmbridge, sys
producer = shmbridge.Producer(bridge, env_name=NAME, lane_bytes="64K")
producer.put({"tokens": [[1, 2, 3]], "loss_mask": [[0, 1, 1]]})
print("ready", flush=True)
for line in sys.stdin:
    producer.put({"tokens": [[1, 2, 3]], "loss_mask": [[0, 1, 1]]})
"""
# Every way to wait for a record or batch. Each takes what is there, then waits.
WAITS = {
    "batches": "next(consumer.batches(groups=9))",
    "take_groups": "consumer.take_groups(groups=9, timeout_s=60)",
    "get": "[consumer.get() for _ in range(9)]",
    "get_async": "asyncio.run(several(consumer.get_async))",
    "async batches": "asyncio.run(over(consumer.batches(groups=9)))",
    "short calls in one wait": """
with consumer.one_wait():
    while True:
        consumer.take_groups(groups=9, timeout_s=0.05)
""",
}
LEARNER = """
import asyncio, shmbridge
from shmbridge.watch import diagnosis, long_wait
diagnosis.LONG_S, long_wait.EVERY_S = <LONG>, <EVERY>
async def several(call):
    return [await call() for _ in range(9)]
async def over(items):
    return [item async for item in items]
consumer = shmbridge.Consumer(bridge)
"""


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """`inspect`, too, calls a wait long that takes as long as that."""
    monkeypatch.setattr(diagnosis, "LONG_S", LONG_S)


@pytest.fixture
def learner(bridge, tmp_path):
    """Starts a program that has `consumer`; returns what it has written to standard error so far."""
    started = []

    def start(code, *, every_s=EVERY_S, before=LEARNER):
        program = before.replace("<LONG>", str(LONG_S)).replace("<EVERY>", str(every_s)) + textwrap.dedent(
            code
        )
        path = tmp_path / f"stderr-{len(started)}"
        with path.open("w") as errors:
            started.append(
                subprocess.Popen([sys.executable, "-c", f"bridge = {bridge!r}\n{program}"], stderr=errors)
            )
        return path.read_text

    yield start
    for process in started:
        process.kill()
        process.wait()


@pytest.fixture
def environment(child):
    return lambda name="gsm8k": child(ENVIRONMENT.replace("NAME", repr(name)))


def without_numbers(text):
    return re.sub(r"\d[\d.]*", "", text)


@pytest.mark.parametrize("how", WAITS)
def test_each_way_to_wait_says_what_inspect_says(bridge, environment, make_producer, learner, how):
    stopped = environment()
    make_producer(env_name="code").put({"tokens": [[1, 2, 3]], "loss_mask": [[0, 1, 1]]})
    os.kill(stopped.pid, signal.SIGSTOP)
    read = learner(WAITS[how])
    wait_until(read, 20)
    [line] = read().splitlines()
    assert line.startswith(f"bridge {bridge!r}: the learner waits for environments (")
    assert line.endswith(f" -> kill -CONT {stopped.pid}")
    inspected = [without_numbers(f"bridge {bridge!r}: {headline(look(bridge))}"), without_numbers(line)]
    assert inspected[0] == inspected[1]


def test_how_much_of_the_batch_is_there(bridge, child, learner):
    child("""
import shmbridge
producer = shmbridge.Producer(bridge, env_name="code")
group = {"tokens": [[1, 2, 3]], "loss_mask": [[0, 1, 1]]}
[producer.put(group) for _ in range(7)]
producer.put(group, group_id="eighth", group_size=2)
print("ready", flush=True)
producer_lives = input()
""")
    read = learner("next(consumer.batches(groups=8))")
    wait_until(read, 20)
    assert re.search(r"\([\d.]+ s, 7 of 8 groups are there and 1 in part\): the slowest of 1, code,", read())
    assert look(bridge).consumer.wanted == 8


def test_it_is_said_again_and_again(bridge, learner):
    read = learner("next(consumer.batches(groups=4))", every_s=0.2)
    wait_until(lambda: len(read().splitlines()) > 2, 20)
    assert all("no producer has ever come -> start environments" in line for line in read().splitlines())


def test_a_wait_that_is_not_long_says_nothing(bridge, learner, tmp_path):
    read = learner(
        """
import contextlib, pathlib
for _ in range(6):
    for call in (consumer.get, lambda timeout_s: next(consumer.batches(groups=1, timeout_s=timeout_s))):
        with contextlib.suppress(shmbridge.ConsumerEmpty):
            call(timeout_s=LONG_S / 4)
pathlib.Path(DONE).touch()
""".replace("LONG_S", str(LONG_S)).replace("DONE", repr(str(tmp_path / "done")))
    )
    wait_until((tmp_path / "done").exists, 30)
    assert read() == ""


def test_another_wait_soon_after_is_said_if_it_is_for_something_else(bridge, environment, learner):
    read = learner("for number in range(4): consumer.get().release()")
    wait_until(read, 20)
    first = environment("code")  # its record ends the wait; the next one is for it alone
    wait_until(lambda: "the slowest of 1, code" in read(), 20)
    said = read().splitlines()
    for number in (2, 3):  # the third wait is for the same
        first.stdin.write("\n")
        first.stdin.flush()
        wait_until(lambda number=number: look(bridge).lanes[0].released == number, 20)
    wait_until(lambda: look(bridge).consumer.asking_s > 2 * LONG_S, 20)
    assert read().splitlines() == said
    assert len(said) == 2


def test_waits_that_overlap_are_several_and_those_inside_another_are_one(bridge, make_consumer):
    """As of tasks that take records in turn: one of them always waits, none of them for long."""
    consumer = make_consumer()
    with contextlib.ExitStack() as later:
        with consumer.one_wait():
            began = time.monotonic()
            for _ in range(2):
                with consumer.one_wait():
                    wait_until(lambda: time.monotonic() > began + 0.1)
                assert look(bridge).consumer.asking_s > 0.1
            later.enter_context(consumer.one_wait())
        second = time.monotonic()
        now = look(bridge).consumer
        assert now.asking_s < time.monotonic() - began - 0.1
        assert 0.1 < now.batch_wait_s < time.monotonic() - began + 0.1
    assert look(bridge).consumer.asking_s is None
    assert look(bridge).consumer.batch_wait_s < second - began + 1


def test_tasks_that_get_records_in_turn_do_not_wait_for_long(bridge, child, make_consumer):
    """Whichever gets the next one: another one may have waited from the beginning."""
    child("""
import shmbridge, time
producer = shmbridge.Producer(bridge)
print("ready", flush=True)
while True:
    producer.put({"tokens": [[1]], "loss_mask": [[1]]})
    time.sleep(0.02)
""")
    consumer, longest_s, got = make_consumer(), [0.0], [0, 0, 0]

    async def get(task):
        while sum(got) < 60:
            with contextlib.suppress(shmbridge.ConsumerEmpty):
                (await consumer.get_async(timeout_s=1.0)).release()
                longest_s.append(look(bridge).consumer.asking_s or 0.0)
                got[task] += 1

    async def all_tasks():
        await asyncio.gather(*map(get, range(3)))

    began = time.monotonic()
    asyncio.run(all_tasks())
    assert max(longest_s) < (time.monotonic() - began) / 3


def test_a_rank_says_it_too(bridge, learner):
    rank = "rank = shmbridge.Rank(bridge, 0, 2)\nnext(rank.batches())"
    read = learner(rank, before=LEARNER.replace("consumer = shmbridge.Consumer(bridge)", ""))
    wait_until(read, 20)
    assert read().startswith(f"rank 0 of 2, bridge {bridge!r}: no consumer is alive -> start the process")


RANK = """
async def waits():
    async for _ in shmbridge.Rank(bridge, 0, 2).batches(): pass
"""


@pytest.mark.parametrize("how", ["next(shmbridge.Rank(bridge, 0, 2).batches())", "asyncio.run(waits())"])
def test_a_rank_names_the_one_it_waits_for(bridge, make_consumer, make_producer, learner, how):
    """Its own share of the only batch is read; the other rank never comes for its one."""
    server = make_consumer().serve_ranks(world_size=2, groups=2, prefetch=0)
    producer = make_producer()
    for _ in range(8):
        producer.put({"tokens": [[1, 2, 3]], "loss_mask": [[0, 1, 1]]})
    before = LEARNER.replace("consumer = shmbridge.Consumer(bridge)", RANK)
    first = "for batch in shmbridge.Rank(bridge, 0, 2).batches(): pass"
    read = learner(first if "next" in how else how, before=before)
    wait_until(read, 20)
    assert read() == f"rank 0 of 2, bridge {bridge!r}: it waits for rank 1, not alive -> start it\n"
    server.stats()


def test_after_five_seconds_by_default(bridge):
    """The whole line, as a plain script shows it."""
    began = time.monotonic()
    with subprocess.Popen(
        [sys.executable, "-c", f"import shmbridge; next(shmbridge.Consumer({bridge!r}).batches(groups=4))"],
        stderr=subprocess.PIPE,
        text=True,
    ) as waiting:
        wait_until(lambda: (now := look(bridge)) and now.consumer and now.consumer.asking_s, 20)
        asked = time.monotonic()
        line = waiting.stderr.readline()
        said = time.monotonic()
        waiting.kill()
    assert re.fullmatch(
        rf"bridge '{bridge}': the learner waits for environments \([56] s, 0 of 4 groups are there\): "
        r"no producer has ever come -> start environments on this bridge\n",
        line,
    )
    assert 4.5 < said - asked < 7
    assert began < asked
