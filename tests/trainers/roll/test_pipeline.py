"""ROLL's own pipeline trains the known groups on a CPU: what its loss gets, and what it learns.

Needs a checkout. A run starts a dozen Ray processes that each import ROLL: half a minute of processor time.
"""

import dataclasses
import json
import os
import pickle
import runpy
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

import shmbridge
from shmbridge.testing.fixtures import known_groups, loss_matrix
from shmbridge.weights import WeightsReader
from tests.trainers.contract import Seen, assert_contract, compare, fully_recorded
from tests.trainers.roll.conftest import rows_of
from tests.trainers.roll.test_killed import next_consumer

HERE, ROOT = Path(__file__).parent, Path(__file__).parents[3]
pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    """The folder of a tiny random model."""
    folder = tmp_path_factory.mktemp("tiny")
    runpy.run_path(str(ROOT / "examples/tiny_model.py"))["build"](folder, seed=3)
    return folder


class Pipeline:
    """A ROLL pipeline in a process group of its own; `seen()` is what its loss got."""

    def __init__(self, checkout: str, bridge: str, model: Path, folder: Path, flags, more) -> None:
        self._seen, self._log = folder / "seen", (folder / "log").open("w+")
        self._bridge = bridge
        environment = os.environ | {
            "SHMBRIDGE_ROLL_CHECKOUT": str(Path(checkout).resolve()), "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "USE_TF": "0", **more,
        }  # fmt: skip
        script = [sys.executable, str(HERE / "train_on_cpu.py"), bridge, str(model)]
        self.process = subprocess.Popen(
            [*script, "--seen", str(self._seen), *flags], cwd=folder, env=environment, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, start_new_session=True,
        )  # fmt: skip

    def says(self, word: str) -> list[str]:
        """Returns the rest of the next line that begins with a word; fails with the log if there is none."""
        for line in self.process.stdout:
            self._log.write(line)
            if line.startswith(word):
                return line.split()[1:]
        self._log.flush()
        raise AssertionError((word, Path(self._log.name).read_text()[-6000:]))

    def seen(self) -> list[dict]:
        """Returns the micro-batches of ROLL's loss, in order."""
        with self._seen.open("rb") as file:
            found = []
            while file.peek(1):
                found.append(pickle.load(file))
        return found

    def end(self) -> None:
        """Kills what is left of it; its Ray ends the actor, which has the bridge's weights open."""
        self.process.kill()
        self.process.wait(30)
        deadline = time.monotonic() + 60
        while any(each.participants for each in shmbridge.list_bridges() if each.name == self._bridge):
            assert time.monotonic() < deadline, "some process of ROLL's is still there"
            time.sleep(0.1)
        for file in (self.process.stdin, self.process.stdout, self._log):
            file.close()


@pytest.fixture
def start(needs_checkout, bridge, model, tmp_path):
    """`start(*flags, **environment)`: a Pipeline of the test's bridge."""
    made = []

    def begin(*flags: str, **more: str) -> Pipeline:
        made.append(Pipeline(needs_checkout, bridge, model, tmp_path, flags, more))
        return made[-1]

    yield begin
    for each in made:
        each.end()


def rows_of_step(seen: list[dict], step: int) -> list[Seen]:
    """The rows of all micro-batches of a step, and the old log-probabilities of ROLL's ratio."""
    columns = ("response_mask", "advantages", "old_log_probs")
    return [row for batch in seen if batch["step"] == step for row in rows_of(batch, *columns)]


def test_the_loss_gets_what_was_put_and_the_policy_learns(start, bridge, model):
    """Three steps on the same groups, all of which have log-probabilities; advantages by the pipeline. Each
    step's weights are in the bridge under the version that is published for it.
    """
    groups = fully_recorded(loss_matrix(version=0, vocabulary=12))
    with shmbridge.Producer(bridge, lane_bytes="1M") as producer, WeightsReader(bridge) as weights:
        for step in range(3):
            for group in groups:
                put(producer, group, step)
        flags = ("--logprobs", "--groups", "7", "--steps", "3", "--by", "pipeline")
        run = start(*flags, WAIT_IN_STEP="0")
        run.says("BATCH")
        (first, before), whole = weights.copy(), load_file(f"{model}/model.safetensors")
        assert first == producer.policy_version == 0
        assert set(before) == set(whole)
        assert all(np.array_equal(before[name], whole[name]) for name in whole)
        run.process.stdin.write("\n")
        run.process.stdin.flush()
        run.says("DONE")
        last, after = weights.copy()
        assert last == producer.policy_version == 2, "the weights that two steps have trained"
        assert any(not np.array_equal(after[name], before[name]) for name in whole)
    seen = run.seen()
    assert [batch["step"] for batch in seen] == [0] * 7 + [1] * 7 + [2] * 7
    release = f"commit {json.loads((HERE / 'interface.json').read_text())['commit'][:8]}"
    assert_contract("ROLL", release, "`ShmAgenticPipeline`", groups, rows_of_step(seen, 0))
    assert all(compare(groups, rows_of_step(seen, step)).all_are_right() for step in (1, 2))
    wins = [sum(gain(batch) for batch in seen if batch["step"] == step) for step in range(3)]
    print(wins)
    assert wins[0] < wins[1] < wins[2], "advantage-weighted log-probability rises"
    with next_consumer(bridge) as left:
        assert not left.poll(), "all were trained, and released"


