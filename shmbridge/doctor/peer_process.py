"""The other process of `peer.py`: locks a byte, sleeps until it is rung for, then stays until it is killed.

    python -m shmbridge.doctor.peer_process FD

It prints `locked`, or why not; `asleep`; and `woken` or `late` with the time.
"""

import os
import sys
import time

from shmbridge._ext.header import Descriptor, Mapping
from shmbridge._ext.weights import Versions
from shmbridge.doctor.peer import BYTE, BYTES
from shmbridge.segments import lock_exclusive

_SLEEP_NS = 2_000_000_000


def main(fd: int) -> int:
    """Plays the other process on the file that `fd` is open on; ends with its standard input."""
    # Opened again: a lock belongs to an open file, and that of `fd` is the other side's.
    file = Descriptor(os.open(f"/proc/self/fd/{fd}", os.O_RDWR | os.O_CLOEXEC))
    try:
        print("locked" if lock_exclusive(file.fd, BYTE) else "somebody has it", flush=True)
    except OSError as wrong:
        print(wrong.strerror, flush=True)
    words = Versions(Mapping(file, BYTES))
    seen, end = words.bell, time.monotonic_ns() + _SLEEP_NS
    print("asleep", flush=True)
    while words.bell == seen and (left := end - time.monotonic_ns()) > 0:
        words.wait_bell(seen, left)
    now = time.monotonic_ns()
    print("woken" if words.bell != seen and now < end else "late", now, flush=True)
    sys.stdin.read()
    return 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
