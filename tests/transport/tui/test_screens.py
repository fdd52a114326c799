"""Whole screens, compared with those that were looked at and kept.

After a wanted change: `pytest tests/transport/tui/test_screens.py --snapshot-update`, then look at each
picture. Another release of Textual draws the same screens otherwise, so they are compared under the one that
drew them.
"""

import sys
from importlib.metadata import version
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # for looks

pytest.importorskip("textual")
pytest.importorskip("pytest_textual_snapshot")

import looks

from shmbridge.watch.top import Top

DRAWN_BY = "8.2"

pytestmark = pytest.mark.skipif(
    not version("textual").startswith(f"{DRAWN_BY}."), reason=f"drawn by textual {DRAWN_BY}"
)


def view(scene, record=None) -> Top:
    return Top("run1", interval_s=3600, source=looks.Frozen(scene, record))


def test_healthy(snap_compare):
    assert snap_compare(view(looks.healthy()), press=["space"])


def test_stopped(snap_compare):
    assert snap_compare(view(looks.stopped()), press=["space", "space"])


def test_hundred_lanes(snap_compare):
    assert snap_compare(view(looks.hundred()), press=["space"], terminal_size=(80, 24))


def test_record(snap_compare):
    assert snap_compare(view(looks.healthy(), looks.scored_record()), press=["space", "g", "enter"])


def test_help(snap_compare):
    assert snap_compare(view(looks.healthy()), press=["question_mark"])
