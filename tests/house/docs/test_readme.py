"""Every Python block of the README runs, in order, in one process; the bridges it leaves are clean."""

import logging
import re
from pathlib import Path

import shmbridge

BRIDGES = ("run1", "run2", "run3")
README = Path(__file__).parents[3] / "README.md"


def blocks() -> list[str]:
    return re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)


def test_the_readme_has_its_examples() -> None:
    assert len(blocks()) == 4


def test_the_examples_run_as_written(capsys, caplog) -> None:
    for bridge in BRIDGES:
        assert not [info for info in shmbridge.list_bridges() if info.name == bridge], (
            f"bridge {bridge} is in use on this machine"
        )
    scope: dict[str, object] = {}
    try:
        for block in blocks():
            exec(compile(block, str(README), "exec"), scope)
    finally:
        scope.clear()
        reports = [shmbridge.clean(bridge, dry_run=False) for bridge in BRIDGES]
    assert [each.getMessage() for each in caplog.records if each.levelno >= logging.WARNING] == []
    assert "gsm8k [11 12 13 14] [1. 0.]" in capsys.readouterr().out
    assert not any(report.kept or report.undelivered for report in reports), reports


def test_the_links_lead_somewhere() -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", README.read_text()):
        assert (README.parent / target).exists(), target
