"""SIGKILL of SkyRL's trainer in its loss, in its save and between save and release; and steps that fail."""

import json
import random
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import shmbridge
from shmbridge.archive.folder import read_archive

PROGRAM = Path(__file__).with_name("dying_trainer.py")
NAMES = [f"g{number:02}" for number in range(12)]
# where, and at which steps; SkyRL saves after every second one
PLACES = {
    "save": (2, 4, 6),
    "pointer": (2, 4, 6),
    "release": (2, 4, 6),
    "model saved": (2, 4, 6),
    "loss": (1, 2, 3, 4, 5, 6),
    "trained": (1, 2, 3, 4, 5, 6),
}


@pytest.fixture(scope="module")
def trainers():
    """Makes runs of a trainer in processes of their own; returns how each ended."""
    program = subprocess.Popen(
        [sys.executable, str(PROGRAM)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    while (line := program.stdout.readline()) != "ready\n":
        assert line, "dying_trainer.py ended"

    def run(**what):
        program.stdin.write(json.dumps(what) + "\n")
        program.stdin.flush()
        return int(program.stdout.readline())

    yield run
    program.stdin.close()
    program.wait(30)


@pytest.fixture
def trainer(trainers, bridge, tiny, tmp_path):
    def run(kind="sync", *, every=2, ends=0, says="", **what):
        log = tmp_path / "log"
        ended = trainers(
            bridge=bridge, model=str(tiny), folder=str(tmp_path), log=str(log), kind=kind, every=every, **what
        )
        assert ended == ends, log.read_text()[-3000:]
        assert says in log.read_text()

    return run


def put(example, producer, names) -> None:
    random = np.random.default_rng(3)
    for name in names:
        producer.put(example.rewarded(random), group_id=name)


def in_the_model(folder) -> list[str]:
    """The groups that the newest checkpoint's model was trained with."""
    step = (folder / "latest_ckpt_global_step.txt").read_text()
    return sorted(json.loads((folder / f"global_step_{step}/policy/groups.json").read_text()))


def left_over(bridge) -> list[tuple[str, bool]]:
    with shmbridge.Consumer(bridge) as following:
        return [(record.meta.group_id, record.meta.redelivered) for record in following.poll(100)]


@pytest.mark.parametrize(
    "seed", [*range(3), *(pytest.param(n, marks=pytest.mark.long) for n in range(3, 10))]
)
@pytest.mark.parametrize("kind", ["sync", "async"])
def test_a_killed_trainer_loses_no_group_and_trains_none_twice(
    example, trainer, producer, bridge, tmp_path, kind, seed
):
    # SkyRL's asynchronous trainer writes a file after the pointer, and does not resume without it
    places = [place for place in PLACES if (kind, place) != ("async", "pointer")]
    where = places[seed % len(places)]
    step = random.Random(seed).choice(PLACES[where])
    put(example, producer, NAMES)
    trainer(kind, where=where, step=step, ends=-signal.SIGKILL)
    if not (tmp_path / "latest_ckpt_global_step.txt").exists():
        trainer(kind, ends=1, says="and no checkpoint was loaded")
        trainer(kind, start="from-scratch")
    else:
        trainer(kind)
    assert in_the_model(tmp_path) == NAMES
    over = where == "release" and step == 6  # then the next run has nothing to train, so it takes nothing
    assert left_over(bridge) == ([(name, True) for name in NAMES[-4:]] if over else [])


@pytest.mark.parametrize(("where", "again"), [("loss", NAMES[:2]), ("sync", [])])
def test_without_checkpoints_what_is_trained_is_released(example, trainer, producer, bridge, where, again):
    put(example, producer, NAMES[:4])
    trainer(every=-1, where=where, step=1, ends=-signal.SIGKILL)
    expected = [(name, True) for name in again] + [(name, False) for name in NAMES[2:4]]
    assert left_over(bridge) == expected


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_a_group_at_which_every_run_fails_is_set_aside(example, trainer, producer, bridge, tmp_path, kind):
    names = [*NAMES, "g12"]
    put(example, producer, names)
    for _ in range(4):  # its step twice, then twice beside groups that nobody suspects
        trainer(kind, poison="g05", ends=1, says="nan loss")
    trainer(kind, poison="g05")
    assert in_the_model(tmp_path) == [name for name in names if name != "g05"]
    assert [record.group_id for record in read_archive(tmp_path / "set_aside")] == ["g05"]
    assert left_over(bridge) == []
