"""Every Python block of docs/how-to/arrow-polars-duckdb-torch.md runs, in order, in one process."""

import re
from pathlib import Path

import pytest
from own_bridges import clean_own_bridges, with_own_bridges

PAGE = Path(__file__).parents[3] / "docs/how-to/arrow-polars-duckdb-torch.md"


def test_the_examples_run_as_written(capsys) -> None:
    for library in ("polars", "duckdb", "torch"):
        pytest.importorskip(library)
    scope: dict[str, object] = {}
    try:
        for block in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL):
            exec(compile(with_own_bridges(block), str(PAGE), "exec"), scope)
    finally:
        scope.clear()
        clean_own_bridges()
    said = capsys.readouterr().out
    assert "[1.0, 0.0] 4\n3\n" in said
    assert "question-1" in said
    assert "question-2" in said
    assert "torch.int32 torch.Size([14]) [0, 4, 7, 11, 14]\n[1 2 3 4]\n" in said


def test_the_links_lead_somewhere() -> None:
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", PAGE.read_text()):
        assert (PAGE.parent / target).exists(), target
