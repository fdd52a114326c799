"""A hub that records and releases until it is killed; one is forked for each line `folder rotate_bytes`.

    python recording_hub.py BRIDGE

Prints the pid of each. Imports once, so that a round costs no start of Python.
"""

import os
import random
import signal
import sys

import pyarrow.parquet  # noqa: F401  # before the forks

import shmbridge
from shmbridge.archive.recorder import Recorder


def record_until_killed(bridge: str, folder: str, rotate_bytes: int) -> None:
    """Takes in every way, holds some, releases the rest in any order."""
    mixed, held = random.Random(os.getpid()), []
    consumer = shmbridge.Consumer(bridge, tap=Recorder(folder, rotate_bytes=rotate_bytes))
    while True:
        held += [consumer.get()] if mixed.random() < 0.3 else consumer.poll(mixed.randrange(1, 9))
        mixed.shuffle(held)
        while len(held) > 5:
            held.pop().release()


def main(bridge: str) -> None:
    """Forks a hub for each line."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    for line in sys.stdin:
        folder, rotate_bytes = line.split()
        if (pid := os.fork()) == 0:
            try:
                record_until_killed(bridge, folder, int(rotate_bytes))
            finally:
                os._exit(1)
        print(pid, flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
