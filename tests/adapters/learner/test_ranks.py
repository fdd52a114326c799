"""Several ranks as processes on a real bridge learn what one learns; when one dies or stops, none hangs and
nothing is lost.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import uuid
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file
from tokenizers import Regex, Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from transformers import PreTrainedTokenizerFast

import shmbridge
from shmbridge.archive.folder import read_archive
from shmbridge.consumers.learner.data.sources import NoBatch, RankStatus, leave_together
from shmbridge.consumers.learner.stopping import Stopped
from shmbridge.consumers.learner.world import PeerFailed
from shmbridge.weights import WeightsReader, WeightsWriter

GROUPS = 4  # per step
GONE = 4  # exit status of a rank that lost another


@pytest.fixture(scope="module")
def nursery():
    """Ask it for processes; see rank_nursery.py."""
    command = [sys.executable, str(Path(__file__).with_name("rank_nursery.py"))]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    ) as process:

        def ask(**question):
            process.stdin.write(json.dumps(question) + "\n")
            process.stdin.flush()
            return int(process.stdout.readline())

        yield ask
        process.stdin.close()


class Job:
    """The ranks of one start, as torchrun would start them, but without an agent that ends the others when
    one is gone.
    """

    def __init__(self, nursery, folder, bridge, size, *flags, breaks=""):
        self._nursery, self.folder = nursery, folder
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        argv = ["--bridge", bridge, "--model", str(folder / "model"), "--run-dir", str(folder / "run")]
        argv += ["--device", "cpu", "--threads", "1", "--lr", "1e-3", "--group-size", "4", "--warmup", "1"]
        argv += ["--groups", str(GROUPS), "--entropy", "0.1", *flags]
        self.number = uuid.uuid4().hex[:6]
        self.pids, self.over = {}, {}
        for rank in range(size):
            where = {
                "RANK": rank,
                "LOCAL_RANK": rank,
                "WORLD_SIZE": size,
                "MASTER_PORT": port,
                "BREAKS": breaks,
            }
            env = {name: str(value) for name, value in where.items()} | {"MASTER_ADDR": "127.0.0.1"}
            out, err = (str(folder / f"{self.number}.{rank}.{name}") for name in ("out", "err"))
            self.pids[rank] = nursery(start={"argv": argv, "env": env, "out": out, "err": err})

    def said(self, rank=0, name="out"):
        path = self.folder / f"{self.number}.{rank}.{name}"
        return path.read_text() if path.exists() else ""

    def read_until(self, text, within_s=60.0):
        deadline = time.monotonic() + within_s
        while text not in self.said():
            assert time.monotonic() < deadline, f"no {text!r} in {self.said()}, {self.said(0, 'err')}"
            time.sleep(0.02)

    def wait(self):
        """Return the exit statuses by rank; blocks until all are over."""
        for rank in self.pids.keys() - self.over.keys():
            self.over[rank] = self._nursery(wait=self.pids[rank])
        return dict(sorted(self.over.items()))

    def kill(self, rank, signum=signal.SIGKILL):
        os.kill(self.pids[rank], signum)


@pytest.fixture(scope="module")
def save_model(tiny_model):
    """Return a function that writes the same small model to a folder."""
    return lambda folder: tiny_model(5).save_pretrained(folder)


@pytest.fixture
def start(nursery, bridge, save_model, tmp_path):
    """Return a starter of jobs whose processes are gone when the test is."""
    save_model(tmp_path / "model")
    jobs = []

    def begin(size, *flags, **more):
        jobs.append(Job(nursery, tmp_path, bridge, size, *flags, **more))
        return jobs[-1]

    yield begin
    for job in jobs:
        for rank in job.pids.keys() - job.over.keys():
            job.kill(rank)
        job.wait()


def put_groups(producer, count):
    for number in range(count):
        put_group(producer, number)


def put_group(producer, number):
    """Put 4 answers of a length and with scores that depend on the number."""
    more = number % 5
    tokens = [[1, 2 + number % 8, 10 + row, 11] + [12 + row] * more for row in range(4)]
    group = {
        "tokens": tokens,
        "loss_mask": [[0, 0, 1, 1] + [1] * more] * 4,
        "score": [1.0, 0.0, 0.25, number % 3],
    }
    producer.put(group, policy_version=0, timeout_s=10.0)


def metrics(folder):
    lines = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    assert not any(value for line in lines for name, value in line.items() if name.startswith("rows_differ"))
    return lines


def saved(folder):
    return sorted(path.name for path in (folder / "run" / "checkpoints").iterdir())


def parameters(folder, step):
    return load_file(folder / "run" / "checkpoints" / f"step-{step:08d}" / "model.safetensors")


def left_over(bridge):
    """Return the sequences that a next consumer gets."""
    with shmbridge.Consumer(bridge) as consumer:
        records = consumer.poll(max_records=10_000)
        found = sorted(record.meta.sequence for record in records)
        for record in records:
            record.release()
    return found


def assert_close(found, expected, atol=3e-6):
    """Adam divides by the root of what it sees: numbers that are 0 but for rounding, as those of key biases,
    stay near 0 only.
    """
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        near = 1e-3 if name.endswith("k_proj.bias") else atol
        np.testing.assert_allclose(found[name], tensor, rtol=1e-5, atol=near, err_msg=name)


def run_of(start, bridge, tmp_path, size, *flags, steps=3):
    """Return parameters and metrics of a whole run in a folder of its own."""
    with shmbridge.Producer(bridge, env_name="test", lane_bytes="4M") as producer:
        put_groups(producer, GROUPS * steps)
        job = start(size, "--steps", str(steps), "--run-dir", str(tmp_path / f"of-{size}" / "run"), *flags)
        assert set(job.wait().values()) == {0}, job.said(0, "err") + job.said(1, "err")
        assert left_over(bridge) == []
        with WeightsReader(bridge) as reader, reader.lease() as lease:
            assert lease.version == steps
            for name, tensor in parameters(tmp_path / f"of-{size}", steps).items():
                np.testing.assert_array_equal(lease.tensors[name], tensor, err_msg=name)
    return parameters(tmp_path / f"of-{size}", steps), metrics(tmp_path / f"of-{size}")


ADDS_UP = (
    "tokens",
    "trained_tokens",
    "trajectories",
    "groups",
    "groups_flat",
    "atropos/total_sequences",
    "rows_compared{test}",
)
ALIKE = (
    "loss",
    "entropy",
    "grad_norm",
    "reward_mean",
    "reward_std",
    "advantage_mean",
    "advantage_std",
    "atropos/test/std_score",
)


@pytest.fixture(scope="module")
def alone(nursery, save_model, tmp_path_factory):
    """Parameters and metrics of one rank after three steps."""
    folder, bridge = tmp_path_factory.mktemp("alone"), f"ranks-{os.getpid()}-{uuid.uuid4().hex[:8]}"
    save_model(folder / "model")
    try:
        return run_of(lambda *given: Job(nursery, folder, bridge, *given), bridge, folder, 1)
    finally:
        shmbridge.clean(bridge, dry_run=False)


@pytest.mark.parametrize("parallel", ["ddp", "fsdp2"])
@pytest.mark.parametrize(
    "flags",
    [(), ("--micro-tokens", "12", "--gradient-checkpointing", "--publish-every", "2")],
    ids=["whole", "cut"],
)
def test_two_ranks_learn_what_one_learns(start, bridge, tmp_path, alone, parallel, flags):
    """Micro-batches of 12 tokens: nearly as many as rows, and not as many on each rank.

    Versions of every second step, too.
    """
    expected, lines = alone
    both, merged = run_of(start, bridge, tmp_path, 2, *flags, "--parallel", parallel)
    assert_close(both, expected)
    for one, two in zip(lines, merged, strict=True):
        assert one.keys() == two.keys()
        assert one["rows_compared{test}"] == one["trajectories"] > 0
        assert {name: two[name] for name in ADDS_UP} == {name: one[name] for name in ADDS_UP}
        for name in ALIKE:
            assert two[name] == pytest.approx(one[name], rel=1e-4, abs=1e-5), name


@pytest.mark.parametrize("parallel", ["ddp", pytest.param("fsdp2", marks=pytest.mark.long)])
def test_ranks_are_not_thrown_back_either_and_all_begin_with_the_weights_of_the_bridge(
    start, bridge, tmp_path, tiny_model, parallel
):
    """Rank 0 decides, for all."""
    flags = ("--parallel", parallel, "--max-wait-time", "2")
    before = {name: each.numpy() for name, each in tiny_model(7).state_dict().items()}
    with shmbridge.Producer(bridge, env_name="test", lane_bytes="4M") as producer:
        with shmbridge.Consumer(bridge) as consumer, WeightsWriter(bridge) as writer:
            writer.publish(2, before.items())
            consumer.publish_policy_version(2)
        refused = start(2, "--steps", "9", "--run-dir", str(tmp_path / "b"), "--resume", *flags)
        assert refused.wait() == {0: 1, 1: 1}
        for rank in (0, 1):
            assert f"[SB518] bridge {bridge} has been trained up to version 2" in refused.said(rank, "err")
        put_groups(producer, GROUPS)
        taken = ("--run-dir", str(tmp_path / "b" / "run"), "--from-bridge", "--lr", "0")
        job = start(2, "--steps", "1", *taken, *flags)
        assert job.wait() == {0: 0, 1: 0}, job.said(0, "err") + job.said(1, "err")
        assert "step 0 of 1, version 3, waiting" in job.said()
        with WeightsReader(bridge) as reader:
            assert reader.version == 4
        left_over(bridge)
    assert_close(parameters(tmp_path / "b", 1), before, atol=0)


NEEDS_ALL = {  # objectives that divide by, or normalise over, what all ranks have
    "grpo": "--loss grpo --advantages batch --kl-coef 0.1 --tis-cap 2",
    "dr_grpo": "--loss dr_grpo --advantages rloo --token-rewards batch --kl-coef 0.1 --kl-estimator k2",
    "sft": "--loss sft --sft-normalization global --clip-advantages -1 1",
}


@pytest.mark.parametrize(
    ("parallel", "loss"),
    [("ddp", "grpo"), pytest.param("fsdp2", "dr_grpo", marks=pytest.mark.long), ("fsdp2", "sft")],
)
def test_two_ranks_have_one_objective(start, bridge, tmp_path, parallel, loss):
    flags = ["--micro-tokens", "12", *NEEDS_ALL[loss].split()]
    expected, lines = run_of(start, bridge, tmp_path, 1, *flags, steps=2)
    both, merged = run_of(start, bridge, tmp_path, 2, "--parallel", parallel, *flags, steps=2)
    # on average: Adam makes much of single gradients that are 0 but for rounding
    for name, tensor in expected.items():
        assert np.abs(both[name] - tensor).mean() < (1e-4 if name.endswith("k_proj.bias") else 1e-7), name
    for one, two in zip(lines, merged, strict=True):
        for name in (*ALIKE, "policy_loss", "kl", "tis_weight_mean"):
            assert two[name] == pytest.approx(one[name], rel=1e-4, abs=1e-5), name
    assert lines[-1]["grad_norm"] > 1e-3


@pytest.mark.parametrize("parallel", ["ddp", "fsdp2"])
def test_two_ranks_accumulate_what_one_takes_at_once(start, bridge, tmp_path, alone, parallel):
    """Two batches of two groups for each step; a checkpoint knows what all ranks held when it was written."""
    expected, lines = alone
    both, merged = run_of(
        start, bridge, tmp_path, 2, "--groups", "2", "--accumulate", "2", "--parallel", parallel
    )
    assert_close(both, expected, atol=2e-5)  # gradients are scaled once more, and added in another order
    for one, two in zip(lines, merged, strict=True):
        assert {name: two[name] for name in ADDS_UP} == {name: one[name] for name in ADDS_UP}
        for name in ("loss", "entropy", "grad_norm", "reward_mean", "reward_std"):
            assert two[name] == pytest.approx(one[name], rel=1e-4, abs=1e-5), name
    said = json.loads(
        (tmp_path / "of-2" / "run" / "checkpoints" / "step-00000003" / "learner.json").read_text()
    )
    assert list(said["held"].values()) == [[*range(12)]]  # the first checkpoint: none was released before it
    assert (said["groups"], said["trajectories"]) == (12, 48)


@pytest.mark.parametrize("parallel", ["ddp", "fsdp2"])
def test_a_rank_whose_share_trains_nothing_takes_part(start, bridge, tmp_path, parallel):
    """One group of the first step has a trained token: two of three shares have none, and a step without any
    changes nothing.
    """
    flags = (
        "--steps",
        "2",
        "--save-every",
        "1",
        "--entropy",
        "0",
        "--kl-coef",
        "0.01",
        "--process-group-timeout",
        "30",
    )
    folders = {size: tmp_path / str(size) for size in (1, 3)}
    for size, folder in folders.items():
        with shmbridge.Producer(bridge, env_name="test", lane_bytes="4M") as producer:
            for trained in (1, 0, 0, 0, 0, 0, 0, 0):
                group = {
                    "tokens": [[1, 2, 3, row] for row in range(4)],
                    "loss_mask": [[0, 0, 0, trained]] * 4,
                }
                producer.put(group | {"score": [1.0, 0.0, 0.0, 1.0]}, policy_version=0, timeout_s=10.0)
            job = start(size, *flags, "--parallel", parallel, "--run-dir", str(folder / "run"))
            assert set(job.wait().values()) == {0}, [job.said(rank, "err") for rank in range(size)]
    first, second = metrics(folders[3])
    assert (first["trained_tokens"], second["trained_tokens"]) == (4, 0)
    assert second["grad_norm"] == 0.0
    assert first["grad_norm"] == pytest.approx(metrics(folders[1])[0]["grad_norm"], rel=1e-4)
    before, after = parameters(folders[3], 1), parameters(folders[3], 2)
    for name, tensor in before.items():
        np.testing.assert_array_equal(after[name], tensor, err_msg=name)


@pytest.mark.parametrize(
    ("parallel", "then"), [("fsdp2", 1), pytest.param("ddp", 1, marks=pytest.mark.long), ("fsdp2", 3)]
)
def test_a_run_goes_on_with_another_number_of_ranks(start, bridge, tmp_path, alone, parallel, then):
    """Two steps by two ranks and one by others are what three by one rank are: parameters, moments and step
    are whole in the files.
    """
    with shmbridge.Producer(bridge, env_name="test", lane_bytes="4M") as producer:
        put_groups(producer, GROUPS * 3)
        first = start(2, "--steps", "3", "--parallel", parallel, "--save-every", "2")
        assert set(first.wait().values()) == {0}, first.said(0, "err")
        assert saved(tmp_path) == ["step-00000002", "step-00000003"]
        both = parameters(tmp_path, 3)
        for file in (tmp_path / "run" / "checkpoints" / "step-00000003").iterdir():
            file.unlink()
        (tmp_path / "run" / "checkpoints" / "step-00000003").rmdir()
        for number in range(GROUPS * 2, GROUPS * 3):  # the third batch once more
            put_group(producer, number)
        second = start(then, "--steps", "3", "--parallel", parallel, "--resume")
        assert set(second.wait().values()) == {0}, second.said(0, "err")
    assert "step 2 of 3" in second.said()
    assert_close(both, alone[0])
    assert_close(parameters(tmp_path, 3), alone[0])


@pytest.mark.parametrize("dead", [0, 1])
@pytest.mark.parametrize("when", ["waiting", "training"])
def test_a_killed_rank_takes_no_group_with_it_and_nobody_hangs(start, bridge, tmp_path, dead, when):
    with shmbridge.Producer(bridge, env_name="test", lane_bytes="4M") as producer:
        steps = 2 if when == "waiting" else 100
        put_groups(producer, GROUPS * steps + 1)
        job = start(2, "--steps", "1000", "--process-group-timeout", "20")
        job.read_until("step    2/")
        job.kill(dead)
        begun = time.monotonic()
        status = job.wait()
        took = time.monotonic() - begun
        assert status == {dead: -signal.SIGKILL, 1 - dead: GONE}, job.said(1 - dead, "err")
        assert took < 15.0  # the kernel closes its connections: no need to wait for the limit
        said = job.said(1 - dead, "err")
        ends = f"grpo: error: rank {1 - dead} of 2 ends, since another one is gone or was silent for 20 s: "
        assert re.fullmatch(
            r"(rank \d of bridge .* is gone; .*\n)?"  # the hub may have noticed before the end
            + ends
            + r".*Connection (closed|reset) .* -> see that rank's output; .* --resume\n",
            said,
        ), said

        left = left_over(bridge)
    # Sequences count from 0. What is gone is in a checkpoint.
    kept = saved(tmp_path)[-1:] if (tmp_path / "run" / "checkpoints").exists() else []
    gone = GROUPS * int(kept[0].removeprefix("step-")) if kept else 0
    assert left in ([*range(gone, GROUPS * steps + 1)], [*range(GROUPS * steps + 1)])


def test_a_silent_rank_is_waited_for_no_longer_than_the_limit(start, bridge, tmp_path):
    with shmbridge.Producer(bridge, env_name="test", lane_bytes="4M") as producer:
        put_groups(producer, GROUPS * 2)
        job = start(2, "--steps", "1000", "--process-group-timeout", "3")
        job.read_until("step    2/")
        job.kill(1, signal.SIGSTOP)
        assert job._nursery(wait=job.pids[0]) == GONE
        job.over[0] = GONE
        job.kill(1)
        assert job.wait() == {0: GONE, 1: -signal.SIGKILL}
    assert "silent for 3 s" in job.said(0, "err")


@pytest.mark.parametrize("whom", [(0,), pytest.param((1,), marks=pytest.mark.long), (0, 1)])
def test_a_stop_of_any_rank_is_a_stop_of_all_with_one_checkpoint(start, bridge, tmp_path, whom):
    with shmbridge.Producer(bridge, env_name="test", lane_bytes="4M") as producer:
        put_groups(producer, GROUPS * 3 + 1)
        job = start(2, "--steps", "50")
        job.read_until("step  3/")
        for rank in whom:
            job.kill(rank, signal.SIGTERM)
        assert job.wait() == {0: 128 + signal.SIGTERM, 1: 128 + signal.SIGTERM}, job.said(0, "err")
        assert job.said().count("stopped by SIGTERM") == 1
        assert job.said(0, "err") + job.said(1, "err") + job.said(1) == ""
        assert [line["step"] for line in metrics(tmp_path)] == [1, 2, 3]
        assert saved(tmp_path) == ["step-00000003"]
        assert left_over(bridge) == [GROUPS * 3]


def test_ranks_give_up_together(start, bridge, tmp_path):
    with shmbridge.Producer(bridge, env_name="test", lane_bytes="4M") as producer:
        put_groups(producer, GROUPS + 1)
        job = start(
            2, "--steps", "5", "--max-wait-time", "1.5", "--parallel", "fsdp2", "--precision", "bfloat16"
        )
        assert set(job.wait().values()) == {3}
        assert "1 of 1 lane has a living producer, 1 of 4 groups are there" in job.said(0, "err")
        assert job.said(1, "err") + job.said(1) == ""
        assert saved(tmp_path) == ["step-00000001"]
        assert left_over(bridge) == [GROUPS]


def test_a_batch_that_one_rank_cannot_train_ends_all_and_is_left(start, bridge, tmp_path):
    """One group of the batch has no advantages of its own, and only the rank that reads it knows."""
    with shmbridge.Producer(bridge, env_name="countdown", lane_bytes="4M") as producer:
        for number in range(GROUPS):
            group = {"tokens": [[1, 2, 3]] * 4, "score": [1.0, 0.0, 0.0, 1.0]}
            if number:
                group["advantages"] = [[0.0, 1.0, 1.0]] * 4
            producer.put(group, policy_version=0, timeout_s=10.0)
        job = start(2, "--steps", "5", "--no-fallback-to-grpo")
        assert set(job.wait().values()) == {1}
        said = [job.said(rank, "err") for rank in range(2)]
        assert all("of environment 'countdown' has 4 trajectories" in text for text in said), said
        assert all(len(text.splitlines()) == 1 for text in said), said
        assert sorted(text.startswith("grpo: error: rank ") for text in said) == [False, True]
        assert len(left_over(bridge)) == GROUPS


@pytest.mark.parametrize(("fate", "statuses"), [("killed", [-signal.SIGKILL, GONE]), ("full", [1, 1])])
def test_groups_are_released_after_their_checkpoint_is_on_the_disk(start, bridge, tmp_path, fate, statuses):
    with shmbridge.Producer(bridge, env_name="test", lane_bytes="4M") as producer:
        put_groups(producer, GROUPS * 2)
        flags = ("--eval-every", "1", "--eval-hook", f"dying_saver:{fate}")
        job = start(2, "--steps", "4", "--stop-when", "reward_mean>=0", "--stop-patience", "2", *flags)
        assert list(job.wait().values()) == statuses, job.said(0, "err") + job.said(1, "err")
        if fate == "full":
            said = job.said(0, "err")
            assert said.count("\n") == 1
            assert "no checkpoint of step 2 in" in said
            assert "No space left on device" in said
        assert left_over(bridge) == list(range(GROUPS * 2))


@pytest.mark.parametrize(
    ("fate", "after", "parallel"),
    [
        ("killed", 1, "ddp"),
        ("saved", 1, "ddp"),
        ("killed", 2, "fsdp2"),
        pytest.param("saved", 2, "fsdp2", marks=pytest.mark.long),
        pytest.param("killed", 2, "ddp", marks=pytest.mark.long),
        pytest.param("released", 1, "ddp", marks=pytest.mark.long),
        pytest.param("released", 2, "fsdp2", marks=pytest.mark.long),
    ],
)
def test_a_kill_in_a_save_or_before_its_release_loses_no_group_and_trains_none_twice(
    start, bridge, tmp_path, alone, fate, after, parallel
):
    """The resumed model is that of a run without a kill."""
    with shmbridge.Producer(bridge, env_name="test", lane_bytes="4M") as producer:
        put_groups(producer, GROUPS * 3)
        flags = ("--steps", "3", "--save-every", "1", "--parallel", parallel)
        hook = ("--eval-every", str(after), "--eval-hook", f"dying_saver:{fate}")
        first = start(2, *flags, *hook)
        assert first.wait() == {0: -signal.SIGKILL, 1: GONE}, first.said(0, "err") + first.said(1, "err")
        assert saved(tmp_path)[-1] == f"step-{after + (fate != 'killed'):08d}"
        second = start(2, *flags, "--resume")
        assert second.wait() == {0: 0, 1: 0}, second.said(0, "err") + second.said(1, "err")
        known = max((line["resume/known_groups_total"] for line in metrics(tmp_path)), default=0)
        left = left_over(bridge)
    # killed after its last save, a run has nothing left to train, and takes no groups that it could release
    assert left == ([*range(GROUPS * 2, GROUPS * 3)] if (fate, after) == ("saved", 2) else [])
    assert_close(parameters(tmp_path, 3), alone[0])
    said = json.loads((tmp_path / "run" / "checkpoints" / "step-00000003" / "learner.json").read_text())
    assert said["groups"] == GROUPS * 3
    assert known == (GROUPS if fate == "saved" and after == 1 else 0)


@pytest.mark.timeout(180)
@pytest.mark.parametrize("how", ["poison", pytest.param("abort", marks=pytest.mark.long)])
def test_a_group_that_breaks_one_rank_is_set_aside_over_the_runs(start, bridge, tmp_path, how):
    with shmbridge.Producer(bridge, env_name="test", lane_bytes="4M") as producer:
        for number in range(24):
            if number != 2:
                put_group(producer, number)
                continue
            group = {
                "tokens": [[1, 2, 3, 22]] * 4,
                "loss_mask": [[0, 0, 1, 1]] * 4,
                "score": [1.0, 0.0, 0.0, 1.0],
            }
            producer.put(group, policy_version=0)
        ends, flags = [], ("--groups", "8", "--steps", "50", "--save-every", "1", "--max-wait-time", "4")
        while not ends or 3 not in ends[-1]:
            resume = ("--resume", "--from-scratch") if ends else ()
            job = start(2, *flags, *resume, breaks=f"{how} 22")
            ends.append(sorted(job.wait().values()))
            assert len(ends) < 9, ends
        assert ends[-1] == [3, 3], job.said(0, "err") + job.said(1, "err")
        assert {*map(tuple, ends[:-1])} == {(-signal.SIGABRT, GONE) if how == "abort" else (GONE, 5)}, ends
        (aside,) = read_archive(tmp_path / "run" / "set_aside")
        assert aside.sequence == 2
        trained, left = sum(line["groups"] for line in metrics(tmp_path)), left_over(bridge)
    assert trained + len(left) == 23
    assert trained >= 16


def test_a_hook_computes_with_a_model_in_parts_and_its_numbers_end_the_run_early(start, bridge, tmp_path):
    tokenizer = Tokenizer(WordLevel({"<unk>": 0, "3": 1, "4": 2}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = Split(Regex(r"[\s\S]"), behavior="isolated")
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>").save_pretrained(tmp_path / "model")
    seen = {}
    for parallel, size in (("ddp", 1), ("fsdp2", 2)):
        with shmbridge.Producer(bridge, env_name="test", lane_bytes="4M") as producer:
            put_groups(producer, GROUPS * 6)
            folder = tmp_path / parallel
            flags = ("--eval-hook", "reading_hook:score", "--eval-every", "2", "--stop-when", "eval/step>=4")
            job = start(
                size, "--steps", "6", "--parallel", parallel, *flags, "--run-dir", str(folder / "run")
            )
            assert set(job.wait().values()) == {0}, job.said(0, "err")
            assert "stopped early: eval/step>=4" in job.said()
            assert saved(folder) == ["step-00000004"]
            lines = metrics(folder)
            assert [line.get("eval/hook_failures_total") for line in lines] == [0] * 4, job.said()
            seen[parallel] = [line.get("eval/logits") for line in lines], parameters(folder, 4)
            assert left_over(bridge) == list(range(GROUPS * 4, GROUPS * 6))
    (numbers, weights), (numbers_of_parts, weights_of_parts) = seen["ddp"], seen["fsdp2"]
    assert numbers[::2] == [None, None]
    np.testing.assert_allclose(numbers_of_parts[1::2], numbers[1::2], rtol=1e-4)
    assert_close(weights_of_parts, weights, atol=1e-5)


def test_tokens_that_the_model_does_not_know_end_all_with_their_environment_and_finished_steps_saved(
    start, bridge, tmp_path
):
    with shmbridge.Producer(bridge, env_name="klingon", lane_bytes="4M") as producer:
        put_groups(producer, GROUPS)
        for number in range(GROUPS):
            producer.put(
                {"tokens": [[1, 2, 3 if number else 999]] * 4, "score": [1.0, 0.0, 0.0, 1.0]},
                policy_version=0,
                timeout_s=10.0,
            )
        job = start(2, "--steps", "5")
        assert set(job.wait().values()) == {1}
        said = [job.said(rank, "err") for rank in range(2)]
        assert all("environment 'klingon' uses another tokenizer" in text for text in said), said
        assert all(len(text.splitlines()) == 1 for text in said), said
        assert saved(tmp_path) == ["step-00000001"]
        assert len(left_over(bridge)) == GROUPS


def test_fewer_groups_than_ranks_and_taken_bridges_are_refused_on_all(start, bridge, tmp_path):
    job = start(3, "--steps", "5", "--groups", "2")
    assert set(job.wait().values()) == {1}
    assert "--groups 2" in job.said(0, "err")
    with shmbridge.Consumer(bridge):
        job = start(2, "--steps", "5")
        assert set(job.wait().values()) == {1}
    assert "ConsumerTaken" in job.said(1, "err")
    assert len(job.said(0, "err").splitlines()) == 1


@pytest.fixture
def torchrun(bridge, save_model, tmp_path):
    """Return a starter of torchrun with two ranks, which is gone, with them, when the test is."""
    save_model(tmp_path / "model")
    started = []

    def start(*flags):
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
        command += ["-m", "shmbridge.consumers.grpo", "--bridge", bridge, "--model", str(tmp_path / "model")]
        command += ["--run-dir", str(tmp_path / "run"), "--device", "cpu", "--threads", "1", "--lr", "1e-3"]
        command += ["--warmup", "1", "--groups", str(GROUPS), "--group-size", "4", "--entropy", "0.1", *flags]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        started.append(
            subprocess.Popen(
                command,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                env=environment,
                start_new_session=True,
            )
        )
        return started[-1]

    yield start
    for process in started:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def test_torchrun_starts_them(bridge, torchrun, tmp_path, alone):
    with shmbridge.Producer(bridge, env_name="test", lane_bytes="4M") as producer:
        put_groups(producer, GROUPS * 3)
        process = torchrun("--steps", "3")
        out, _ = process.communicate(timeout=100)
        assert process.returncode == 0, out
        assert out.count("done: 3 of 3 steps") == 1
        assert left_over(bridge) == []
    assert_close(parameters(tmp_path, 3), alone[0])


def test_torchrun_that_is_told_to_stop_lets_them_save_once(bridge, torchrun, tmp_path):
    with shmbridge.Producer(bridge, env_name="test", lane_bytes="4M") as producer:
        put_groups(producer, GROUPS * 2 + 1)
        process = torchrun("--steps", "50", "--parallel", "fsdp2")
        for line in process.stdout:
            if "step  2/" in line:
                break
        process.send_signal(signal.SIGTERM)
        out = process.stdout.read()
        process.wait(timeout=60)
        assert out.count("stopped by SIGTERM") == 1, out
        assert saved(tmp_path) == ["step-00000002"]
        assert left_over(bridge) == [GROUPS * 2]


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        (
            [RankStatus("here", 4), RankStatus(failed="BatchTooBig: 3 groups"), RankStatus(signum=15)],
            (PeerFailed, "rank 1: BatchTooBig: 3 groups"),
        ),
        ([RankStatus("here", 4), RankStatus("here", 5)], (PeerFailed, r"different batches, \[4, 5\]")),
        ([RankStatus(gave_up="nobody"), RankStatus("here", 4, signum=15)], (Stopped, "SIGTERM")),
        ([RankStatus(gave_up="nobody"), RankStatus("here", 4)], (NoBatch, "nobody")),
    ],
)
def test_all_ranks_leave_for_the_reason_that_one_of_them_has(said, expected):
    error, why = expected
    with pytest.raises(error, match=why):
        leave_together(said)


def test_statuses_that_let_all_continue_are_no_reason_to_leave():
    leave_together([RankStatus("here", 4), RankStatus(), RankStatus("drained")])
