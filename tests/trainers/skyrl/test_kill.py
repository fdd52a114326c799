"""SIGKILL of SkyRL's trainer: what was not trained comes again, what was trained does not."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import shmbridge
from shmbridge.testing.known_groups import known_groups

PROGRAM = Path(__file__).with_name("dying_trainer.py")


@pytest.mark.parametrize(("where", "again"), [("before", ["0", "1"]), ("after", [])])
def test_a_killed_trainer(where, again, bridge, tiny, producer):
    groups = known_groups(vocabulary=28)[:3]
    for group in groups:
        group.put(producer)
    trainer = subprocess.Popen(
        [sys.executable, str(PROGRAM), bridge, str(tiny), where],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    try:
        said = []
        for line in trainer.stdout:
            said.append(line)
            if "STANDS STILL" in line:
                break
        else:
            raise AssertionError("".join(said[-30:]))
        os.kill(trainer.pid, signal.SIGKILL)
        assert trainer.wait(30) == -signal.SIGKILL
    finally:
        trainer.kill()
        trainer.wait()
    with shmbridge.Consumer(bridge) as following:
        records = [following.get(timeout_s=10) for _ in range(len(again) + 1)]
        redelivered = [record.meta.group_id for record in records if record.meta.redelivered]
        assert redelivered == [f"known-3-{number}" for number in again]
        assert not records[-1].meta.redelivered  # the third group was never taken
        for record in records:
            record.release()
