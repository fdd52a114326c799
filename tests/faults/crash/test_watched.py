"""A reader of /proc/<pid>/smaps keeps that process' memory during the read, and with it its locks: the
successor waits.
"""

import contextlib
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

import shmbridge
from shmbridge.segments import lane_names, remove_lane
from shmbridge.weights import WeightsReader, WeightsWriter

ROUNDS = 8
VICTIM = """
import sys
import numpy as np, shmbridge
from shmbridge.weights import WeightsWriter
role, bridge = sys.argv[1:]
much = np.ones(1 << 26, np.uint8)  # a look at all of it takes its time
if role == "hub":
    kept = shmbridge.Consumer(bridge)
elif role == "producer":
    kept = shmbridge.Producer(bridge, lane_bytes="64K")
else:
    kept = WeightsWriter(bridge)
    kept.publish((kept.last_version or 0) + 1, [("w", np.ones(9, np.float32))])
print("ready", flush=True)
sys.stdin.read()
"""


@contextlib.contextmanager
def monitored(pid: int) -> Iterator[None]:
    """Two threads look at a process' memory all the time; each has done so once before."""
    over, begun = threading.Event(), threading.Barrier(3)

    def look() -> None:
        with contextlib.suppress(OSError):  # it is gone
            Path(f"/proc/{pid}/smaps").read_bytes()
            begun.wait(20)
            while not over.is_set():
                Path(f"/proc/{pid}/smaps").read_bytes()

    threads = [threading.Thread(target=look) for _ in range(2)]
    for thread in threads:
        thread.start()
    begun.wait(20)
    try:
        yield
    finally:
        over.set()
        for thread in threads:
            thread.join()


@pytest.mark.parametrize("role", ["hub", "producer", "weights writer"])
def test_the_successor_of_one_killed_under_a_monitor_is_not_refused(role, bridge, until):
    with WeightsReader(bridge):  # as long as the bridge exists, so do the dead process' segments
        for _ in range(ROUNDS):
            with subprocess.Popen(
                [sys.executable, "-c", VICTIM, role, bridge], stdin=subprocess.PIPE, stdout=subprocess.PIPE
            ) as victim:
                assert victim.stdout.readline() == b"ready\n"
                with monitored(victim.pid):
                    victim.kill()
                    victim.wait()
                    succeed(role, bridge, until)


def succeed(role: str, bridge: str, until) -> None:
    """Does what no process can do while the killed one counts as alive."""
    if role == "hub":
        shmbridge.Consumer(bridge).close()
    elif role == "producer":
        (lane,) = lane_names(bridge)
        until(lambda: remove_lane(lane)[0])
    else:
        WeightsWriter(bridge).close()
