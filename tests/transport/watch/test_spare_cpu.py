"""Observers that copy records run on CPU time that nobody else wants."""

import os
import subprocess
import sys

import pytest

from shmbridge.testing import wait_until


@pytest.mark.parametrize("command", [["tail", "BRIDGE"], ["record", "BRIDGE", "--out", "FOLDER"]])
def test_a_command_that_copies_records_takes_only_spare_cpu(bridge, make_producer, tmp_path, command):
    make_producer()
    words = {"BRIDGE": bridge, "FOLDER": str(tmp_path)}
    arguments = [words.get(each, each) for each in command]
    with subprocess.Popen(
        [sys.executable, "-m", "shmbridge.cli", *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as observing:
        try:
            wait_until(lambda: os.sched_getscheduler(observing.pid) == os.SCHED_IDLE, 20)
        finally:
            observing.kill()


def test_what_the_kernel_does_not_allow_is_no_error(child):
    child(
        """
import os
from pathlib import Path
from shmbridge.watch import spare_cpu
def refused(*_): raise PermissionError(1, "no")
os.sched_setscheduler, spare_cpu._GROUP = refused, Path("/nowhere/autogroup")
spare_cpu.use_only_spare_cpu()
print("ready", flush=True)
"""
    )
