"""A trainer outside the tested releases is named once, with the releases that were tested."""

import ast
import tomllib
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import pytest

from shmbridge.consumers.feed import warn_if_untested

ROOT = Path(__file__).parents[3]


def ranges() -> Iterator[tuple[str, str, str]]:
    """What adapters were tested with: the arguments of `warn_if_untested`, or TESTED, which holds them."""
    for path in (ROOT / "consumers").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "TESTED":
                yield ast.literal_eval(node.value)
            elif isinstance(node, ast.Call) and ast.unparse(node).startswith("warn_if_untested('"):
                yield tuple(map(ast.literal_eval, node.args))


def test_an_extra_installs_only_tested_releases():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    wanted = {each for extra in extras.values() for each in extra}
    found = {each for each in ranges() if each[0] != "roll"}  # not on the package index
    assert {package for package, _, _ in found} == {"trl", "verl", "skyrl", "TransferQueue"}
    for package, first, before in found:
        assert f"{package}>={first},<{before}" in wanted


def test_a_release_in_the_range_is_not_mentioned(caplog):
    assert not warn_if_untested("numpy", "1.0", "99")
    assert not caplog.records


@pytest.mark.parametrize(("first", "before"), [("98", "99"), ("0.1", "0.2")])
def test_a_release_outside_is_named_with_the_range(caplog, first, before):
    assert warn_if_untested("numpy", first, before)
    assert all(each in caplog.text for each in ("numpy", version("numpy"), first, before))


def test_a_package_that_is_not_installed_is_named(caplog):
    assert warn_if_untested("no-such-package", "1", "2")
    assert "no-such-package is not installed" in caplog.text
