"""A build with fail-points, children that die on them, and what must be true afterwards."""

import contextlib
import fcntl
import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest

import shmbridge
from shmbridge.testing.faults import Fault, FaultyChild

ROOT = Path(__file__).parents[2]
BUILD = ROOT / "build" / "faults"
ROLES = Path(__file__).with_name("roles.py")


def newest_source() -> float:
    sources = [ROOT / "setup.py", ROOT / "pyproject.toml"]
    for folder in ("shmbridge", "producers", "consumers"):
        sources += [path for path in (ROOT / folder).rglob("*") if path.suffix in {".py", ".pyx", ".pxd", ".h"} or path.name == "fork.c"]
    return max(path.stat().st_mtime for path in sources)


@pytest.fixture(scope="session")
def fault_build() -> Path:
    """Folder of a build with fail-points, made anew if a source is newer. It shares nothing with the in-place extensions."""
    stamp = BUILD / ".built"
    BUILD.mkdir(parents=True, exist_ok=True)
    with open(BUILD / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        began = newest_source()
        if not stamp.exists() or stamp.stat().st_mtime < began:
            build = ["build", "--build-base", "build/faults-base", "--build-lib", str(BUILD), "build_ext", "-j2"]
            done = subprocess.run(
                [sys.executable, "setup.py", "-q", *build], cwd=ROOT, env={**os.environ, "SHMBRIDGE_FAULTS": "1"},
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            )  # fmt: skip
            assert done.returncode == 0, done.stdout[-4000:]
            subprocess.run([sys.executable, "-m", "compileall", "-q", str(BUILD)], check=False, stdout=subprocess.DEVNULL)
            stamp.touch()
            os.utime(stamp, (began, began))
    return BUILD


@pytest.fixture
def faulty(fault_build: Path, bridge: str) -> Iterator[Callable[..., FaultyChild]]:
    """Starts a child in a role of roles.py, with a fault armed or none; killed at the end of the test."""
    with contextlib.ExitStack() as children:

        def start(role: str, *arguments: object, fault: Fault | None = None) -> FaultyChild:
            argv = [str(ROLES), role, bridge, *map(str, arguments)]
            return children.enter_context(FaultyChild(argv, build=fault_build, fault=fault))

        yield start


def _roles() -> ModuleType:
    spec = importlib.util.spec_from_file_location("shmbridge_crash_roles", ROLES)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def roles() -> ModuleType:
    """roles.py itself: pattern() and check()."""
    return _roles()


@pytest.fixture
def take(roles: ModuleType) -> Callable[..., dict[str, list[tuple[int, bool]]]]:
    """Takes, checks and releases records until each producer has given what is wanted: producer -> [(sequence, redelivered)].

    None may come that is not wanted, and nothing may come afterwards.
    """

    def take_all(consumer: shmbridge.Consumer, wanted: dict[str, int], timeout_s: float = 10.0) -> dict[str, list[tuple[int, bool]]]:
        taken: dict[str, list[tuple[int, bool]]] = {producer: [] for producer in wanted}
        while any(len(taken[producer]) < count for producer, count in wanted.items()):
            with consumer.get(timeout_s) as record:
                taken[record.meta.producer_id].append((roles.check(record), record.meta.redelivered))
        late = consumer.poll()
        assert not late, f"nobody has put these: {[(each.meta.producer_id, each.meta.sequence) for each in late]}"
        return taken

    return take_all


def fresh(*sequences: int) -> list[tuple[int, bool]]:
    return [(sequence, False) for sequence in sequences]


def again(*sequences: int) -> list[tuple[int, bool]]:
    return [(sequence, True) for sequence in sequences]
