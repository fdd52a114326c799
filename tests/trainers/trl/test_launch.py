"""TRL's own trainer under `shmbridge launch`, killed twice: before its first checkpoint, and after it."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

import shmbridge
from shmbridge.testing import json_lines
from tests.trainers.trl.target_groups import group

ROOT = Path(__file__).parents[3]
STEPS = 14


@pytest.mark.timeout(400)
@pytest.mark.long  # with our own trainer: tests/transport/launch/test_trainer.py, in every run
def test_a_launch_starts_a_killed_trainer_again_and_no_group_is_lost(bridge, tiny, tmp_path):
    run_dir = tmp_path / "run"
    document = {
        "bridge": bridge,
        "run_dir": str(run_dir),
        "trainer": {
            "python": sys.executable,
            "command": f"examples/trl_train.py {{bridge}} {tiny} {{run_dir}}/out --cpu --steps {STEPS} "
            "--rows 4 --group-size 4 --save-every 5 --max-staleness 99",
            "again": "--from-bridge",
            "cwd": str(ROOT),
            "env": {"OMP_NUM_THREADS": 1, "PYTHONPATH": str(ROOT)},
            "restart": {"first_delay": 0.1},
        },
    }
    (tmp_path / "launch.yaml").write_text(yaml.safe_dump(document))

    def events(event):
        return [each for each in json_lines(run_dir / "events.jsonl") if each["event"] == event]

    with shmbridge.Producer(bridge, lane_bytes="2M") as producer, (tmp_path / "output").open("w+") as output:

        def put(first, last):
            for number in range(first, last):
                producer.put(group(number), group_id=f"group-{number}")

        def until(condition):
            deadline = time.monotonic() + 120
            while not condition():
                assert not events("failed"), events("failed")
                assert time.monotonic() < deadline, (run_dir / "logs/trainer.log").read_text()
                time.sleep(0.05)

        def kill():
            (pid,) = (info.consumer_pid for info in shmbridge.list_bridges() if info.name == bridge)
            ups = len(events("up"))
            os.kill(pid, signal.SIGKILL)
            until(lambda: len(events("up")) > ups)

        process = subprocess.Popen(
            [sys.executable, "-m", "shmbridge.cli", "launch", str(tmp_path / "launch.yaml")],
            stdout=output,
            stderr=output,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
        )
        try:
            put(0, 3)  # then it waits
            until(lambda: producer.policy_version == 3)
            kill()
            put(3, 7)
            until(lambda: producer.stats()["held"] == 2)  # the first checkpoint, of five groups
            kill()
            put(7, STEPS)
            assert process.wait(150) == 0, (run_dir / "logs/trainer.log").read_text()
        finally:
            process.kill()
            process.wait(30)
        # as many steps as groups, and none is left: each was trained once in the model that came of it
        assert producer.stats()["held"] == 0
    text = (run_dir / "logs/trainer.log").read_text()
    assert len(events("ended")) == 2
    assert re.findall(r"begins with version (\d+) of the bridge", text)[0] == "3"
    assert "discarded" not in text
    assert (run_dir / f"out/checkpoint-{STEPS}").is_dir()
