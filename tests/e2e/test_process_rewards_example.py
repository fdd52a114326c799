"""The example of rewards of steps: the groups of its environment, and a learner that learns faster with them
over a real bridge.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import shmbridge

pytestmark = pytest.mark.timeout(300)

pytest.importorskip("torch")
pytest.importorskip("transformers")

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "process_rewards"
GROUPS = 320  # of a short run


def module(path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    found = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = found  # for its dataclasses
    spec.loader.exec_module(found)
    return found


@pytest.fixture(scope="module")
def environment():
    return module(EXAMPLE / "spell_back_env.py")


@pytest.fixture
def answers():
    """Answers to 1, 2, ... 12: right, one letter wrong, ended after two."""
    right = list(range(1, 13))
    said = [right, [*right[:4], 99, *right[5:]], [1, 99]]
    return [SimpleNamespace(prompt=[7, 8, 9], token_ids=ids, logprobs=[-0.5] * len(ids)) for ids in said]


def test_each_step_has_its_reward_and_its_end(environment, answers, tmp_path):
    columns, right = environment.group(answers, list(range(1, 13)), "steps")
    assert columns["step_rewards"] == [[1.0] * 12, [*[1.0] * 4, 0.0, *[1.0] * 7], [1.0, 0.0]]
    assert columns["step_ends"] == [list(range(4, 16)), list(range(4, 16)), [4, 5]]
    assert columns["score"] == [1.0, 0.0, 0.0]
    assert [environment.exact(flags) for flags in right] == [True, False, False]
    bridge = f"prm-test-{os.getpid()}"
    with shmbridge.Consumer(bridge) as consumer, shmbridge.Producer(bridge, lane_bytes="1M") as producer:
        producer.put(columns)
        with consumer.get(timeout_s=5) as record:
            assert record["step_ends"][2].tolist() == [4, 5]
            assert record["step_rewards"][1].tolist() == columns["step_rewards"][1]
    shmbridge.clean(bridge, dry_run=False)


@pytest.mark.parametrize(
    ("rewards", "scores"), [("graded", [1.0, 11 / 12, 1 / 12]), ("binary", [1.0, 0.0, 0.0])]
)
def test_an_outcome_is_one_number(environment, answers, rewards, scores):
    columns, _ = environment.group(answers, list(range(1, 13)), rewards)
    assert columns["score"] == pytest.approx(scores)
    assert not {"step_rewards", "step_ends"} & columns.keys()


def test_questions_repeat_themselves_by_seed(environment):
    first, again, other = environment.questions(1), environment.questions(1), environment.questions(2)
    asked = [next(first) for _ in range(5)]
    assert asked == [next(again) for _ in range(5)]
    assert asked != [next(other) for _ in range(5)]
    assert all(len(question) == 12 and set(question) <= set("abcde") for question in asked)


@pytest.mark.long
def test_a_learner_with_rewards_of_steps_learns_in_fewer_groups(tmp_path):
    quiet = {
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
        "OMP_NUM_THREADS": "1",
    }
    command = [
        sys.executable,
        str(EXAMPLE / "compare.py"),
        "--variants",
        "steps",
        "graded",
        "--seeds",
        "1",
        "--jobs",
        "2",
    ]
    command += ["--limit", str(GROUPS), "--run-dir", str(tmp_path / "run")]
    ran = subprocess.run(
        command, env=os.environ | quiet, capture_output=True, text=True, timeout=280, check=False
    )
    assert ran.returncode == 0, ran.stderr
    assert f"not within {GROUPS} groups" in ran.stdout
    curves = {
        result["variant"]: result["curve"]
        for result in json.loads((tmp_path / "run" / "results.json").read_text())
    }
    right = {name: sum(point["right"] for point in curve[-4:]) / 4 for name, curve in curves.items()}
    assert right["steps"] > right["graded"] + 0.05
    assert curves["graded"][-1]["groups"] == GROUPS
