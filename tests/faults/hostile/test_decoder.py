"""Recordings and parcels that are damaged, or that lie: refused with the place, or harmless.

The programs run as processes of their own, so that one that ends is a finding.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
CORE = HERE.parents[2] / "shmbridge" / "_ext" / "c"
# What record_odd may hold although no recorder writes it: it is what its record says.
HARMLESS_ODD = {"good", "null rows", "no rows", "compressed"}

ROW_CHECKS = r"""
#include <stdio.h>
#include <stdlib.h>
#include "row_check.h"

int main(void) {
    uint32_t lies[][3] = {{3, 2, 0}, {900, 0xFFFFFC81u, 0}, {0, 6, 0}, {5, 0, 1}, {0xFFFFFFFFu, 1, 5}};
    for (int at = 0; at < 5; at++) {
        uint64_t *to = malloc(3 * sizeof *to);
        uint8_t *values = calloc(5, 4);
        printf("%d ", row_checks_write(to, values, 5, lies[at], NULL, 3, 4, 1, 0, 1));
        free(to), free(values);
    }
}
"""


def run(
    folder: Path, program: str, *arguments: str, every: str | None = None
) -> subprocess.CompletedProcess[str]:
    """Runs a program of this folder; `every`: which rows carry checks."""
    variables = {name: value for name, value in os.environ.items() if name != "SHMBRIDGE_CHECK_ROWS"}
    if every is not None:
        variables["SHMBRIDGE_CHECK_ROWS"] = every
    return subprocess.run(
        [sys.executable, str(HERE / program), *arguments],
        cwd=folder,
        env=variables,
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )


def flipped(folder: Path, *arguments: str) -> None:
    ended = run(folder, "flipped_bits.py", *arguments)
    assert ended.returncode == 0, ended.stdout + ended.stderr[-3000:]
    assert ended.stdout.count(" 0 wrong") == 3, ended.stdout


def fuzzed(folder: Path, *arguments: str) -> None:
    ended = run(folder, "fuzz_decoder.py", *arguments)
    assert ended.returncode == 0, ended.stdout[-5000:] + ended.stderr[-3000:]
    assert ", 0 findings" in ended.stdout


def test_a_flipped_bit_is_refused_with_its_place_or_changes_nothing(tmp_path: Path) -> None:
    flipped(tmp_path, "--flips", "150", "--seed", "2")


def test_a_short_run_of_the_fuzzer(tmp_path: Path) -> None:
    fuzzed(tmp_path, "--seconds", "5", "--seed", "3")


@pytest.mark.parametrize("every", ["0", "1", None])
def test_no_lie_ends_a_process_or_quarantines_a_lane(tmp_path: Path, every: str | None) -> None:
    ended = run(tmp_path, "lies.py", every=every)
    lines = [json.loads(line) for line in ended.stdout.splitlines()]
    assert ended.returncode == 0, f"{lines[-1]}: ended with {ended.returncode}, {ended.stderr[-3000:]}"
    found = [line for line in lines if "lie" in line]
    assert not [line for line in found if line["wrong"] or line["quarantined"]]
    accepted = [line["lie"].split(": ", 1) for line in found if not line["refused"]]
    assert {lie for where, lie in accepted if where == "record_odd"} == HARMLESS_ODD
    for where, least in (("record_odd", 40), ("column", 20), ("group", 30), ("parcel", 100)):
        assert sum(line["lie"].startswith(where) and bool(line["refused"]) for line in found) >= least, where
    assert {"group", "parcel"} <= {where for where, lie in accepted if lie.startswith("good")}, (
        "nothing gets in"
    )


def test_row_checks_read_no_byte_behind_the_values(tmp_path: Path) -> None:
    """Whoever calls them with lengths that make more values than there are."""
    compiler = shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        pytest.skip("no C compiler")
    program = tmp_path / "row_checks"
    command = [compiler, "-xc", "-", f"-I{CORE}", "-g", "-fsanitize=address,undefined", "-o", str(program)]
    built = subprocess.run(command, input=ROW_CHECKS, text=True, capture_output=True, check=False)
    if "sanitizer" in built.stderr or "asan" in built.stderr:
        pytest.skip(f"{compiler} has no sanitizers here")
    assert built.returncode == 0, built.stderr
    ended = subprocess.run([str(program)], capture_output=True, text=True, check=False)
    assert (ended.stdout.split(), ended.returncode) == (["0", "-1", "-1", "-1", "-1"], 0), ended.stderr[
        -2000:
    ]


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", ["1", "2", "3"])
def test_a_thousand_flipped_bits_of_each_format_and_a_minute_of_the_fuzzer(tmp_path: Path, seed: str) -> None:
    flipped(tmp_path, "--flips", "1000", "--seed", seed)
    fuzzed(tmp_path, "--seconds", "60", "--seed", seed)
