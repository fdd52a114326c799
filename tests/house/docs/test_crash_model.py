"""The table of planted errors in the crash model is the one that `make mutations` runs, and the lines it
breaks are still there.
"""

import re
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
MUTATIONS = runpy.run_path(str(ROOT / "tests/house/mutations/table.py"))["MUTATIONS"]
TEXT = (ROOT / "docs/explanation/crash-model.md").read_text()
ROW = re.compile(r"^\| (\d+) \| `([\w-]+)` \| (.+?) \| `(.+?)` \|$", re.MULTILINE)


def test_the_documents_table_is_the_one_that_is_run() -> None:
    rows = {name: (int(guarantee), breaks) for guarantee, name, breaks, _ in ROW.findall(TEXT)}
    assert rows == {mutation.name: (mutation.guarantee, mutation.breaks) for mutation in MUTATIONS}


def test_every_guarantee_is_broken_at_least_once() -> None:
    assert {mutation.guarantee for mutation in MUTATIONS} == set(range(1, 13))


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_the_line_to_break_is_there(mutation) -> None:
    assert (ROOT / mutation.path).read_text().count(mutation.before) == 1


def test_the_tests_that_went_red_exist() -> None:
    wrong = []
    for *_, red in ROW.findall(TEXT):
        path, _, test = red.partition("::")
        name = re.sub(r"\[.*", "", test.split("::")[-1])
        if not (ROOT / path).is_file() or (
            name != "runTest" and f"def {name}(" not in (ROOT / path).read_text()
        ):
            wrong.append(red)
    assert not wrong
