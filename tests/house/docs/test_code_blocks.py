"""Every Python block of every page is run by a test, or is marked as a fragment: ```python fragment.

A fragment needs names that the page does not make, such as a model. It parses, and what it imports of ours is
there.
"""

import ast
import importlib
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").rglob("*.md")]
BLOCK = re.compile(r"^```python( fragment)?\n(.*?)^```", re.MULTILINE | re.DOTALL)
# The test that runs a page's blocks.
RUN_BY = {
    "README.md": "tests/house/docs/test_readme.py",
    "docs/how-to/arrow-polars-duckdb-torch.md": "tests/house/docs/test_arrow_page.py",
    "docs/how-to/gem.md": "tests/environments/gem/test_page.py",
    "docs/how-to/how-much-memory.md": "tests/house/docs/test_newcomer_pages.py",
    "docs/how-to/install.md": "tests/house/packaging/test_project_files.py",
    "docs/how-to/multi-turn.md": "tests/house/docs/test_newcomer_pages.py",
    "docs/how-to/notebook.md": "tests/house/docs/test_newcomer_pages.py",
    "docs/how-to/other-trainers.md": "tests/adapters/trainers/test_other_trainers_page.py",
    "docs/how-to/own-environment.md": "tests/house/docs/test_newcomer_pages.py",
    "docs/how-to/own-loop.md": "tests/house/docs/test_newcomer_pages.py",
    "docs/how-to/record-and-replay.md": "tests/house/docs/test_record_page.py",
    "docs/how-to/rewards.md": "tests/house/docs/test_rewards_page.py",
    "docs/how-to/skyrl-gym.md": "tests/environments/skyrl_gym/test_policy_server.py",
    "docs/how-to/skyrl.md": "tests/trainers/skyrl/test_page.py",
    "docs/how-to/transferqueue.md": "tests/trainers/transferqueue/test_docs.py",
    "docs/how-to/trl.md": "tests/trainers/trl/test_page.py",
    "docs/how-to/verifiers.md": "tests/environments/verifiers/test_rows.py",
    "docs/how-to/write-and-read.md": "tests/house/docs/test_readme.py",
    "docs/reference/advantages.md": "tests/house/docs/test_advantages_page.py",
    "docs/reference/sizing.md": "tests/house/docs/test_code_blocks.py",
    "docs/reference/testing.md": "tests/transport/testing/test_testing.py",
}
FRAGMENTS = [
    pytest.param(block, id=f"{page.relative_to(ROOT)}-{number}")
    for page in PAGES
    for number, (fragment, block) in enumerate(BLOCK.findall(page.read_text()))
    if fragment
]


def test_every_block_is_run_or_marked() -> None:
    unmarked = {
        str(page.relative_to(ROOT))
        for page in PAGES
        if any(not fragment for fragment, _ in BLOCK.findall(page.read_text()))
    }
    assert unmarked - set(RUN_BY) == set()


@pytest.mark.parametrize("page", RUN_BY)
def test_the_test_that_runs_a_page_names_it(page: str) -> None:
    assert Path(page).name in (ROOT / RUN_BY[page]).read_text()
    assert BLOCK.search((ROOT / page).read_text())


@pytest.mark.parametrize("block", FRAGMENTS)
def test_a_fragment_parses_and_imports_what_there_is(block: str) -> None:
    for statement in ast.walk(ast.parse(block, mode="exec")):
        if isinstance(statement, ast.ImportFrom) and (statement.module or "").startswith("shmbridge"):
            try:
                module = importlib.import_module(statement.module or "")
            except ModuleNotFoundError as missing:
                if (missing.name or "").startswith("shmbridge"):
                    raise
                continue
            for each in statement.names:
                assert hasattr(module, each.name) or importlib.import_module(
                    f"{statement.module}.{each.name}"
                )


def test_the_sizes_are_as_written() -> None:
    names: dict[str, object] = {}
    for _, block in BLOCK.findall((ROOT / "docs/reference/sizing.md").read_text()):
        exec(block, names)
    assert names["record"] == 279_488
    assert eval("sizing.as_option(sizing.lane_bytes_for(record, groups=8))", names) == "9M"
