"""kill -9 of the environment, of the inference server, of the consumer, and of the learner: no task is lost,
none comes twice unmarked.
"""

from __future__ import annotations

import asyncio
import functools
import json
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import shmbridge
from shmbridge import ConsumerEmpty

pytestmark = pytest.mark.timeout(300)

TASKS, GROUP = 18, 4
CONSUMER = """
import sys, time
import shmbridge
with shmbridge.Consumer(sys.argv[1]) as consumer:
    while True:
        with consumer.get() as record:
            again = record.meta.redelivered
            for row in range(len(record)):
                print(record["instance_id"][row], record["repetition_id"][row], again, flush=True)
            time.sleep(0.02)
"""


class Reading:
    """Reads all that comes in a thread of its own: how often each row of a task came."""

    def __init__(self, consumer: shmbridge.Consumer) -> None:
        self.got: Counter[tuple[str, int]] = Counter()
        self.groups = 0
        self._consumer, self._over = consumer, threading.Event()
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def _read(self) -> None:
        while True:
            try:
                with self._consumer.get(0.05) as record:
                    for row in range(len(record)):
                        self.got[record["instance_id"][row], int(record["repetition_id"][row])] += 1
                    self.groups += 1
            except ConsumerEmpty:
                if self._over.is_set():
                    return

    def has(self, groups: int) -> bool:
        return self.groups >= groups

    def end(self) -> None:
        self._over.set()
        self._thread.join()


def until(condition: Callable[[], bool], process: subprocess.Popen[str] | None = None) -> None:
    give_up = time.monotonic() + 90
    while not condition():
        assert time.monotonic() < give_up
        assert process is None or process.poll() is None
        time.sleep(0.02)


def words(bridge: str, url: str, tiny: Path, *more: object) -> list[object]:
    return [
        *("--verifiers", "larger_digit", "--bridge", bridge, "--server", url, "--tokenizer", tiny),
        *("--env-config", "agent.runtime.type=subprocess", f"taskset.tasks={TASKS}", "--epochs", 1),
        *("--group-size", GROUP, "--concurrency", 4, "--max-tokens", 4, "--lane-bytes", "4M", *more),
    ]


def all_came_once(reading: Reading) -> None:
    reading.end()
    assert set(reading.got.values()) == {1}
    assert len(reading.got) == TASKS * GROUP


def test_the_environment_is_killed(
    bridge: str,
    consumer: shmbridge.Consumer,
    tiny: Path,
    policy_server: str,
    program: Callable[..., Any],
    tmp_path: Path,
) -> None:
    reading = Reading(consumer)
    try:
        for kill_at in (6, None):
            process = program(
                "shmbridge.producers.verifiers",
                *words(bridge, policy_server, tiny, "--resume", tmp_path / "position"),
            )
            if kill_at is None:
                assert process.wait(90) == 0
            else:
                until(functools.partial(reading.has, kill_at), process)
                process.kill()
                process.wait(30)
        until(lambda: reading.groups == TASKS)
    finally:
        reading.end()
    all_came_once(reading)


def test_the_server_is_killed(
    bridge: str,
    consumer: shmbridge.Consumer,
    tiny: Path,
    serve: Callable[..., Any],
    program: Callable[..., Any],
) -> None:
    """Episodes wait for the next server on the same port."""
    url, server = serve()
    reading = Reading(consumer)
    try:
        process = program("shmbridge.producers.verifiers", *words(bridge, url, tiny))
        until(lambda: reading.groups >= 5, process)
        server.kill()
        server.wait(30)
        serve(int(url.rsplit(":", 1)[1]))
        assert process.wait(90) == 0
        assert "lost: none" in process.stdout.read()
        until(lambda: reading.groups == TASKS)
    finally:
        reading.end()
    all_came_once(reading)