def put(producer, group, version: int = 0) -> None:
    """Puts a group that began at a version, whatever versions its test wants elsewhere."""
    for fragment in group.fragments:
        columns = {name: values for name, values in fragment.items() if name != "token_versions"}
        producer.put(
            columns,
            group_id=group.group_id,
            group_size=len(group.rows),
            policy_version=version,
            split=group.split,
        )


def gain(batch: dict) -> float:
    """Returns the sum of advantage times log-probability over a micro-batch."""
    return float((batch["advantages"] * batch["log_probs"]).sum())


def come_again(bridge: str) -> list[bool]:
    """Returns whether each record there is redelivered; it holds none of them any more."""
    with next_consumer(bridge, 120.0) as between:
        return [record.meta.redelivered for record in between.poll()]


@pytest.mark.long
def test_killed_between_batch_and_step_then_trained_by_the_actors_hook(start, bridge):
    """All of ROLL SIGKILLed with a batch in hand; the next run trains the same groups, once."""
    groups = known_groups(version=0, vocabulary=12)
    with shmbridge.Producer(bridge, lane_bytes="1M") as producer:
        for group in groups:
            put(producer, group)
        killed = start("--by", "worker", WAIT_IN_STEP="0")
        first = killed.says("BATCH")
        os.kill(killed.process.pid, signal.SIGKILL)
        assert come_again(bridge) == [True] * 6
        run = start("--by", "worker")
        assert run.says("BATCH") == first
        run.says("DONE")
    release = f"commit {json.loads((HERE / 'interface.json').read_text())['commit'][:8]}"
    assert_contract("ROLL", release, "`ShmActorWorker`", groups, rows_of_step(run.seen(), 0))
    with next_consumer(bridge) as left:
        assert not left.poll()


@pytest.mark.long
def test_killed_after_a_checkpoint_then_resumed_from_it(start, bridge, tmp_path):
    """ROLL's own saves, which FSDP2 writes in the background, and ROLL's own resume."""
    groups = [group for group in known_groups(version=0, vocabulary=12) if group.name != "no columns"][:2]
    flags = ("--logprobs", "--groups", "2", "--steps", "5", "--by", "pipeline")
    with shmbridge.Producer(bridge, lane_bytes="1M") as producer:
        for step in range(5):
            for group in groups:
                put(producer, dataclasses.replace(group, group_id=f"{step}-{group.group_id}"), step)
        killed = start(*flags, "--save", "1", WAIT_IN_STEP="3")
        batches = [sorted(set(killed.says("BATCH")[1:])) for _ in range(4)]
        saved = tmp_path / "output/actor_train-0/checkpoint-2"
        while not (saved / "dcp/.metadata").exists():
            time.sleep(0.1)
        os.kill(killed.process.pid, signal.SIGKILL)
        with next_consumer(bridge, 120.0) as between:
            left = sorted({record.meta.group_id for record in between.poll() if record.meta.redelivered})
        assert left == [*batches[2], *batches[3]], "checkpoint 2 was not known to be durable"
        (tmp_path / "from").mkdir()
        (tmp_path / "from/actor_train").symlink_to(saved)
        (tmp_path / "from/pipeline").symlink_to(tmp_path / "output/pipeline/checkpoint-2/pipeline")
        run = start(*flags, "--resume", str(tmp_path / "from"))
        assert [sorted(set(run.says("BATCH")[1:])) for _ in range(2)] == [
            batches[3],
            sorted(f"4-{group.group_id}" for group in groups),
        ]
        run.says("DONE")
    with next_consumer(bridge) as left:
        assert not left.poll(), "all were trained, and released"
