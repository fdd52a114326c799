"""Children in real conditions: a mount namespace with a /dev/shm of its own, a memory cgroup, a low limit,
another user.

Tests that need root are skipped without it, with that reason.
"""

import contextlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[3]
ROLES = Path(__file__).with_name("roles.py")
Steps = dict[str, Any]


class Child:
    """A child in a role of roles.py: reads its output, writes its input."""

    def __init__(self, argv: list[str], bridge: str) -> None:
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        self.process = subprocess.Popen(
            argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        self.bridge = bridge

    def step(self, name: str) -> Steps:
        """Returns the next step that the child prints; it must be this one."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"the child ended ({self.process.wait()}) before it said {name!r}"
        said: Steps = json.loads(line)
        assert said["step"] == name, said
        return said

    def tell(self, line: object) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{line}\n")
        self.process.stdin.flush()

    def rest(self) -> list[Steps]:
        """Returns the rest of the child's output; it must end by itself, with status 0."""
        out, _ = self.process.communicate(timeout=60)
        code = self.process.returncode
        assert code == 0, f"the child ended with {code} (a signal, if negative); it said {out[-2000:]}"
        return [json.loads(line) for line in out.splitlines()]

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout):
            with contextlib.suppress(BrokenPipeError):
                if stream is not None:
                    stream.close()


def python(role: str, bridge: str, *arguments: object) -> list[str]:
    return [sys.executable, str(ROLES), role, bridge, *map(str, arguments)]


@pytest.fixture
def start(bridge: str) -> Iterator[Callable[..., Child]]:
    """Starts a role in a child; `before` is what runs it, such as unshare."""
    with contextlib.ExitStack() as children:

        def run(role: str, *arguments: object, before: tuple[str, ...] = ()) -> Child:
            child = Child([*before, *python(role, bridge, *arguments)], bridge)
            children.callback(child.kill)
            return child

        yield run


@pytest.fixture(scope="session")
def namespaces() -> None:
    """Skips where this process cannot have a mount namespace of its own."""
    if os.geteuid() != 0 or shutil.which("unshare") is None:
        pytest.skip("needs root and unshare(1) for a /dev/shm of its own")
    if (
        subprocess.run(
            ["unshare", "-m", "mount", "-t", "tmpfs", "tmpfs", "/mnt"], capture_output=True
        ).returncode
        != 0
    ):
        pytest.skip("this root may not mount (a container without CAP_SYS_ADMIN)")


@pytest.fixture
def in_shm(namespaces: None, start: Callable[..., Child]) -> Callable[..., list[Steps]]:
    """Runs a role with a /dev/shm of its own, made by a shell command; returns its output."""

    def run(setup: str, role: str, *arguments: object) -> list[Steps]:
        shell = ("unshare", "-m", "bash", "-ec", f'{setup}; exec "$@"', "bash")
        return start(role, *arguments, before=shell).rest()

    return run


@pytest.fixture
def not_root() -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root, to become another user")


@pytest.fixture(scope="session")
def runs() -> Callable[[list[Steps]], Iterator[list[Steps]]]:
    """Splits the output of a role that does the same in one child after the other; each must have ended well,
    by no signal.
    """

    def split(said: list[Steps]) -> Iterator[list[Steps]]:
        one: list[Steps] = []
        for each in said:
            if each["step"] == "ended":
                assert each["status"] == 0, (
                    f"{each['of']} ended with {each['status']} (a signal, if negative) after {one}"
                )
                yield one
                one = []
            else:
                one.append(each)
        assert not one

    return split
