"""Every Python block of the README runs, in order, in one process; the bridges it leaves are clean."""

import logging
import re
from pathlib import Path

from own_bridges import clean_own_bridges, with_own_bridges

README = Path(__file__).parents[3] / "README.md"


def blocks() -> list[str]:
    return re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)


def test_the_readme_has_its_examples() -> None:
    assert len(blocks()) == 4


def test_the_examples_run_as_written(capsys, caplog) -> None:
    scope: dict[str, object] = {}
    try:
        for block in blocks():
            exec(compile(with_own_bridges(block), str(README), "exec"), scope)
    finally:
        scope.clear()
        reports = clean_own_bridges()
    assert [each.getMessage() for each in caplog.records if each.levelno >= logging.WARNING] == []
    assert "gsm8k [11 12 13 14] [1. 0.]" in capsys.readouterr().out
    assert not any(report.kept or report.undelivered for report in reports), reports


def test_the_links_lead_somewhere() -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", README.read_text()):
        assert (README.parent / target).exists(), target
