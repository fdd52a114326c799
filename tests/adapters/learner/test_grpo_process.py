"""The learner as a process on a real bridge: killed and started again, stopped while it waits."""

from __future__ import annotations

import itertools
import json
import re
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

import shmbridge
from shmbridge.archive.folder import read_archive
from shmbridge.producers.replay import replay
from shmbridge.testing import wait_until
from shmbridge.weights import WeightsReader

GROUPS = 2  # per step


@pytest.fixture
def start_learner(bridge, tiny_model, tmp_path):
    """Return a starter of learner processes that are gone when the test is."""
    tiny_model(5).save_pretrained(tmp_path / "model")
    started = []

    def start(*flags, program=("-m", "shmbridge.consumers.grpo")):
        command = [sys.executable, "-u", *program, "--bridge", bridge]
        command += ["--model", str(tmp_path / "model"), "--run-dir", str(tmp_path / "run")]
        command += ["--device", "cpu", "--threads", "1"]
        command += ["--groups", str(GROUPS), "--group-size", "4", "--lr", "1e-3", *flags]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def a_group(first):
    tokens = [[1, 2 + first % 8, 10 + row, 11] for row in range(4)]
    return {"tokens": tokens, "loss_mask": [[0, 0, 1, 1]] * 4, "score": [1.0, 0.0, 0.0, 1.0]}


def put_groups(producer, count):
    for first in range(count):
        producer.put(a_group(first), policy_version=0, timeout_s=10.0)


def read_until(process, text):
    """Return the first line of the learner's output that holds the text."""
    for line in process.stdout:
        if text in line:
            return line
    raise AssertionError(f"the learner ended without {text!r}: {process.stderr.read()}")


def metrics(tmp_path):
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert not any(value for line in lines for name, value in line.items() if name.startswith("rows_differ"))
    return lines


def left_over(bridge):
    """Return the sequences that a next consumer gets."""
    with shmbridge.Consumer(bridge) as consumer:
        records = consumer.poll(max_records=10_000)
        found = [record.meta.sequence for record in records]
        for record in records:
            record.release()
    return found


def published(bridge, folder):
    """Return the version in the weights segment, after comparing its tensors with those of a checkpoint."""
    saved = load_file(folder / "model.safetensors")
    with WeightsReader(bridge) as reader, reader.lease() as lease:
        assert lease.tensors.keys() == saved.keys()
        for name, tensor in saved.items():
            np.testing.assert_array_equal(lease.tensors[name], tensor, err_msg=name)
        return lease.version


@pytest.mark.timeout(180)
def test_a_learner_killed_and_resumed_goes_on_and_no_version_comes_back(bridge, start_learner, tmp_path):
    steps, produced = 12, 200
    with shmbridge.Producer(bridge, env_name="test", lane_bytes="4M") as producer:
        put_groups(producer, produced)
        first = start_learner("--steps", "5000", "--save-every", "3")
        read_until(first, "step    7/")
        first.send_signal(signal.SIGKILL)
        first.wait()
        before = metrics(tmp_path)

        second = start_learner("--steps", str(steps), "--save-every", "3", "--resume")
        begun = read_until(second, "from step ")
        out, err = second.communicate(timeout=120)
        trained = produced - len(left_over(bridge))

    assert second.returncode == 0, err
    resumed_at = int(begun.split("step ")[1].split()[0])
    assert resumed_at % 3 == 0
    assert resumed_at >= 6
    assert f"done: {steps} of {steps}" in out
    every = metrics(tmp_path)
    assert [line["step"] for line in every[len(before) :]] == list(range(resumed_at + 1, steps + 1))
    versions = [line["policy_version"] for line in every]
    assert all(earlier < later for earlier, later in itertools.pairwise(versions))
    saved = sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir())
    assert saved[-1] == f"step-{steps:08d}"
    assert trained == GROUPS * steps, "the groups of steps that no checkpoint had came again"


