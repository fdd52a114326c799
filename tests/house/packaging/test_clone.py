"""A clone that was not built, in whose folder Python finds it before the shmbridge that is installed."""

import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]


def test_a_clone_that_was_not_built_names_its_folder_and_the_command(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "shmbridge", tmp_path / "shmbridge", ignore=shutil.ignore_patterns("*.so"))
    command = [sys.executable, "-c", "import shmbridge; shmbridge.Producer"]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    last = ended.stderr.splitlines()[-1]
    assert ended.returncode == 1
    assert last.startswith("ImportError: ")
    assert f"{tmp_path}/shmbridge/_ext" in last
    assert "pip install -e ." in last
