"""The compiled classes, made with arguments that they refuse: an exception, never the end of the process."""

import subprocess
import sys

import pytest

MODULES = "header lane put record weights"

TRY_ALL = """
import gc, importlib, sys
module = importlib.import_module(sys.argv[1])
types = [each for each in vars(module).values() if isinstance(each, type)]
classes = [each for each in types if each.__module__ == module.__name__]
for each in classes:
    for arguments in (), (None,), (None, None), (None, None, None), (object(),), (-1,), (2**63,):
        print(each.__name__, arguments, flush=True)
        try:
            each(*arguments)
        except Exception:
            pass
        gc.collect()
print("all", len(classes))
"""


@pytest.mark.parametrize("module", MODULES.split())
def test_constructors_refuse_what_they_cannot_hold(module: str) -> None:
    tried = subprocess.run(
        [sys.executable, "-c", TRY_ALL, f"shmbridge._ext.{module}"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert tried.returncode == 0, (tried.stdout[-300:], tried.stderr[-300:])
    assert tried.stdout.splitlines()[-1] != "all 0"
