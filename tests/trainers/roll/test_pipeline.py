"""ROLL's own pipeline trains the known groups on a CPU: what its loss gets, and what it learns.

Needs a checkout. A run starts a dozen Ray processes that each import ROLL: half a minute of processor time.
"""

import dataclasses
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

import shmbridge
from shmbridge.testing.known_groups import known_groups
from tests.trainers.roll.test_killed import next_consumer

HERE, ROOT = Path(__file__).parent, Path(__file__).parents[3]
LENGTH = 48
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
        """Kills what is left of it."""
        self.process.kill()
        self.process.wait(30)
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


def rows_of(groups) -> dict[tuple[int, ...], object]:
    """Tokens -> the row that was put."""
    return {tuple(row.tokens.tolist()): row for group in groups for row in group.rows}


def worst_difference(seen: list[dict], rows, shift: int = 0) -> dict[str, float]:
    """Returns the greatest difference of each column of ROLL's loss from what was put."""
    worst = {"response_mask": 0.0, "advantages": 0.0, "infer_logprobs": 0.0, "old_log_probs": 0.0}
    for batch in seen:
        for at, ids in enumerate(batch["input_ids"]):
            row = rows[tuple(ids[: batch["attention_mask"][at].sum()].tolist())]
            wanted = {
                "response_mask": row.trained,
                "advantages": row.advantages,
                "infer_logprobs": row.logprobs,
                "old_log_probs": row.logprobs,
            }
            for name in set(worst) & set(batch):
                full = np.zeros(LENGTH, np.float32)
                full[: len(row.tokens)] = np.roll(wanted[name], shift)
                got = batch[name][at].astype(np.float32)
                worst[name] = max(worst[name], float(np.abs(got - full[LENGTH - len(got) :]).max()))
    return worst


def test_the_known_groups_in_rolls_own_loss_and_a_policy_that_learns(start, bridge):
    """Three steps on the same four groups that have log-probabilities, advantages by the pipeline."""
    groups = [group for group in known_groups(version=0, vocabulary=12) if group.name != "no columns"]
    with shmbridge.Producer(bridge, lane_bytes="1M") as producer:
        for step in range(3):
            for group in groups:
                put(producer, group, step)
        run = start("--logprobs", "--groups", "4", "--steps", "3", "--by", "pipeline")
        run.says("DONE")
    seen = run.seen()
    assert [batch["step"] for batch in seen] == [0] * 4 + [1] * 4 + [2] * 4
    rows = rows_of(groups)
    columns = ("response_mask", "advantages", "infer_logprobs", "old_log_probs")
    assert worst_difference(seen, rows) == dict.fromkeys(columns, 0.0)
    assert min(worst_difference(seen, rows, shift=1).values()) > 0.1, "one position later they differ"
    wins = [sum(gain(batch) for batch in seen if batch["step"] == step) for step in range(3)]
    assert wins[0] < wins[1] < wins[2], "advantage-weighted log-probability rises"
    with next_consumer(bridge) as left:
        assert not left.poll(), "all were trained, and released"


def put(producer, group, version: int = 0) -> None:
    """Puts a group that began at a version, whatever versions its test wants elsewhere."""
    for fragment in group.fragments:
        columns = {name: values for name, values in fragment.items() if name != "token_versions"}
        producer.put(columns, group_id=group.group_id, group_size=len(group.rows), policy_version=version)


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
    rows = rows_of(groups)
    worst = worst_difference(run.seen(), rows)
    assert worst["advantages"] < 1e-6
    assert worst["response_mask"] == 0.0
    assert worst_difference(run.seen(), rows, shift=1)["advantages"] > 0.1
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
