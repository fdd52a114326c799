"""Paths that users could import before the files moved can be imported now; files that pages name exist."""

import re
import subprocess
import sys
from pathlib import Path

import shmbridge

ROOT = Path(__file__).parents[3]
TRIED = Path(__file__).with_name("public_paths.py")


def test_every_public_path_leads_somewhere():
    """tests/house/packaging tries the same list in a wheel."""
    path = {"PYTHONPATH": str(Path(shmbridge.__file__).parents[1])}
    done = subprocess.run([sys.executable, TRIED], capture_output=True, text=True, env=path)
    assert done.returncode == 0, done.stdout + done.stderr


def test_an_old_path_is_the_new_module():
    """It is the same module, not a copy: a value set in one is seen in the other, and classes are equal."""
    from shmbridge import messages
    from shmbridge.control import messages as moved

    assert messages is moved


def test_files_that_pages_name_are_there():
    pages = [
        *ROOT.glob("*.md"),
        *(ROOT / "docs").rglob("*.md"),
        *(ROOT / "bench").glob("*.md"),
        *(ROOT / "examples").rglob("*.md"),
    ]
    named = {
        (page, name)
        for page in pages
        if page.name != "CHANGELOG.md"
        for name in re.findall(
            r"`((?:shmbridge|consumers|producers|tests|bench|docs|examples)/[\w./-]+\.\w+)(?::\w+)?`",
            page.read_text(),
        )
    }
    assert len(named) > 30
    assert not [f"{page.name}: {name}" for page, name in sorted(named) if not (ROOT / name).exists()]
