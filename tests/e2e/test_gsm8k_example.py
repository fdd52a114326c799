"""The GSM8K example without its downloads: its environment, learner and file with small sums and a tiny
model; its rewards.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import shmbridge

pytestmark = pytest.mark.timeout(300)

pytest.importorskip("torch")
pytest.importorskip("atroposlib")
pytest.importorskip("yaml")

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "gsm8k"
ENV = os.environ | {
    "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
    "OMP_NUM_THREADS": "1",
}
STEPS = 4


def run(*words, within_s=60):
    return subprocess.run(
        [sys.executable, *map(str, words)],
        cwd=ROOT,
        env=ENV,
        capture_output=True,
        text=True,
        timeout=within_s,
        check=False,
    )


@pytest.fixture(scope="module")
def gsm8k_env():
    spec = importlib.util.spec_from_file_location("gsm8k_env", EXAMPLE / "gsm8k_env.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("engine", ["policy_server", "vllm"])
def test_the_real_file_is_one_that_launch_takes(tmp_path, engine):
    text = (EXAMPLE / "launch.yaml").read_text()
    if engine == "policy_server":  # as its comment says
        text = re.sub(
            r"^#: ", "", re.sub(r"^vllm:.*\n(  .*\n)+", "", text, flags=re.MULTILINE), flags=re.MULTILINE
        )
    # vLLM lives apart; a dry run starts nothing
    text = text.replace(".venvs/vllm/bin/python", sys.executable)
    path = tmp_path / "launch.yaml"
    path.write_text(text)
    shown = run("-m", "shmbridge.cli", "launch", path, "--dry-run")
    assert shown.returncode == 0, shown.stderr
    server = {
        "policy_server": "shmbridge.consumers.policy_server --bridge gsm8k",
        "vllm": "vllm.entrypoints.openai.api_server",
    }[engine]
    assert f"-m {server} --model Qwen/Qwen2.5-0.5B-Instruct" in shown.stdout
    follows = '--additional-config {"shmbridge": {"bridge": "gsm8k"'
    assert (follows in shown.stdout.replace("'", "")) == (engine == "vllm")
    assert "-m shmbridge.consumers.grpo --bridge gsm8k --model Qwen/Qwen2.5-0.5B-Instruct" in shown.stdout
    assert shown.stdout.count("examples/gsm8k/gsm8k_env.py serve") == 2
    assert shown.stdout.count("--openai.base_url=http://127.0.0.1:8001/v1") == 2


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("stand-in") / f"gsm8k-{os.getpid()}"
    made = run(EXAMPLE / "stand_in.py", folder, "--steps", STEPS)
    assert made.returncode == 0, made.stderr
    return folder


def test_the_example_trains_a_model_from_stand_ins(folder):
    ran = run("-m", "shmbridge.cli", "launch", folder / "launch.yaml", within_s=240)
    shmbridge.clean(f"stand-in-{folder.name}", dry_run=False)
    assert ran.returncode == 0, ran.stderr

    steps = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in steps] == list(range(1, STEPS + 1))
    assert all(line["groups"] == 8 and line["trajectories"] == 64 for line in steps)
    assert "atropos/gsm8k/mean_score" in steps[0]
    groups = [json.loads(line) for line in (folder / "rewards.jsonl").read_text().splitlines()]
    assert len(groups) >= 8 * STEPS
    assert all(0.0 <= group["right"] <= group["mean"] <= 1.0 and group["n"] == 8 for group in groups)
    assert (folder / "run" / "checkpoints" / f"step-{STEPS:08d}").is_dir()


def test_stand_ins_have_the_form_of_the_data_set(folder, gsm8k_env):
    train, test = (gsm8k_env.problems(str(folder / "data"), split) for split in ("train", "test"))
    assert (len(train), len(test)) == (400, 40)
    for problem in [*train, *test]:
        first, second = problem["question"].removesuffix("?").split("+")
        assert gsm8k_env.number_of(problem["answer"]) == int(first) + int(second)


# From the data set's own form: a worked answer with calculator marks, and the number behind ####.
WORKED = "Natalia sold 48/2 = <<48/2=24>>24 clips in May.\nAltogether 48+24 = <<48+24=72>>72 clips.\n#### 72"


@pytest.mark.parametrize(
    ("said", "right", "score"),
    [
        ("48 and 24 make 72", True, 1.0),
        ("#### 72", True, 1.0),
        ("#### 72.0\nThat is all, 100 %.", True, 1.0),
        ("It is 72, so #### 24", False, 0.1),
        ("#### 71", False, 0.1),
        ("the answer is 24", False, 0.0),
        ("#### seventy-two", False, 0.0),
        ("no idea", False, 0.0),
        ("", False, 0.0),
    ],
)
def test_an_answer_is_right_by_its_number(gsm8k_env, said, right, score):
    assert gsm8k_env.is_right(said, WORKED) == right
    assert gsm8k_env.score(said, WORKED, 0.1) == score


def test_numbers_may_have_thousands_separators_and_signs(gsm8k_env):
    assert gsm8k_env.number_of("#### 1,234,567") == 1234567.0
    assert gsm8k_env.number_of("it falls to -12.5 degrees") == -12.5
