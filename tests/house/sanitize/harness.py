"""Builds the thread harness with a compiler and its sanitizers, and runs it.

    python tests/house/sanitize/harness.py [SECONDS] every shape under ThreadSanitizer, then AddressSanitizer
    and
    UBSan: 10 s each

Knows flags and exit statuses; threads.c makes the checks.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
CORE = HERE.parents[2] / "shmbridge" / "_ext" / "c"
FLAGS = [
    "-std=gnu11",
    "-O1",
    "-g",
    "-Wall",
    "-Wextra",
    "-Wno-sign-compare",
    "-Wno-unused-function",
    "-pthread",
]
SANITIZERS = {
    "none": [],
    "thread": ["-fsanitize=thread"],
    "address": ["-fsanitize=address,undefined", "-fno-sanitize-recover=undefined"],
}
OPTIONS = {
    "TSAN_OPTIONS": "exitcode=66:halt_on_error=1:second_deadlock_stack=1",
    "ASAN_OPTIONS": "exitcode=67:detect_stack_use_after_return=1",
    "UBSAN_OPTIONS": "print_stacktrace=1:halt_on_error=1",
}
OUTCOMES = {0: "nothing", 1: "pattern", 3: "lost wake", 66: "tsan", 67: "asan"}
SHAPES = {
    "many producers": (),
    "room for one record": ("--slots", "1", "--data", "1024", "--producers", "2", "--hold", "1"),
    "room for many, held long": (
        "--slots",
        "64",
        "--data",
        "65536",
        "--producers",
        "2",
        "--hold",
        "60",
        "--releasers",
        "4",
    ),
}


class CannotRun(Exception):
    """This machine cannot build or start programs with that sanitizer; says why."""


@dataclass(frozen=True)
class Outcome:
    """The result of a run of the harness: one of OUTCOMES, and its whole output."""

    shown: str
    output: str


def build(
    sanitizer: str, into: Path, core: Path = CORE, harness: Path = HERE, compiler: str | None = None
) -> Path:
    """The harness over the C core of `core`.

    Raises:
        CannotRun: there is no compiler, or it lacks the sanitizer.
        AssertionError: the harness does not compile.
    """
    found = shutil.which(compiler or os.environ.get("CC") or "gcc")
    if found is None:
        raise CannotRun(f"no compiler {compiler or 'gcc'}")
    _probe(found, sanitizer, into)
    program = into / f"threads-{Path(found).name}-{sanitizer}"
    command = [
        found,
        *FLAGS,
        *SANITIZERS[sanitizer],
        f"-I{core}",
        f"-I{harness}",
        "-include",
        "perturb.h",
        str(harness / "threads.c"),
    ]
    done = subprocess.run([*command, "-o", str(program)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return program


def run(program: Path, *arguments: str, timeout_s: float = 120) -> Outcome:
    """Runs the harness, without address space randomisation if ThreadSanitizer cannot place its shadow
    otherwise.
    """
    environment = {**os.environ, **OPTIONS}
    for prefix in ([], ["setarch", os.uname().machine, "-R"]) if shutil.which("setarch") else ([],):
        done = subprocess.run(
            [*prefix, str(program), *arguments],
            capture_output=True,
            text=True,
            check=False,
            timeout=timeout_s,
            env=environment,
        )
        output = done.stdout + done.stderr
        if "unexpected memory mapping" not in output:
            return Outcome(OUTCOMES.get(done.returncode, f"exit status {done.returncode}"), output)
    raise CannotRun("ThreadSanitizer finds no place for its shadow memory, even with setarch -R")


def _probe(compiler: str, sanitizer: str, into: Path) -> None:
    """CannotRun unless an empty program with the sanitizer compiles, links and runs."""
    source, program = into / "probe.c", into / "probe"
    source.write_text("int main(void) { return 0; }\n")
    done = subprocess.run(
        [compiler, *SANITIZERS[sanitizer], str(source), "-o", str(program)],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise CannotRun(
            f"{compiler} cannot link with the {sanitizer} sanitizer: {done.stderr.strip().splitlines()[-1]}"
        )
    ran = run(program)
    if ran.shown != "nothing":
        raise CannotRun(
            f"a program of {compiler} with the {sanitizer} sanitizer does not run: {ran.output[-300:]}"
        )


def main(seconds: str = "10") -> int:
    """Runs every shape under every sanitizer; 1 if one shows anything."""
    wrong = 0
    with tempfile.TemporaryDirectory() as folder:
        for sanitizer in ("thread", "address"):
            program = build(sanitizer, Path(folder))
            for name, arguments in SHAPES.items():
                outcome = run(program, "--seconds", seconds, *arguments, timeout_s=float(seconds) + 120)
                wrong += outcome.shown != "nothing"
                print(f"{sanitizer:8} {name:26} {outcome.output.strip() or outcome.shown}", flush=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
