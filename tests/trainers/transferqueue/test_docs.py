"""The example and the page's code run as they stand, each in a process of its own."""

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]


def run(*argv: str) -> str:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, *argv], capture_output=True, text=True, timeout=110, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_the_example_reads_in_another_process():
    said = run(str(ROOT / "examples" / "transferqueue_backend.py"))
    assert re.search(r"process \d+ read 14 tokens with advantages of 2 in all", said)


def test_the_pages_code_runs():
    page = (ROOT / "docs" / "how-to" / "transferqueue.md").read_text()
    (block,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    run("-c", block.replace('"run1"', f'"t-page-{os.getpid()}"'))
