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


MISTAKE = """
import shmbridge
from shmbridge.consumers.transfer_queue.store import Queue

living = Queue("taken")
try:
    tq.init({"backend": {"storage_backend": "shmbridge", "shmbridge": {"bridge": "taken"}}})
except shmbridge.QueueTaken as error:
    print(error)
living.close()
"""


def test_the_pages_code_runs_also_after_a_bridge_that_was_taken():
    """TransferQueue makes its controller before it asks the backend: that must not be what the next finds."""
    page = (ROOT / "docs" / "how-to" / "transferqueue.md").read_text()
    (block,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    before, begin, after = block.partition("tq.init(")
    code = (before + MISTAKE + begin + after).replace('"run1"', f'"t-page-{os.getpid()}"')
    said = run("-c", code.replace('"taken"', f'"t-taken-{os.getpid()}"'))
    assert re.search(r"t-taken-\d+' has a living queue -> choose another name", said)