@pytest.mark.timeout(120)
@pytest.mark.parametrize(("limit", "every"), [(1, 1), pytest.param(1, 2, marks=pytest.mark.long), (3, 3)])
def test_generation_waits_for_training_with_a_limit_of_steps(bridge, start_learner, tmp_path, limit, every):
    """The environment is never further ahead, however fast it is, and none of its groups are discarded, even
    if not every step is published.
    """
    steps, begun, version = 8, 0, {}
    with shmbridge.Producer(bridge, env_name="test", lane_bytes="4M") as producer:
        flags = ("--max-off-policy-steps", str(limit), "--publish-every", str(every))
        learner = start_learner("--steps", str(steps), *flags, "--save-every", "100")
        # a group begun before is of no version
        wait_until(lambda: producer.policy_version >= 0 or learner.poll() is not None, 90)
        while learner.poll() is None:
            try:
                with producer.begin_group(timeout_s=1.0) as ticket:
                    producer.put(a_group(begun), policy_version=ticket.policy_version, timeout_s=10.0)
                    version[begun] = ticket.policy_version
                    begun += 1
            except (shmbridge.NotAdmitted, shmbridge.NoConsumer):
                continue
        assert learner.returncode == 0, learner.stderr.read()
    lines = metrics(tmp_path)
    assert [line["policy_version"] for line in lines] == [step - step % every for step in range(1, steps)] + [
        steps
    ]
    # A producer alone puts in order: step t was trained with the groups from t * GROUPS on, after t optimizer
    # steps.
    old = [place // GROUPS - version[place] for place in range(steps * GROUPS)]
    assert max(old) <= limit
    assert [line["staleness_max"] for line in lines] == [
        max(old[first : first + GROUPS]) for first in range(0, len(old), GROUPS)
    ]
    assert steps * GROUPS <= begun <= (steps + limit + 1) * GROUPS
    assert lines[-1]["bridge/groups_begun_total"] >= steps * GROUPS
    assert lines[-1]["bridge/discards_stale_total"] == 0


@pytest.mark.timeout(120)
def test_a_learner_stopped_while_waiting_saves_and_leaves_the_rest(bridge, start_learner, tmp_path):
    with shmbridge.Producer(bridge, env_name="test", lane_bytes="4M") as producer:
        put_groups(producer, GROUPS * 3 + 1)  # three steps, and half a batch
        learner = start_learner("--steps", "50")
        read_until(learner, "step  3/")
        learner.send_signal(signal.SIGTERM)
        out, err = learner.communicate(timeout=60)

        assert learner.returncode == 128 + signal.SIGTERM, err
        assert "Traceback" not in err
        assert "stopped by SIGTERM" in out
        assert [line["step"] for line in metrics(tmp_path)] == [1, 2, 3]
        assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-00000003"]
        assert len(left_over(bridge)) == 1
        assert published(bridge, tmp_path / "run" / "checkpoints" / "step-00000003") == 3


def test_the_learner_gives_up_when_nobody_comes(start_learner):
    limits = ("--batch-timeout", "0.3", "--batch-attempts", "3", "--batch-retry-delay", "0.1")
    learner = start_learner("--steps", "5", *limits)
    out, err = learner.communicate(timeout=60)
    assert learner.returncode == 3, err
    assert "Traceback" not in err
    said = re.search(
        r"no batch in ([\d.]+) s, 3 of 3 attempts of 0.3 s: no environment has a lane, 0 of 2 groups", err
    )
    assert 1.1 <= float(said[1]) < 30.0  # three attempts, and delays of 0.1 and 0.15
    assert len(re.findall(r"attempt \d of 3, .* no environment has a lane", out)) == 2


def test_half_a_batch_is_waited_for_and_left(bridge, start_learner, tmp_path):
    with shmbridge.Producer(bridge, env_name="test", lane_bytes="4M") as producer:
        put_groups(producer, GROUPS + 1)
        learner = start_learner("--steps", "5", "--max-wait-time", "1.5")
        _, err = learner.communicate(timeout=60)
        assert learner.returncode == 3, err
        assert "1 of 1 lane has a living producer, 1 of 2 groups are there" in err
        assert [line["step"] for line in metrics(tmp_path)] == [1]
        assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-00000001"]
        assert len(left_over(bridge)) == 1


def test_images_end_the_learner_with_their_environments_name(bridge, start_learner, tmp_path):
    with shmbridge.Producer(bridge, env_name="vision", lane_bytes="4M") as producer:
        for first in range(GROUPS):
            producer.put(a_group(first) | {"images": [["data:"]] * 4}, policy_version=0, timeout_s=10.0)
        learner = start_learner("--steps", "1")
        _, err = learner.communicate(timeout=90)
        assert learner.returncode == 1
        assert re.search(r"images, first in group \S+ of environment 'vision'.*--ignore-images", err)
        assert "Traceback" not in err
        learner = start_learner("--steps", "1", "--ignore-images")
        _, err = learner.communicate(timeout=90)
    assert learner.returncode == 0, err


def test_unknown_tokens_end_each_resume_until_it_is_said_to_leave_them_out(bridge, start_learner, tmp_path):
    with shmbridge.Producer(bridge, env_name="klingon", lane_bytes="4M") as producer:
        put_groups(producer, GROUPS)
        producer.put(
            {**a_group(0), "tokens": [[1, 2, 3, 4]] * 3 + [[1, 2, 99, 4]]}, policy_version=0, timeout_s=10.0
        )
        put_groups(producer, 1)
        named = (
            f"token id 99, but the model has 28: environment 'klingon' .* record {GROUPS} of producer "
            ".*--leave-out-unknown-tokens"
        )
        for flags in ((), ("--resume",)):
            learner = start_learner("--steps", "2", *flags)
            _, err = learner.communicate(timeout=90)
            assert learner.returncode == 1
            assert re.search(named, err), err
            assert (
                f"with the same options --resume ends at it again, and `shmbridge clean {bridge} --yes`"
                in err
            )
            assert "Traceback" not in err
        learner = start_learner("--steps", "2", "--resume", "--leave-out-unknown-tokens")
        out, err = learner.communicate(timeout=90)
    assert learner.returncode == 0, err
    last = metrics(tmp_path)[-1]
    assert last["step"] == 2
    assert last["trajectories_unknown_tokens"] == last["atropos/klingon/trajectories_unknown_tokens"] == 1
    assert last["trained_tokens"] == 2 * 2 * 4 - 2
    assert out.count("1 trajectories have a token id that the model does not have") == 1
    assert left_over(bridge) == []


def on_the_page(heading):
    """Return the names in the first column of a table of docs/reference/metrics.md."""
    page = (Path(__file__).parents[3] / "docs" / "reference" / "metrics.md").read_text()
    section = page.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    return set(re.findall(r"^\| `([^`]+)` \|", section, re.MULTILINE))


ASKED_FOR = {
    *("atropos/mean_score", "atropos/countdown/mean_score", "atropos/countdown/mean_advantage"),
    *("atropos/num_environments", "atropos/identical_score_rate", "atropos/fallback_groups_total"),
    *("api_perf/latency_p50_ms", "api_perf/latency_p95_ms", "api_perf/latency_p99_ms"),
    *("bridge/records_total", "bridge/held", "bridge/drops_full_total", "bridge/staleness_p90"),
}


def test_the_file_and_wandb_have_all_names_that_the_page_has(
    bridge, start_learner, tmp_path, monkeypatch, wandb_history
):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.delenv("WANDB_DIR", raising=False)
    with shmbridge.Producer(bridge, env_name="countdown", lane_bytes="4M") as producer:
        put_groups(producer, GROUPS * 2)
        learner = start_learner("--steps", "2", "--wandb")
        _, err = learner.communicate(timeout=90)
    assert learner.returncode == 0, err
    first, second = metrics(tmp_path)
    reasons = r"_(full|cancelled|invalid|timeout|stale|partial|resume|corrupt|failed|late|too_old)_total$"
    generic = {
        re.sub(reasons, "_{reason}_total", name).replace("/countdown/", "/{env_name}/")
        for name in first | second  # who waited for whom is known from the second step on
    }
    generic = {name.replace("{countdown}", "{env_name}") for name in generic}
    generic = {
        re.sub(r"^staleness_hist_(\d|over_7|unknown)$", "staleness_hist_{lag}", name) for name in generic
    }
    # gateways have the one, GPUs the other
    elsewhere = {"api_perf/compression_ratio", "device_memory_peak_gib"}
    assert generic | elsewhere == on_the_page("Names that dashboards know") | on_the_page("The learner's own")
    assert (first["atropos/fallback_groups_total"], second["atropos/fallback_groups_total"]) == (2, 4)
    assert first["atropos/countdown/mean_score"] == first["reward_mean"] == 0.5
    assert first["bridge/records_total"] == GROUPS * 2
    assert 0.0 < first["bridge/lane_fill_frac"] < 1.0
    assert first["bridge/group_wait_s"] > 0.0

    rows, run = wandb_history(tmp_path / "run", runs=1)
    assert [row["_step"] for row in rows] == [1, 2]
    assert run.display_name == bridge
    for row, line in zip(rows, (first, second), strict=True):
        assert row.keys() >= ASKED_FOR
        of_the_logs = re.compile(r"^(wandb|samples)_\w+_total$")  # in the file only
        known = {name: value for name, value in line.items() if value is not None}
        known = {name: value for name, value in known.items() if not of_the_logs.match(name)}
        assert {name: row[name] for name in known} == known
    assert second["wandb_failures_total"] == second["samples_failures_total"] == 0
    assert [any(name.startswith("samples") for name in row) for row in rows] == [True, False]
    lines = (tmp_path / "run" / "samples.jsonl").read_text().splitlines()
    sampled = [json.loads(each) for each in lines]
    assert [(each["step"], each["why"], each["env_name"]) for each in sampled] == [
        (1, "spread", "countdown"),
        (1, "random", "countdown"),
    ]
    (facts,) = json.loads((tmp_path / "run" / "run.json").read_text())["starts"]
    assert facts["shmbridge"] == shmbridge.__version__


BREAKING = Path(__file__).with_name("breaking_learner.py")


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("where", "newest", "said"),
    [
        (
            "memory",
            3,
            r"grpo: error: out of memory in forward or backward of step 4: "
            r"CUDA out of memory\. Tried .* GiB\.; a micro-batch is one row by now; the longest has 4 "
            r"tokens: group .* of environment 'test'; step 3 is saved -> give --gradient-checkpointing "
            r".*, then --resume\n",
        ),
        pytest.param(
            "bug",
            3,
            r"(?s)Traceback .*grpo: error: step 4 broke off: IndexError: too many indices; "
            r"step 3 is saved -> .* --resume\n",
            marks=pytest.mark.long,
        ),
        pytest.param(
            "update",
            2,
            r"grpo: error: out of memory in the update of step 4: .* broke off, so nothing of it "
            r"is saved: step 2 is the "
            r"newest checkpoint -> --param-dtype bfloat16, .*\n",
            marks=pytest.mark.long,
        ),
    ],
)
def test_an_error_in_a_step_saves_the_steps_before_it_and_its_batch_comes_again(
    bridge, start_learner, tmp_path, where, newest, said
):
    with shmbridge.Producer(bridge, env_name="test", lane_bytes="4M") as producer:
        put_groups(producer, 6 * GROUPS)
        flags = ("--steps", "5", "--save-every", "2", "--release-at", "step", "--set-aside-after", "0")
        broken = start_learner(*flags, program=[str(BREAKING), where, "4"])
        _, err = broken.communicate(timeout=90)
        assert broken.returncode == 5, err
        assert re.fullmatch(said, err), err
        saved = sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir())
        assert saved == [f"step-{step:08d}" for step in range(newest - newest % 2, newest + 1)]
        learner = start_learner("--steps", "5", "--save-every", "2", "--resume")
        _, err = learner.communicate(timeout=90)
        assert learner.returncode == 0, err
        left = left_over(bridge)
    steps = metrics(tmp_path)
    assert [line["step"] for line in steps] == [1, 2, 3, *range(newest + 1, 6)]
    assert steps[-2 if newest == 3 else -3]["trajectories_redelivered"] == 4 * GROUPS
    # Records that a step released before the next update broke are not redelivered, as after a kill.
    trained = 5 if newest == 3 else 6
    assert len(left) == 6 * GROUPS - trained * GROUPS


