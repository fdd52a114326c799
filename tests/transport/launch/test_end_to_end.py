"""The example's file with the real programs: policy server, learner, two Atropos environments.

From the first process to status 0.
"""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import shmbridge
from shmbridge.cli.log import stamp_of
from shmbridge.consumers.learner.config import flags
from shmbridge.testing import json_lines

pytestmark = pytest.mark.timeout(300)

pytest.importorskip("torch")
pytest.importorskip("atroposlib")
yaml = pytest.importorskip("yaml")

ROOT = Path(__file__).parents[3]
STEPS = 6


@pytest.fixture
def config(tmp_path, bridge, tiny):
    """The example, for a few steps, in a folder and on a bridge of its own."""
    document = yaml.safe_load((ROOT / "examples/launch.yaml").read_text().replace("runs/tiny", str(tiny)))
    document |= {"bridge": bridge, "run_dir": str(tmp_path / "run")}
    document["learner"]["steps"] = STEPS
    document["learner"]["options"] |= {"groups": 4, "save_every": 1}
    for environment in document["environments"]:
        environment["script"] = str(ROOT / environment["script"])
    if "--batch-timeout" in flags.parser().format_help():
        document["trainer"] = {"atropos": {"timeout": 60, "max_wait_time": 240}}
    path = tmp_path / "launch.yaml"
    path.write_text(yaml.safe_dump(document))
    return path


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    import importlib.util

    spec = importlib.util.spec_from_file_location("tiny_model", ROOT / "examples" / "tiny_model.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    folder = tmp_path_factory.mktemp("tiny")
    module.build(folder, seed=1)
    return folder


def steps_in(run_dir):
    return [line["step"] for line in json_lines(run_dir / "metrics.jsonl")]


def test_a_launch_goes_from_a_file_to_a_trained_model_over_a_killed_learner(launch, config, bridge):
    launch.command(sys.executable, "-m", "shmbridge.cli", "launch", str(config))
    launch.until(lambda: launch.said("failed") or len(steps_in(launch.run_dir)) >= 2)
    (killed,) = (info.consumer_pid for info in shmbridge.list_bridges() if info.name == bridge)
    os.kill(killed, signal.SIGKILL)
    assert launch.process.wait(200) == 0, launch.errors

    steps = steps_in(launch.run_dir)
    assert steps == sorted(set(steps)), "a step was trained again: it did not resume from its checkpoint"
    assert (steps[:2], steps[-1]) == ([1, 2], STEPS)
    up = [each["service"] for each in launch.events if each["event"] == "up" and "service" in each]
    assert up[:2] == ["policy_server", "learner"]
    assert sorted(up[2:]) == ["echo_letters_env", "larger_digit_env", "learner"]
    (ended,) = launch.said("ended", "learner")
    assert (
        "ended with status 137 (SIGKILL); starting again in 0.5 s with --resume --from-bridge"
        in ended["text"]
    )
    assert not launch.said("failed")
    assert not launch.said("kill")
    assert sorted(each.name for each in (launch.run_dir / "logs").iterdir()) == [
        "echo_letters_env.log",
        "larger_digit_env.log",
        "learner.log",
        "policy_server.log",
    ]
    for log in (launch.run_dir / "logs").iterdir():
        text = log.read_text()
        assert "Traceback" not in text, text
        assert [line for line in text.splitlines() if not stamp_of(line)] == [], log.name
        assert {stamp_of(line)["role"] for line in text.splitlines()} == {log.stem}
    assert launch.said("step")[-1]["text"].startswith(f"learner: step {STEPS}/{STEPS}  reward ")
    assert (launch.run_dir / "checkpoints").is_dir()
    assert json.loads((launch.run_dir / "config.json").read_text())["learner"]["steps"] == STEPS
    launch.until_nothing_lives()
    again = subprocess.run(
        [sys.executable, "-m", "shmbridge.cli", "launch", str(config)], capture_output=True, text=True
    )
    assert again.returncode == 2
    assert f"holds a run of {STEPS} steps, and {STEPS} are asked for -> raise learner.steps" in again.stderr
    assert not shmbridge.clean(bridge, dry_run=False).kept
