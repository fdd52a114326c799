"""A user's file under mypy and pyright: each marked mistake is an error, and no other line is."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import shmbridge

FILE = Path(__file__).with_name("user_file.py")
ROOT = Path(shmbridge.__file__).parents[1]
MARKED = {number for number, line in enumerate(FILE.read_text().splitlines(), 1) if line.endswith("# error")}


def test_mypy(tmp_path):
    config = tmp_path / "mypy.ini"
    config.write_text(
        f"[mypy]\nstrict = True\ncache_dir = {tmp_path}\nfollow_imports = silent\n"
        "[mypy-torch.*,transformers.*,pyarrow.*]\nfollow_imports = skip\n"  # a minute of CPU
    )
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--config-file", config, FILE],
        cwd=ROOT,
        env={"PATH": "/usr/bin:/bin", "MYPYPATH": str(ROOT), "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    wrong = {int(line) for line in re.findall(r"user_file\.py:(\d+): error", done.stdout)}
    assert wrong == MARKED, done.stdout + done.stderr


def test_pyright(tmp_path):
    """In a folder elsewhere, which knows the package only as it is installed: an editable install is a path.

    basedpyright brings node with it: it is pyright, installed by pip alone.
    """
    program = shutil.which("basedpyright", path=f"{Path(sys.executable).parent}:/usr/bin:/bin")
    if program is None:
        pytest.fail("basedpyright is missing: pip install basedpyright")
    config = tmp_path / "pyrightconfig.json"
    config.write_text(json.dumps({"typeCheckingMode": "standard", "pythonVersion": "3.11"}))
    shutil.copy(FILE, tmp_path)
    done = subprocess.run(
        [program, "--project", config, "--pythonpath", sys.executable, "--outputjson"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
    )
    found = json.loads(done.stdout)["generalDiagnostics"]
    wrong = {each["range"]["start"]["line"] + 1 for each in found if each["severity"] == "error"}
    assert wrong == MARKED, found
