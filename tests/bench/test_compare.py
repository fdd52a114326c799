"""What pytest-benchmark says of two runs of the suites, and the selections of suites that pages name."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from pytest_benchmark.utils import get_machine_id

ROOT = Path(__file__).parents[2]
SELECTED = ("bench/test_bench_ring.py", "-k", "by_size and 256")
PACED = """
import os, time
from shmbridge.bench.baselines.ring import Reader

take = Reader.read_one

def read_one(self):
    time.sleep(float(os.environ["PACE_S"]))
    return take(self)

Reader.read_one = read_one
"""
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *(ROOT / "docs").rglob("*.md"),
    *(ROOT / "bench").glob("*.md"),
    *(ROOT / "bench").glob("*.py"),
]


def suites(*words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Runs pytest on suites, as a user does in a clone: of its own, also where these tests are shared out."""
    ours = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_XDIST")}
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *words],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env=ours | variables,
    )


@pytest.fixture
def run(tmp_path):
    """`run(*words, pace_s=...)`: runs suites whose ring sleeps before each group that it takes, so a busy
    machine changes little. Results are stored outside the tree.
    """
    (tmp_path / "paced.py").write_text(PACED)
    path = os.pathsep.join(filter(None, [str(tmp_path), str(ROOT), os.environ.get("PYTHONPATH")]))
    flags = ("--quick", "-p", "paced", f"--benchmark-storage={tmp_path}/stored")
    return lambda *words, pace_s=0.0: suites(*words, *flags, PYTHONPATH=path, PACE_S=str(pace_s))


@pytest.mark.timeout(300)
def test_half_the_speed_is_called_slower_and_the_same_speed_is_not(run, tmp_path):
    """A round lasts as long at any speed: it has half as many groups."""
    compared = ("--benchmark-autosave", "--benchmark-compare=0001", "--benchmark-compare-fail=min:50%")
    first = run(*SELECTED, "--benchmark-autosave", pace_s=0.008)
    assert first.returncode == 0, first.stdout
    again = run(*SELECTED, *compared, pace_s=0.008)
    assert again.returncode == 0, again.stdout + again.stderr
    slower = run(*SELECTED, *compared, pace_s=0.016)
    assert slower.returncode != 0, slower.stdout
    assert "Field 'min' has failed PercentageRegressionCheck" in slower.stderr
    for told in (again, slower):
        assert "machine" not in told.stdout + told.stderr
        for of in ("(0001_", "(NOW)"):
            assert re.search(rf"^test_arrays_by_size.* tokens/s {re.escape(of)}", told.stdout, re.M)

    saved = [json.loads(path.read_text())["benchmarks"][0] for path in sorted(tmp_path.glob("stored/*/*"))]
    for each, pace_s in zip(saved, (0.008, 0.008, 0.016), strict=True):
        assert pace_s <= each["stats"]["min"] < 2 * pace_s, "the time of one group"
        assert each["stats"]["max"] == pytest.approx(1 / each["extra_info"]["groups_per_s_range"][0])
        assert each["stats"]["iterations"] == each["extra_info"]["groups_per_round"]


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("saved", "status", "told"),
    [
        (
            {"times": "seconds of one operation", "machine_info": {}},
            0,
            "not the same machine or software: node, ",
        ),
        ({"machine_info": {}}, 4, "has the times of whole rounds: save it again"),
    ],
)
def test_what_cannot_be_compared_is_told_in_a_line(run, tmp_path, saved, status, told):
    folder = tmp_path / "stored" / get_machine_id()
    folder.mkdir(parents=True)
    (folder / "0001_other.json").write_text(json.dumps(saved | {"benchmarks": []}))
    loaded = run(SELECTED[0], "--collect-only", "--benchmark-compare")
    assert loaded.returncode == status, loaded.stdout + loaded.stderr
    assert told in loaded.stdout + loaded.stderr
    assert "INTERNALERROR" not in loaded.stdout + loaded.stderr


def selections() -> list[str]:
    """Each suite that a page or a suite names, with the selection that stands there."""
    found: dict[str, None] = {}
    for page in PAGES:
        for line in re.findall(r"(?:pytest |`)(bench/test_bench_\w+\.py[^`\n|]*)", page.read_text()):
            found[re.split(r" {2,}| #|[,:]", line)[0]] = None
    return list(found)


def test_suites_that_pages_name_are_there_each_with_its_selection() -> None:
    named = selections()
    assert len(named) > 10
    assert [each for each in named if not (ROOT / each.split()[0]).is_file()] == []
    assert [page.name for page in PAGES if "`-k " in page.read_text()] == []


@pytest.mark.parametrize("selection", [each for each in selections() if " -k " in each])
def test_a_selection_of_the_pages_selects_something(selection) -> None:
    told = suites(*shlex.split(selection), "--collect-only")
    assert told.returncode == 0, told.stdout
