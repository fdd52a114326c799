"""The tables of docs/reference/agreement.md: how far TRL's and verl's numbers are from ours, as
test_*_agree.py find it.

    PYTHONPATH=build/peers python tests/adapters/agreement/agreement.py            # print them
    PYTHONPATH=build/peers python tests/adapters/agreement/agreement.py --write    # into the page
    PYTHONPATH=build/peers python tests/adapters/agreement/agreement.py --json     # one list per row
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import sys
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
PAGE = HERE.parents[2] / "docs" / "reference" / "agreement.md"
SUITES = [HERE / "test_losses_agree.py", HERE / "test_advantages_agree.py"]
Row = list[Any]  # package, what, of the value, of the gradient, tolerance, why they differ on purpose


class Collector:
    """Takes the rows out of the tests' reports."""

    def __init__(self) -> None:
        self.rows: list[Row] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call":
            self.rows += [row for name, row in report.user_properties if name == "agreement"]


def measured() -> list[Row]:
    """Run the comparisons and return their rows; exits with pytest's words if one fails."""
    collector = Collector()
    with contextlib.redirect_stdout(sys.stderr):
        status = pytest.main(["-q", "-p", "no:cacheprovider", *map(str, SUITES)], plugins=[collector])
    if status:
        raise SystemExit(int(status))
    return collector.rows


def tables(rows: list[Row]) -> dict[str, str]:
    """Return Markdown by name: "agree" and "differ"."""

    def number(value: float | None) -> str:
        return "" if value is None else f"{value:.0e}" if value else "0"

    agree = "".join(
        f"| {package} | {what} | {number(value)} | {number(gradient)} | {tolerance:.0e} |\n"
        for package, what, value, gradient, tolerance, why in rows
        if why is None
    )
    differ = "".join(
        f"| {package} | {what} | {value:.1e} | {why} |\n" for package, what, value, _, _, why in rows if why
    )
    return {
        "agree": (
            "| package | loss or estimator | value | gradient | tolerance |\n"
            "| --- | --- | --- | --- | --- |\n"
        )
        + agree,
        "differ": "| package | estimator | value | why |\n| --- | --- | --- | --- |\n" + differ,
    }


def versions() -> str:
    """Return what was compared with what."""
    return ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("trl", "verl", "torch"))


def write(rows: list[Row]) -> None:
    """Put the tables and the versions into the page, between its markers."""
    text = PAGE.read_text()
    for name, table in {**tables(rows), "versions": versions() + "\n"}.items():
        before, marker, rest = text.partition(f"<!-- {name} -->\n")
        text = before + marker + table + rest[rest.index(f"<!-- /{name} -->") :]
    PAGE.write_text(text)


if __name__ == "__main__":
    found = measured()
    if not found:
        raise SystemExit("neither TRL nor verl is installed: see tests/adapters/agreement/peers.txt")
    if "--write" in sys.argv:
        write(found)
    elif "--json" in sys.argv:
        print(json.dumps(found))
    else:
        print("\n".join(tables(found).values()))