async def test_the_consumer_is_killed(
    bridge: str, tiny: Path, policy_server: str, program: Callable[..., Any], tmp_path: Path
) -> None:
    """What it held comes again to the next one, and says so."""
    script = tmp_path / "consuming.py"
    script.write_text(CONSUMER)
    got: list[tuple[str, str, str]] = []
    process = program("shmbridge.producers.verifiers", *words(bridge, policy_server, tiny))
    rows = TASKS * GROUP
    for kill_at in (30, None):
        consuming = await asyncio.create_subprocess_exec(
            sys.executable, str(script), bridge, stdout=asyncio.subprocess.PIPE
        )
        while len({each[:2] for each in got}) < (kill_at or rows):
            line = await asyncio.wait_for(consuming.stdout.readline(), 90)
            got.append(tuple(line.decode().split()))
        consuming.kill()
        rest = (await consuming.stdout.read()).decode()
        got += [tuple(line.split()) for line in rest.splitlines(keepends=True) if line.endswith("\n")]
        await consuming.wait()
    assert process.wait(60) == 0
    assert len({each[:2] for each in got}) == rows
    once = Counter(each[:2] for each in got if each[2] == "False")
    assert set(once.values()) == {1}


def test_the_learner_is_killed(
    bridge: str, tiny: Path, policy_server: str, program: Callable[..., Any], tmp_path: Path
) -> None:
    """Between two checkpoints: the resumed model has every group once, but for those that still wait.

    Each step trains two groups, and each is named in samples.jsonl.
    """
    run, steps = tmp_path / "run", 8

    def lines(name: str) -> list[dict[str, Any]]:
        text = (run / name).read_text() if (run / name).exists() else ""
        return [json.loads(each) for each in text.splitlines(keepends=True) if each.endswith("\n")]

    learns = [
        *("--bridge", bridge, "--model", tiny, "--run-dir", run, "--steps", steps, "--save-every", 4),
        *("--groups", 2, "--group-size", GROUP, "--sample-every", 1, "--threads", 1, "--max-token-len", 64),
    ]
    learner = program("shmbridge", "train", *learns)
    environment = program("shmbridge", "env", *words(bridge, policy_server, tiny, "--concurrency", 1))
    until(lambda: len(lines("metrics.jsonl")) > 4, learner)
    learner.kill()
    learner.wait(30)
    first, before = lines("samples.jsonl"), len(lines("metrics.jsonl"))
    saved = max(int(each.name.split("-")[1]) for each in (run / "checkpoints").glob("step-*"))
    in_checkpoint = [each["group_id"] for each in first if each["step"] <= saved]
    not_in_it = {each["group_id"] for each in first if each["step"] > saved}
    assert len(in_checkpoint) == 2 * saved
    assert not_in_it
    learner = program("shmbridge", "train", *learns, "--resume")
    assert environment.wait(90) == 0
    assert f"{TASKS} groups were put; lost: none" in environment.stdout.read()
    assert learner.wait(90) == 0

    second = lines("samples.jsonl")[len(first) :]
    assert [each["step"] for each in second] == [
        each for step in range(saved, steps) for each in [step + 1] * 2
    ]
    trained = Counter([*in_checkpoint, *(each["group_id"] for each in second)])
    waiting: Counter[str] = Counter()
    with shmbridge.Consumer(bridge) as consumer:
        while sum(waiting.values()) < TASKS - len(trained):
            with consumer.get(5) as record:
                waiting[str(record.meta.group_id)] += 1
        with pytest.raises(ConsumerEmpty):
            consumer.get(0.1)
        assert not [name for name, n in consumer.stats().items() if n and name.startswith("discarded_total")]
    assert set((trained + waiting).values()) == {1}
    assert (len(trained), len(waiting)) == (2 * steps, TASKS - 2 * steps)
    # groups that the killed learner had trained and not saved come again, marked as redelivered
    marked = {each["step"]: each["trajectories_redelivered"] for each in lines("metrics.jsonl")[before:]}
    again = Counter(each["step"] for each in second if each["group_id"] in not_in_it)
    assert sum(again.values()) == len(not_in_it)
    assert all(marked[step] >= GROUP * groups for step, groups in again.items())
    assert sum(marked.values()) < GROUP * len(second)  # and what is new does not