POISON = {"tokens": [[1, 22, 23]] * 4, "loss_mask": [[0, 0, 1]] * 4, "score": [1.0, 0.0, 0.0, 1.0]}


@pytest.mark.timeout(180)
@pytest.mark.parametrize("how", ["poison", pytest.param("abort", marks=pytest.mark.long)])
def test_a_group_that_breaks_every_step_is_set_aside_and_the_run_goes_on(
    bridge, start_learner, tmp_path, how
):
    flags = ("--groups", "8", "--steps", "50", "--save-every", "1", "--max-wait-time", "4")
    with shmbridge.Producer(bridge, env_name="test", lane_bytes="4M") as producer:
        put_groups(producer, 2)
        producer.put(POISON, policy_version=0)
        put_groups(producer, 21)
        ends = []
        while not ends or ends[-1] == -signal.SIGABRT:
            resume = ("--resume", "--from-scratch") if ends else ()
            learner = start_learner(*flags, *resume, program=[str(BREAKING), how, "22"])
            _, err = learner.communicate(timeout=90)
            ends.append(learner.returncode)
        assert ends[-1] == 3, err  # nothing came any more
        assert (len(ends) > 1) == (how == "abort")
        trained = sum(line["groups"] for line in metrics(tmp_path))
        (aside,) = read_archive(tmp_path / "run" / "set_aside")
        assert aside.sequence == 2
        left = left_over(bridge)
    assert trained + len(left) == 23
    assert trained >= 16
    assert replay(tmp_path / "run" / "set_aside", bridge).records == 1


@pytest.mark.timeout(120)
@pytest.mark.parametrize(("room", "ends"), [(20, 0), (3, 5)])
def test_out_of_memory_halves_the_micro_batches_down_to_the_longest_row(
    bridge, start_learner, tmp_path, room, ends
):
    with shmbridge.Producer(bridge, env_name="test", lane_bytes="4M") as producer:
        put_groups(producer, GROUPS)
        learner = start_learner("--steps", "1", program=[str(BREAKING), "large", str(room)])
        out, err = learner.communicate(timeout=90)
    assert learner.returncode == ends, err
    halved = re.findall(r"-> micro-batches of (\d+) tokens from here on; the longest row has 4: group", out)
    assert halved == (["16"] if ends == 0 else ["16", "8", "4"])
    assert left_over(bridge) == ([] if ends == 0 else [0, 1])
    assert not (tmp_path / "run" / "set_aside").exists()
