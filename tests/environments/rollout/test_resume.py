"""--resume: a run that is killed again and again puts every task, and none twice."""

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path

import pytest

from shmbridge import ConsumerEmpty, list_bridges
from shmbridge.errors import BadArgument
from shmbridge.producers.rollout.runner import Position

ROOT = Path(__file__).parents[3]
TASKS = 100


def kill(pid: int, after_s: float) -> None:
    """Kills a child of the starter, unless it ends before."""
    child = os.pidfd_open(pid)
    time.sleep(after_s)
    with contextlib.suppress(ProcessLookupError):
        signal.pidfd_send_signal(child, signal.SIGKILL)
    os.close(child)


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.long) for seed in (1, 2, 3))])
def test_a_rollout_killed_at_random_moments_puts_every_task_once(bridge, make_consumer, tmp_path, seed):
    """A consumer lives through it all, so lanes of the killed ones are gone before the next begins."""
    consumer, chance, got, over = make_consumer(), random.Random(seed), Counter(), threading.Event()

    def read() -> None:
        while True:
            try:
                with consumer.get(0.05) as record:
                    got[record["instance_id"][0]] += 1
            except ConsumerEmpty:
                if over.is_set():
                    return

    reading = threading.Thread(target=read)
    reading.start()
    said = tmp_path / "said"
    words = [sys.executable, "-m", "tests.environments.rollout.resumed_child"]
    variables = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    kills, file = 0, tmp_path / "position"
    try:
        with (
            said.open("w") as errors,
            subprocess.Popen(
                [*words, bridge, str(file), str(TASKS)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                cwd=ROOT,
                env=variables,
            ) as starter,
        ):
            status = -signal.SIGKILL
            while status:
                step = chance.choice(["", "note", "commit"]) if kills < 12 else ""
                where = f"{step} {chance.randint(1, 12)}" if step else ""
                starter.stdin.write(f"{where}\n")
                starter.stdin.flush()
                pid = int(starter.stdout.readline())
                if kills < 12:
                    kills += 1
                    if not where:
                        kill(pid, chance.uniform(0.01, 0.3))
                status = int(starter.stdout.readline())
                assert status in (0, -signal.SIGKILL), said.read_text()
            starter.stdin.close()
    finally:
        over.set()
        reading.join()
    assert got == dict.fromkeys(map(str, range(TASKS)), 1)
    assert kills == 12
    (info,) = (each for each in list_bridges() if each.name == bridge)
    assert info.receipts == 0
    assert json.loads(file.read_text())["next"] == TASKS


def test_a_file_serves_one_process_and_holds_a_position(tmp_path):
    file = tmp_path / "position"
    position = Position(file)
    for number in (1, 0, 3):
        position.over(number)
    with pytest.raises(BadArgument, match="another process"):
        Position(file)
    position.close()
    again = Position(file)
    assert [number for number in range(5) if number in again] == [0, 1, 3]
    assert again.tasks_over == 3
    again.close()
    with pytest.raises(BadArgument, match="cannot be written"):
        Position(tmp_path / "nowhere" / "position")
    file.write_text('{"next": 4}')
    with pytest.raises(BadArgument, match="does not hold the position"):
        Position(file)


def test_a_note_is_settled_by_the_records_of_the_lane(tmp_path):
    """Cancelled while it waited for room, a group is committed when the producer is closed, or not."""
    for records, over in ((5, True), (4, False)):
        position = Position(tmp_path / f"position{records}")
        position.committing(2, 4)
        position.over(7)  # another one's
        position.settle(records)
        position.close()
        assert (2 in Position(tmp_path / f"position{records}")) is over
