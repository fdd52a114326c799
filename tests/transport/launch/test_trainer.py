"""`trainer.command`: a trainer that is no program of ours, which is the hub, under the real supervisor.

tests/trainers/trl/test_launch.py has TRL's in its place.
"""

import contextlib
import json
import os
import signal
import sys
from pathlib import Path

import pytest

import shmbridge

yaml = pytest.importorskip("yaml")

TRAINER = Path(__file__).with_name("counting_trainer.py")
STEPS = 40


@pytest.fixture
def file(tmp_path, bridge):
    """A launch file of a trainer alone; the test itself is the environment."""
    path = tmp_path / "launch.yaml"
    path.write_text(
        yaml.safe_dump(
            {
                "bridge": bridge,
                "run_dir": str(tmp_path / "run"),
                "trainer": {
                    "python": sys.executable,
                    "command": [str(TRAINER), "{bridge}", "{run_dir}/out", STEPS],
                    "restart": {"first_delay": 0.05},
                    "ready_timeout": 60,
                },
            }
        )
    )
    return path


@contextlib.contextmanager
def environment(bridge, number):
    """Yields the names of so many groups, which are in a lane."""
    names = [f"group-{place}" for place in range(number)]
    with shmbridge.Producer(bridge, env_name="here", lane_bytes="2M") as producer:
        for name in names:
            group = {"tokens": [[1, 2, 3]] * 2, "prompt_length": [1, 1], "score": [0.0, 1.0]}
            producer.put(group, group_id=name)
        yield names


def started(launch, file):
    return launch.command(sys.executable, "-m", "shmbridge.cli", "launch", str(file), "--json")


def saved(launch):
    return sorted(int(each.name[5:]) for each in (launch.run_dir / "out").glob("step-*"))


def test_a_killed_trainer_is_started_again_and_nothing_is_lost_or_trained_twice(launch, file, bridge):
    with environment(bridge, 2 * STEPS) as groups:  # the run needs them all
        started(launch, file)
        for ups, at in ((2, 6), (3, 16)):
            launch.until(lambda at=at: launch.said("failed") or (saved(launch) or [0])[-1] >= at)
            (pid,) = (info.consumer_pid for info in shmbridge.list_bridges() if info.name == bridge)
            os.kill(pid, signal.SIGKILL)
            launch.until(lambda ups=ups: len(launch.said("up", "trainer")) == ups)
        assert launch.wait() == 0, launch.errors

    model = json.loads((launch.run_dir / "out" / f"step-{STEPS}" / "model.json").read_text())
    assert sorted(model) == sorted(groups)
    ends = [each["text"] for each in launch.said("ended", "trainer")]
    assert ends[0].startswith("trainer: ended with status 137 (SIGKILL); starting again in 0.05 s")
    assert len(ends) == 2
    assert [each["service"] for each in launch.said("done")] == ["trainer"]
    log = (launch.run_dir / "logs" / "trainer.log").read_text()
    assert log.count("begins at step ") == 3
    assert log.count("begins at step 0") == 1
    launch.until_nothing_lives()


def test_a_stop_lets_the_trainer_end_in_order(launch, file, bridge):
    with environment(bridge, STEPS):  # then it waits for more
        started(launch, file)
        launch.until(lambda: launch.said("failed") or saved(launch))
        launch.send(signal.SIGTERM)
        assert launch.wait() == 143
    assert "drained" in (launch.run_dir / "logs" / "trainer.log").read_text()
    assert [each["status"] for each in launch.said("stopped", "trainer")] == [0]
    assert not launch.said("kill")
    launch.until_nothing_lives()
