"""What the kernel, a sandbox or a library refuses is named as what it is, in an error of ours."""

import os
import platform
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import shmbridge

ROOT = str(Path(shmbridge.__file__).parents[1])
CALLS = {"x86_64": {"fallocate": 285, "fcntl": 72}, "aarch64": {"fallocate": 47, "fcntl": 25}}
GROUP = "{'tokens': [[1, 2]], 'loss_mask': [[0, 1]]}"
# refuse(call, errno, at_least): the call fails from now on where its second argument is at least so much
REFUSE = """
import ctypes, os, sys
short, byte, pointer = ctypes.c_ushort, ctypes.c_ubyte, ctypes.POINTER
class F(ctypes.Structure):
    _fields_ = [("code", short), ("jt", byte), ("jf", byte), ("k", ctypes.c_uint)]
class P(ctypes.Structure): _fields_ = [("len", short), ("filter", pointer(F))]
def refuse(call, errno, at_least):
    steps = (F * 6)(F(0x20, 0, 0, 0), F(0x15, 0, 3, call), F(0x20, 0, 0, 24), F(0x35, 0, 1, at_least),
                    F(0x06, 0, 0, 0x50000 | errno), F(0x06, 0, 0, 0x7FFF0000))
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.prctl(38, 1, 0, 0, 0) == 0 and libc.prctl(22, 2, ctypes.byref(P(6, steps)), 0, 0) == 0
import shmbridge
bridge = sys.argv[1]
"""


@pytest.fixture
def outcome(bridge):
    """Runs code in a child; returns the last line it wrote, an error as `class: text`."""

    def run(code: str, **options: object) -> str:
        done = subprocess.run(
            [sys.executable, "-c", REFUSE + textwrap.dedent(code), bridge],
            env={**os.environ, "PYTHONPATH": ROOT},
            capture_output=True,
            text=True,
            timeout=60,
            **options,  # type: ignore[call-overload]
        )
        return (done.stdout + done.stderr).strip().splitlines()[-1]

    return run


ENDS = {
    "producer": "shmbridge.Producer(bridge, lane_bytes='64K')",
    "consumer": "shmbridge.Consumer(bridge)",
    "weights": "__import__('shmbridge.weights').weights.WeightsWriter(bridge)",
}


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize(
    ("call", "errno", "at_least"),
    [
        ("fallocate", 5, 0),
        ("fallocate", 22, 0),
        ("fallocate", 12, 0),
        ("fcntl", 1, 36),  # EPERM for locks of open file descriptions
        ("fcntl", 22, 36),
        ("fcntl", 37, 36),  # ENOLCK
    ],
)
@pytest.mark.skipif(platform.machine() not in CALLS, reason="system call numbers of x86_64 and aarch64")
def test_a_refused_call_is_named(end, call, errno, at_least, outcome) -> None:
    number = CALLS[platform.machine()][call]
    line = outcome(f"refuse({number}, {errno}, {at_least})\n{ENDS[end]}")
    if errno == 12:
        assert re.search("ShmTooSmall.*the kernel has no memory left", line)
    else:
        assert re.search(rf"ShmUnavailable: \[SB104\].*{call}.*{os.strerror(errno)}", line), line
    assert not re.search("free|shm-size", line)


def test_a_full_mount_is_still_a_full_mount(outcome) -> None:
    if platform.machine() in CALLS:
        line = outcome(f"refuse({CALLS[platform.machine()]['fallocate']}, 28, 0)\n{ENDS['consumer']}")
        assert re.search("ShmTooSmall.*--shm-size", line)


def test_without_proc_all_works(outcome) -> None:
    """A chroot often has none: pids mean nothing then, and locks still prove deaths."""
    code = f"""
    real = os.stat
    def stat(path, *rest, **named):
        if str(path).startswith("/proc"): raise FileNotFoundError(path)
        return real(path, *rest, **named)
    os.stat = stat
    consumer = shmbridge.Consumer(bridge)
    producer = shmbridge.Producer(bridge, lane_bytes="64K")
    producer.put({GROUP})
    with consumer.get(5) as record: tokens = record.tokens.tolist()
    producer.close()
    print(tokens, bridge in [each.name for each in shmbridge.list_bridges()])
    """
    assert outcome(code) == "[[1, 2]] True"


def test_descriptors_closed_under_a_producer(outcome) -> None:
    """A daemon's start closes them; the lane's lock goes, too, so nothing may be put any more."""
    code = f"""
    producer = shmbridge.Producer(bridge, lane_bytes="64K")
    producer.put({GROUP})
    os.closerange(3, 4096)
    refused = []
    while len(refused) < 2:
        try:
            producer.put({GROUP}, timeout_s=1) if not refused else producer.close()
        except shmbridge.ShmBridgeError as wrong:
            refused.append(type(wrong).__name__ + ": " + wrong.message)
    producer.close()  # idempotent, and silent at exit
    print(refused[0])
    """
    line = outcome(code)
    assert re.match("Closed: the descriptor of .* was closed by something else", line)


def test_a_producer_needs_neither_epoll_nor_threads(outcome) -> None:
    """gevent's and eventlet's patches take both away."""
    code = f"""
    import select, _thread, queue
    del select.epoll
    def start_new_thread(*_): raise AssertionError("a thread was started")
    start_new_thread.__module__ = "eventlet.green.thread"
    _thread.start_new_thread = start_new_thread
    with shmbridge.Producer(bridge, lane_bytes="64K") as producer: print("put", producer.put({GROUP}))
    """
    assert outcome(code) == "put 0"


@pytest.mark.parametrize("replaced", ["_thread.start_new_thread", "queue.SimpleQueue"])
def test_a_consumer_among_greenlets_names_who_replaced_threads(replaced, outcome) -> None:
    code = f"""
    import _thread, queue
    class Green({"queue.SimpleQueue" if "queue" in replaced else "object"}): __module__ = "gevent._queue"
    {replaced} = Green
    shmbridge.Consumer(bridge)
    """
    line = outcome(code)
    assert re.search(r"ProcessLimit: \[SB103\].*gevent has replaced Green", line)
    assert "patch_all(thread=False, queue=False)" in line


def test_a_umask_that_takes_all_keeps_nobody_out(bridge, outcome, not_root) -> None:
    """As an ordinary user: root may open everything."""
    code = f"""
    def both():
        with shmbridge.Consumer(bridge) as consumer, shmbridge.Producer(bridge, lane_bytes="64K") as producer:
            producer.put({GROUP})
            with consumer.get(5): pass
            ours = [entry for entry in os.scandir("/dev/shm") if "{bridge}." in entry.name]
            return sorted({{oct(entry.stat().st_mode & 0o777) for entry in ours}})
    both()  # imports what the user may not be able to read
    os.umask(0o777)
    os.setgroups([]); os.setuid(65534)
    print(both(), [name for name in os.listdir("/dev/shm") if "{bridge}." in name])
    """
    assert outcome(code) == "['0o600', '0o700'] []"
