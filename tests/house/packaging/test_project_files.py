"""The archive, workflows, the image and the extras: what they name exists, and they say one thing."""

import re
import subprocess
import sys
import tarfile
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))


def test_the_archive_has_what_a_packager_needs(sdist) -> None:
    with tarfile.open(sdist) as archive:
        names = {member.name.partition("/")[2] for member in archive.getmembers()}
    wanted = {
        "tests/house/packaging/wheel_check.py", "docs/how-to/install.md", "examples/README.md", "Makefile",
        "CONTRIBUTING.md", "SECURITY.md", "Dockerfile", "compose.yaml", ".ci/run", ".github/workflows/ci.yml",
    }  # fmt: skip
    assert wanted - names == set()


def test_all_is_made_of_extras_that_exist() -> None:
    extras = PROJECT["project"]["optional-dependencies"]
    (all_of_them,) = extras["all"]
    named = re.search(r"\[(.*)\]", all_of_them)[1].split(",")
    assert set(named) <= set(extras)
    page = (ROOT / "docs/how-to/install.md").read_text()
    assert [each for each in named if f"`{each}`" not in page] == []


def test_wheels_are_made_for_each_release_that_is_named() -> None:
    named = re.findall(r"Python :: 3\.(\d+)", "\n".join(PROJECT["project"]["classifiers"]))
    made = PROJECT["tool"]["cibuildwheel"]["build"]
    assert made == [f"cp3{minor}-*" for minor in named]
    checked = PROJECT["tool"]["cibuildwheel"]["test-command"].rpartition("/")[2]
    assert (Path(__file__).parent / checked).is_file()


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.name)
def test_a_workflow_may_only_read_and_pins_its_actions(workflow: Path) -> None:
    yaml = pytest.importorskip("yaml")
    said = yaml.safe_load(workflow.read_text())
    assert said["permissions"] == {"contents": "read"}
    for job in said["jobs"].values():
        assert job["timeout-minutes"] <= 120
        for step in job["steps"]:
            assert "uses" not in step or re.fullmatch(r"[\w-]+/[\w-]+@(v\d+|[0-9a-f]{40})", step["uses"])
            for target in re.findall(r"\bmake ([a-z-]+)", step.get("run", "")):
                assert f"\n{target}:" in (ROOT / "Makefile").read_text()


def test_the_image_has_what_the_build_reads() -> None:
    kept = {line[1:] for line in (ROOT / ".dockerignore").read_text().split("\n") if line.startswith("!")}
    read = {"setup.py", "package_page.py", "pyproject.toml", "README.md"}
    assert {"shmbridge", "producers", "consumers", "bench"} | read <= kept
    image = (ROOT / "Dockerfile").read_text()
    assert "\nUSER 1000\n" in image


def test_the_first_record_of_the_page_moves(bridge: str) -> None:
    (block,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs/how-to/install.md").read_text(), re.DOTALL)
    argv = [sys.executable, "-c", block.replace('"first"', repr(bridge))]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "[5 6 7]\n"), done.stderr
