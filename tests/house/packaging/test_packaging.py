"""The distribution: the archive has the sources, the wheel the right names, and a fresh environment can use
it.
"""

import json
import subprocess
import tarfile
import zipfile
from importlib.util import find_spec
from pathlib import Path

import pytest

pytestmark = [pytest.mark.timeout(300), pytest.mark.skipif(find_spec("build") is None, reason="needs build")]


@pytest.fixture
def in_archive(sdist) -> set[str]:
    with tarfile.open(sdist) as archive:
        return {member.name.partition("/")[2] for member in archive.getmembers() if member.isfile()}


@pytest.fixture
def in_wheel(wheel) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


def sources(tree, *suffixes: str) -> set[str]:
    return {
        str(path.relative_to(tree))
        for folder in ("shmbridge", "producers", "consumers", "bench")
        for path in (tree / folder).rglob("*")
        if path.suffix in suffixes
        and not path.is_relative_to(tree / "shmbridge/producers")
        and not path.is_relative_to(tree / "shmbridge/consumers")
        and not path.is_relative_to(tree / "shmbridge/bench")
    }


def packaged(names: set[str]) -> set[str]:
    """The names as an archive and a wheel have them: what the links in shmbridge/ stand for is there."""
    return {name if name.startswith("shmbridge/") else f"shmbridge/{name}" for name in names}


def suites(tree) -> set[str]:
    """Files of bench/ that pytest runs: they stay in the clone and the archive."""
    return {
        str(path.relative_to(tree))
        for path in (tree / "bench").rglob("*.py")
        if path.stem.startswith(("test_", "conftest"))
    }


def test_the_archive_has_what_people_wrote(tree, in_archive):
    written = packaged(sources(tree, ".py", ".pyx", ".pxi", ".pxd", ".pyi", ".h"))
    assert written | {"shmbridge/_ext/c/fork.c", "pyproject.toml", "setup.py", "LICENSE"} <= in_archive


def test_the_archive_has_nothing_that_was_built(in_archive):
    generated = [
        name
        for name in in_archive
        if name.endswith((".so", ".pyc", ".o", ".c"))
        and not name.startswith(("tests/", "docs/"))
        and name != "shmbridge/_ext/c/fork.c"
    ]
    assert not generated
    twice = ("producers/", "consumers/", "bench/")
    assert not [name for name in in_archive if name.startswith((*twice, "build/", "shmbridge/bench/results"))]


def test_the_wheel_claims_one_name(wheel, in_wheel):
    assert {name.split("/")[0] for name in in_wheel if ".dist-info/" not in name} == {"shmbridge"}
    with zipfile.ZipFile(wheel) as archive:
        (top,) = [name for name in archive.namelist() if name.endswith("top_level.txt")]
        assert archive.read(top).decode().split() == ["shmbridge"]


def test_the_wheel_has_every_module(tree, in_wheel):
    assert packaged(sources(tree, ".py") - suites(tree)) <= in_wheel
    for name in packaged(sources(tree, ".pyx")):
        stem = name.removesuffix(".pyx")
        assert [each for each in in_wheel if each.startswith(f"{stem}.") and each.endswith(".so")], (
            f"{name} was not compiled"
        )
        assert f"{stem}.pyi" in in_wheel, "types travel with the extension"
    assert "shmbridge/py.typed" in in_wheel
    declared = {name for name in sources(tree, ".pxd", ".h") if name.startswith("shmbridge/")}
    assert "shmbridge/_ext/c/layout.h" in declared <= in_wheel, "so that others can build against the lanes"
    assert not [name for name in in_wheel if name.endswith((".pyx", ".pxi", ".c"))]


def test_what_was_compiled_is_stripped(wheel):
    with zipfile.ZipFile(wheel) as archive:
        compiled = [name for name in archive.namelist() if name.endswith(".so")]
        assert compiled
        assert [name for name in compiled if b"\0.symtab\0" in archive.read(name)] == []


def outside(*argv: object, cwd: Path) -> subprocess.CompletedProcess[str]:
    """A command that sees none of this process' variables: a PYTHONPATH would lead to the tree."""
    return subprocess.run(
        [str(each) for each in argv], cwd=cwd, env={"PATH": "/usr/bin:/bin"}, capture_output=True, text=True
    )


def test_the_wheel_has_no_suite_and_no_result(tree, in_wheel):
    assert suites(tree), "there are some in the tree"
    assert not [name for name in in_wheel if name.rpartition("/")[2].startswith(("test_", "conftest"))]
    assert not [name for name in in_wheel if name.startswith("shmbridge/bench/results")]
    assert not [
        name
        for name in in_wheel
        if name.startswith("shmbridge/bench/") and not name.endswith((".py", ".pyi", ".so"))
    ]


def test_the_wheel_is_for_this_platform_and_has_its_licence(wheel, in_wheel):
    assert "linux" in wheel.name
    assert [name for name in in_wheel if name.endswith("/LICENSE")]


def test_a_fresh_environment_moves_a_record(fresh_python, tmp_path, bridge, segments):
    done = outside(
        fresh_python,
        "-c",
        f"""
import shmbridge, shmbridge.producers, shmbridge.consumers
from shmbridge._ext import header
assert not header.faults_compiled
with shmbridge.Consumer({bridge!r}) as consumer, shmbridge.Producer({bridge!r}, lane_bytes="64K") as producer:
    producer.put({{"tokens": [[1, 2, 3], [4, 5]], "scores": [1.0, 0.5], "prompt_length": [1, 1]}})
    with consumer.get(5) as record:
        print(record["tokens"].values.tolist(), shmbridge.__file__)
""",
        cwd=tmp_path,
    )
    assert done.stderr == ""
    values, _, where = done.stdout.strip().rpartition(" ")
    assert values == "[1, 2, 3, 4, 5]"
    assert where.startswith(str(fresh_python.parents[1])), "the wheel, not the tree"
    assert segments() == []


@pytest.mark.parametrize("name", ["producers", "consumers", "tests", "bench", "examples"])
def test_no_generic_name_is_installed(name, fresh_python, tmp_path):
    done = outside(fresh_python, "-c", f"import {name}; print({name}.__path__)", cwd=tmp_path)
    assert "ModuleNotFoundError" in done.stderr, done.stdout


def test_the_installed_package_measures_itself(fresh_python, tmp_path):
    argv = [
        fresh_python.with_name("shmbridge"),
        "bench",
        "--json",
        "--only",
        "limit,ring",
        "--seconds",
        "0.01",
        "--lengths",
        "16",
    ]
    done = outside(*argv, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert [row["contender"] for row in said["rows"]] == ["limit", "ring", "ring"]
    assert said["machine"]["revision"] == "installed"


def test_the_command_is_there(fresh_python, tmp_path):
    done = outside(fresh_python.with_name("shmbridge"), "--help", cwd=tmp_path)
    assert done.returncode == 0
    assert "shmbridge" in done.stdout


@pytest.mark.long
def test_the_demo_is_in_the_wheel(fresh_python, tmp_path):
    """Three steps are too few to learn: it says so, and all else is as it should be."""
    pytest.importorskip("torch")
    pytest.importorskip("atroposlib")
    argv = [fresh_python.with_name("shmbridge"), "demo", "--steps", "3", "--run-dir", "run", "--json"]
    done = outside(*argv, cwd=tmp_path)
    said = json.loads(done.stdout)
    assert (done.returncode, said["ok"]) == (1, False)
    assert [reason.split(" by ")[0] for reason in said["reasons"]] == ["the mean reward rose"]
    assert (said["summary"]["optimizer steps"], said["summary"]["leaked"]) == ("3", "0")
