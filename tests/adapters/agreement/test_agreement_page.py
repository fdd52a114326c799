"""docs/reference/agreement.md has every comparison, within its tolerance; so are today's numbers, where TRL
and verl are installed.
"""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("agreement.py")
PAGE = Path(__file__).parents[3] / "docs" / "reference" / "agreement.md"


def on_the_page(name):
    (table,) = re.findall(rf"<!-- {name} -->\n(.*?)<!-- /{name} -->", PAGE.read_text(), re.DOTALL)
    return [[cell.strip() for cell in line.strip("|\n").split("|")] for line in table.splitlines()[2:]]


def test_every_number_on_the_page_is_within_its_tolerance():
    rows = on_the_page("agree")
    assert len(rows) > 30
    for package, what, value, gradient, tolerance in rows:
        assert float(value) < float(tolerance), (package, what)
        assert not gradient or float(gradient) < float(tolerance), (package, what)
    assert all(float(value) > 1e-3 and why for _, _, value, why in on_the_page("differ"))


def test_the_page_has_what_the_comparisons_find():
    if not (importlib.util.find_spec("trl") and importlib.util.find_spec("verl")):
        pytest.skip("TRL and verl are not both installed")
    ran = subprocess.run(
        [sys.executable, SCRIPT, "--json"], check=True, capture_output=True, text=True, timeout=100
    )
    agree, differ = {}, set()
    for package, what, value, gradient, tolerance, why in json.loads(ran.stdout):
        if why is None:
            agree[package, what] = max(value, gradient or 0.0), tolerance
        else:
            differ.add((package, what))
    stated = {(package, what): float(tolerance) for package, what, _, _, tolerance in on_the_page("agree")}
    assert stated == {name: tolerance for name, (_, tolerance) in agree.items()}
    assert all(found < stated[name] for name, (found, _) in agree.items())
    assert {(package, what) for package, what, *_ in on_the_page("differ")} == differ
