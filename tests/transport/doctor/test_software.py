"""Versions that fit and do not, and a compiled core that does not load."""

import os
import sys
import tomllib
from pathlib import Path

import pytest

from shmbridge._ext import header
from shmbridge.doctor import software

PROJECT = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())["project"]


def test_the_least_releases_are_those_of_the_project() -> None:
    assert [f"{name}>={least}" for name, least in software.NEEDED.items()] == PROJECT["dependencies"]
    extras = [each for group in PROJECT["optional-dependencies"].values() for each in group]
    for name, least in software.WELCOME.items():
        asked = {each.split(",")[0] for each in extras if each.startswith((f"{name}>", f"{name}="))}
        assert asked == {f"{name}{'==' if name == 'atroposlib' else '>='}{least}"}


def test_the_versions_here() -> None:
    found = software.versions()
    assert (found.name, found.state) == ("versions", "ok")
    for word in ("Python 3.", "shmbridge 0.", "of layout 2", "numpy ", "pyarrow ", "pyzmq ", "Linux "):
        assert word in found.text


def test_what_is_missing_or_old_fails() -> None:
    there = {**software.NEEDED, "numpy": "1.25.2", "pyzmq": None, "pyarrow": "15.0.0"}
    found = software.versions(there.get)
    assert found.state == "fail"
    assert "numpy 1.25.2" in found.text
    assert "pyzmq is not installed" in found.text
    assert found.fix == "pip install 'numpy>=1.26' 'pyzmq>=26'"


def test_optional_packages_are_not_imported() -> None:
    before = set(sys.modules)
    found = software.optional_packages()
    assert found.name == "optional packages"
    assert not {"torch", "vllm", "atroposlib"} & (set(sys.modules) - before)
    assert all(name in found.text for name in software.WELCOME)


@pytest.mark.parametrize(
    ("there", "state", "text", "fix"),
    [
        ({}, "ok", "without torch and vllm and atroposlib and verifiers", ""),
        ({"torch": "2.4.1+cpu"}, "ok", "torch 2.4.1+cpu, without vllm and atroposlib and verifiers", ""),
        ({"atroposlib": "0.4"}, "ok", "atroposlib 0.4, without torch and vllm and verifiers", ""),
        (
            {"torch": "2.3"},
            "warn",
            "torch 2.3, without vllm and atroposlib and verifiers",
            "pip install 'torch>=2.4'",
        ),
        ({"atroposlib": "0.5"}, "warn", "atroposlib 0.5", "pip install 'atroposlib==0.4.0'"),
    ],
)
def test_optional_packages(there, state, text, fix) -> None:
    found = software.optional_packages(there.get)
    assert found.state == state
    assert found.text.startswith(text)
    assert found.fix == fix


@pytest.mark.parametrize(
    ("has_gpu", "has_cuda", "said"), [(False, True, True), (True, True, False), (False, False, False)]
)
def test_torch_for_cuda_is_named_where_there_is_no_gpu(has_gpu, has_cuda, said) -> None:
    there = {"torch": "2.11.0"} | ({"nvidia-cublas": "13.0"} if has_cuda else {})
    found = software.optional_packages(there.get, lambda: has_gpu)
    assert found.state == "ok"
    assert ("4.6 GB less" in found.text) == said


def test_a_core_that_is_older_than_its_sources(tmp_path) -> None:
    """In a clone; an installed package has no setup.py beside it."""
    core = tmp_path / "shmbridge" / "_ext"
    core.mkdir(parents=True)
    for number, name in enumerate(("a.pyx", "b.pyx", "a.cpython-311.so", "b.cpython-311.so")):
        (core / name).write_text("")
        os.utime(core / name, (1000 + number, 1000 + number))
    (tmp_path / "setup.py").write_text("")
    assert software.extensions(core).state == "ok"
    os.utime(core / "a.pyx", (2000, 2000))
    found = software.extensions(core)
    assert (found.state, found.fix) == ("warn", "make build")
    assert "before a.pyx changed" in found.text
    (tmp_path / "setup.py").unlink()
    assert software.extensions(core).state == "ok"


def test_the_core_loads_here() -> None:
    found = software.extensions()
    assert (found.name, found.state) == ("extensions", "ok")
    modules = len(list(Path(header.__file__).parent.glob("*.pyx")))
    assert found.text.startswith(f"{modules} modules load, built for cpython-")
    assert software.atomics().text.startswith("lock-free, of 32 and 64 bits")


def test_a_core_that_is_not_built(tmp_path) -> None:
    (tmp_path / "ring.pyi").write_text("")
    found = software.extensions(tmp_path)
    assert found.state == "fail"
    assert found.text.startswith("shmbridge._ext.ring does not load: ModuleNotFoundError: No module named")
    assert "make build" in found.fix
