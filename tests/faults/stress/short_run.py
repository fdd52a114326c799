"""A fuzz as a process, for a few seconds."""

import json
import os
import subprocess
import sys
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
        timeout=170,
    )
    said = f"{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    return done.returncode, json.loads(done.stdout.splitlines()[-1]) if done.stdout else {}, said
