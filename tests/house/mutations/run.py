"""Breaks one line at a time in a copy of the tree, builds it, and runs the tests that must go red.

    python tests/house/mutations/run.py [NAME...]

Exit status 1 if a planted error is not found, or if a line to break is missing. It takes half an hour, so it
is not part of the test suite.
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parents[3]))
import shmbridge
from tests.house.mutations.table import MUTATIONS, Mutation

ROOT = Path(__file__).parents[3]
LEFT_OUT = shutil.ignore_patterns(".git", ".venv", ".venvs", "runs", "build", "__pycache__", ".*_cache")


class Ended(NamedTuple):
    """A command that is over; its returncode is negative if a signal ended it."""

    pid: int
    returncode: int
    stdout: str
    stderr: str


def shell(tree: Path, *command: str, timeout_s: float = 600) -> Ended:
    """A command in the copy, on its own sources. Raises TimeoutExpired, with the command killed."""
    variables = {**os.environ, "PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"}
    variables.pop("PYTEST_ADDOPTS", None)  # the output is read below
    with subprocess.Popen(
        command, cwd=tree, env=variables, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            stdout, stderr = process.communicate(timeout=timeout_s)
        except BaseException:
            process.kill()
            raise
    return Ended(process.pid, process.returncode, stdout, stderr)


def build(tree: Path) -> None:
    done = shell(tree, sys.executable, "setup.py", "-q", "build_ext", "--inplace", "-j2")
    assert done.returncode == 0, done.stderr[-2000:]


def red_tests(tree: Path, tests: str) -> list[str]:
    """Names of the tests that fail; a crash of the interpreter counts as one."""
    done = shell(
        tree,
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-x",
        "-p",
        "no:cacheprovider",
        "--timeout=60",
        *shlex.split(tests),
    )
    sweep_after(done.pid)
    red = re.findall(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)
    assert red or done.returncode in (0, 1) or done.returncode < 0, (
        f"pytest ended with {done.returncode}: {done.stdout[-2000:]}"
    )
    return red or (["(the interpreter crashed)"] if done.returncode < 0 else [])


def sweep_after(pid: int) -> None:
    """Removes the bridges that red tests left to be looked at. Whatever else their names say, they hold the
    pid of the test run, which is over; those of other runs on this machine stay.
    """
    for bridge in shmbridge.list_bridges():
        if str(pid) in bridge.name.split("-"):
            shmbridge.clean(bridge.name, dry_run=False)


def compiled(mutation: Mutation) -> bool:
    """Whether the mutation changes a file that must be built."""
    return mutation.path.startswith("shmbridge/_ext/")


def try_one(tree: Path, mutation: Mutation) -> list[str]:
    """Breaks the text, runs the tests, and restores it; the build stays broken until the next one."""
    path = tree / mutation.path
    whole = path.read_text()
    found = whole.count(mutation.before)
    assert found == 1, f"{mutation.name}: {mutation.before!r} stands {found} times in {mutation.path}"
    path.write_text(whole.replace(mutation.before, mutation.after))
    try:
        if compiled(mutation):
            build(tree)
        return red_tests(tree, mutation.tests)
    finally:
        path.write_text(whole)


def main() -> int:
    wanted = [mutation for mutation in MUTATIONS if mutation.name in sys.argv[1:] or len(sys.argv) == 1]
    missed = 0
    with tempfile.TemporaryDirectory(prefix="shmbridge-mutations-") as folder:
        tree = Path(folder) / "tree"
        shutil.copytree(ROOT, tree, symlinks=True, ignore=LEFT_OUT)
        build(tree)
        for mutation in sorted(wanted, key=compiled):  # first those that need no other build
            began = time.monotonic()
            red = try_one(tree, mutation)
            missed += not red
            verdict = f"found by {red[0]}" if red else "MISSED"
            print(
                f"{mutation.guarantee}  {mutation.name:26} {verdict}  ({time.monotonic() - began:.0f} s)",
                flush=True,
            )
    print(f"{len(wanted) - missed} of {len(wanted)} planted errors found")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
