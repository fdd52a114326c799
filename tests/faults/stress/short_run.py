"""A fuzz as a process, for a few seconds, and longer where a busy machine let too little happen in them."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import shmbridge

HERE, PACKAGE = Path(__file__).parent, Path(shmbridge.__file__).parents[1]


def run(script: str, *arguments: object) -> tuple[int, dict[str, Any], str]:
    """Its exit status, the object on its last line, and the end of what it printed."""
    done = subprocess.run(
        [sys.executable, str(HERE / script), *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": str(PACKAGE)},
        cwd="/",
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    said = f"{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    return done.returncode, json.loads(done.stdout.splitlines()[-1]) if done.stdout else {}, said


def run_until(
    enough: Callable[[dict[str, Any]], bool], script: str, *arguments: object, seconds: int
) -> dict[str, Any]:
    """The tally of a run without a violation in which enough happened; up to two more runs, each three times
    as long. A violation in any of them fails.
    """
    for each in (seconds, 3 * seconds, 9 * seconds):
        code, tally, said = run(script, "--seconds", each, *arguments)
        assert code == 0, said
        assert not tally.get("violations"), said
        if enough(tally):
            return tally
    raise AssertionError(f"too little happened even in {9 * seconds} s: {said}")
