"""pytest fixtures for tests of code that uses a bridge: `pytest_plugins = ["shmbridge.testing.fixtures"]` in
the top conftest.py.

An unused bridge name, ends that are closed, children that do not outlive the test. Not loaded automatically:
a project decides itself about names as short as `child`. The only module of shmbridge that imports pytest.
"""

import contextlib
import gc
import os
import re
import subprocess
import sys
from collections.abc import Callable, Generator, Iterator
from typing import IO, Any

import pytest

import shmbridge
from shmbridge.testing import wait_until
from shmbridge.testing.holders import holders, segments_of

_passed = pytest.StashKey[bool]()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Remembers whether the test itself passed: after a failure nothing more is checked."""
    report = yield
    if report.when == "call":
        item.stash[_passed] = report.passed
    return report


@pytest.fixture
def bridge(request: pytest.FixtureRequest) -> Iterator[str]:
    """Yields an unused bridge name.

    After a passed test none of its segments may be left; a failure names the processes that still hold one.
    """
    stem = re.sub(r"[^A-Za-z0-9]+", "-", request.node.name)[:28].strip("-")
    name = f"t-{stem}-{os.getpid()}-{os.urandom(2).hex()}"
    yield name
    report = shmbridge.clean(name, dry_run=False)
    if segments_of(name):  # an end in a cycle of objects lives until it is collected, which takes long
        gc.collect()
        before = holders(name)
        report = shmbridge.clean(name, dry_run=False)
        if request.node.stash.get(_passed, False):
            still = "; ".join([*(f"{segment}: {why}" for segment, why in report.kept.items()), *before])
            assert not report.kept, f"still in use after the test: {still}"
            assert not segments_of(name), f"left after the test: {still or 'no process maps it'}"


@pytest.fixture
def segments(bridge: str) -> Callable[[], list[str]]:
    """Returns a function for the names of the bridge's segments that exist now."""
    return lambda: segments_of(bridge)


@pytest.fixture
def make_producer(bridge: str) -> Iterator[Callable[..., shmbridge.Producer]]:
    """Yields a function that makes a Producer of the bridge, with Producer's options; lanes of 64 KiB by
    default.

    Closed at the end.
    """
    with contextlib.ExitStack() as made:

        def make(**options: Any) -> shmbridge.Producer:
            producer = shmbridge.Producer(bridge, **{"lane_bytes": "64K", **options})
            made.callback(producer.close)
            return producer

        yield make


@pytest.fixture
def make_consumer(bridge: str) -> Iterator[Callable[..., shmbridge.Consumer]]:
    """Yields a function that makes a Consumer of the bridge, with Consumer's options. Closed at the end."""
    with contextlib.ExitStack() as made:

        def make(**options: Any) -> shmbridge.Consumer:
            consumer = shmbridge.Consumer(bridge, **options)
            made.callback(consumer.close)
            return consumer

        yield make


@pytest.fixture
def child(bridge: str) -> Iterator[Callable[..., "subprocess.Popen[str]"]]:
    """Yields a function that runs Python code in a child, where `bridge` is defined; it returns once the
    child has printed `until`.

    Standard input and output are pipes, in text. Killed at the end of the test, if it still runs.
    """
    with contextlib.ExitStack() as children:

        def start(code: str, *, until: str = "ready") -> "subprocess.Popen[str]":
            process = subprocess.Popen(
                [sys.executable, "-c", f"bridge = {bridge!r}\n{code}"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            children.callback(_end, process)
            line = _pipe(process.stdout).readline().strip()
            assert line == until, f"child {process.pid} said {line!r} and not {until!r}"
            return process

        yield start


def _end(process: "subprocess.Popen[str]") -> None:
    process.kill()
    process.wait()
    for stream in (process.stdin, process.stdout):
        with contextlib.suppress(BrokenPipeError):  # input that the child never read
            _pipe(stream).close()


def _pipe(stream: IO[str] | None) -> IO[str]:
    assert stream is not None
    return stream


@pytest.fixture
def until() -> Callable[..., None]:
    """`shmbridge.testing.wait_until`: polls a condition, with a deadline."""
    return wait_until
