"""A worker of ROLL that is SIGKILLed between batch and step: what no step trained comes again."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import shmbridge

ROOT = Path(__file__).parents[3]


def next_consumer(bridge: str, timeout_s: float = 60.0) -> shmbridge.Consumer:
    """Returns the next hub, once the kernel has ended the one before."""
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            return shmbridge.Consumer(bridge)
        except shmbridge.ConsumerTaken:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.02)


@pytest.mark.timeout(120)
def test_groups_not_trained_come_again_and_trained_ones_do_not(known, bridge):
    groups, producer = known
    command = [sys.executable, "-m", "tests.trainers.roll.worker_to_kill", bridge]
    worker = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    try:
        steps = []
        for line in worker.stdout:
            if line.startswith("PUT"):
                steps.append(line.split()[2:])
            if len(steps) == 2:
                break
        assert steps == [["known-3-0", "known-3-1"], ["known-3-2", "known-3-3"]]
        os.kill(worker.pid, signal.SIGKILL)
    finally:
        worker.kill()
        worker.wait(30)
        worker.stdout.close()
    with next_consumer(bridge) as again:
        left = again.poll()
        assert [(record.meta.group_id, record.meta.redelivered) for record in left] == [
            ("known-3-2", True), ("known-3-3", True), ("known-3-3", True), ("known-3-4", False)
        ]  # fmt: skip
        for record in left:
            record.release()
        stats = again.stats()
    assert producer.stats()["records_total"] == sum(len(group.fragments) for group in groups) == 6
    assert stats["held"] == 0
