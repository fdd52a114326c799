"""Fixtures for everything that needs a bridge: a name of one's own, ends that are closed, children that do not outlive the test."""

import gc
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import shmbridge
from shmbridge.testing import wait_until

# A background job inherits an ignored SIGINT, and so would every child of these tests; a handled one is reset at exec.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)



@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport(item, call):
    report = yield
    setattr(item, f"report_{report.when}", report)
    return report


def segments_of(bridge: str) -> list[str]:
    return sorted(name for name in os.listdir("/dev/shm") if name.startswith(f"shmbridge.{bridge}."))


@pytest.fixture
def bridge(request) -> Iterator[str]:
    """A bridge name nobody else uses. After a test that passed, nothing of it may be left once it is cleaned."""
    stem = re.sub(r"[^A-Za-z0-9]+", "-", request.node.name)[:28].strip("-")
    name = f"t-{stem}-{os.getpid()}-{os.urandom(2).hex()}"
    yield name
    gc.collect()
    report = shmbridge.clean(name, dry_run=False)
    passed = getattr(request.node, "report_call", None)
    if passed is not None and passed.passed:
        assert not report.kept, f"still in use after the test: {report.kept}"
        assert segments_of(name) == []


@pytest.fixture
def segments(bridge: str) -> Callable[[], list[str]]:
    """What of the bridge stands on the mount now."""
    return lambda: segments_of(bridge)


@pytest.fixture
def make_producer(bridge: str) -> Iterator[Callable[..., shmbridge.Producer]]:
    """Makes producers of the bridge with small lanes; closed at the end."""
    made: list[shmbridge.Producer] = []

    def make(**options: Any) -> shmbridge.Producer:
        made.append(shmbridge.Producer(bridge, **{"lane_bytes": "64K", **options}))
        return made[-1]

    yield make
    while made:
        made.pop().close()


@pytest.fixture
def make_consumer(bridge: str) -> Iterator[Callable[..., shmbridge.Consumer]]:
    """Makes consumers of the bridge; closed at the end."""
    made: list[shmbridge.Consumer] = []

    def make(**options: Any) -> shmbridge.Consumer:
        made.append(shmbridge.Consumer(bridge, **options))
        return made[-1]

    yield make
    while made:
        made.pop().close()


@pytest.fixture
def producer(make_producer) -> shmbridge.Producer:
    """A producer with a lane of 64 KiB that raises when it is full."""
    return make_producer(on_full="raise")


@pytest.fixture
def consumer(make_consumer) -> shmbridge.Consumer:
    return make_consumer()


@pytest.fixture
def child(bridge: str) -> Iterator[Callable[..., "subprocess.Popen[str]"]]:
    """Starts a Python process that runs some code with `bridge` defined; returns once it has printed a line. Killed at the end."""
    children: list[subprocess.Popen[str]] = []

    def start(code: str, *, until: str = "ready") -> "subprocess.Popen[str]":
        process = subprocess.Popen(
            [sys.executable, "-c", f"bridge = {bridge!r}\n{code}"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        children.append(process)
        line = process.stdout.readline().strip()
        assert line == until, f"child said {line!r}"
        return process

    yield start
    for process in children:
        process.kill()
        process.wait()
        process.stdin.close()
        process.stdout.close()


@pytest.fixture
def until() -> Callable[..., None]:
    """Polls a condition with a deadline."""
    return wait_until
