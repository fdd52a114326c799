"""The verbs on aarch64: seq_cst loads must be ldar, never ldapr, where a handshake relies on them."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest
from harness import CORE, HERE

CROSS = "/usr/aarch64-linux-gnu/include"
COMPILERS = {
    "gcc": ["aarch64-linux-gnu-gcc"],
    "gcc with rcpc": ["aarch64-linux-gnu-gcc", "-march=armv8.4-a"],
    "clang with rcpc": ["clang", "--target=aarch64-linux-gnu", "-isystem", CROSS, "-march=armv8.4-a"],
}
STORE, LOAD, ACQUIRE = r"stlr", r"ldar", r"ldap?u?r"
# The ordered instructions that each function must have, in this order; others may be between them: see
# docs/memory-model.md.
WANTED = {
    "commit": [STORE, STORE, STORE, LOAD],  # generation, origin_newest of a relay's lane, tail, hub_sleeping
    "release": [STORE, LOAD],  # released, space_waiting
    "sleeps": [LOAD, STORE, LOAD],  # doorbell, hub_sleeping, a tail
    "arms": [LOAD, STORE, LOAD],  # the same
    "wait_space": [LOAD, STORE, LOAD],  # space_bell, space_waiting, a released
    "is_released": [LOAD],
    "adopt": [LOAD, ACQUIRE],  # tail, a generation
    "next": [ACQUIRE],
    "look": [ACQUIRE],
    "hand_out": [STORE],
}


@pytest.fixture(scope="module", params=COMPILERS)
def ordered(request, tmp_path_factory) -> dict[str, list[str]]:
    """Function of core_functions.c -> its loads and stores with an order, as they stand."""
    command = COMPILERS[request.param]
    if shutil.which(command[0]) is None or not Path(CROSS).is_dir():
        pytest.skip(f"no {command[0]} for aarch64: apt install gcc-aarch64-linux-gnu libc6-dev-arm64-cross")
    assembly = tmp_path_factory.mktemp("aarch64") / "core.s"
    source = str(HERE / "core_functions.c")
    command = [*command, "-std=gnu11", "-O2", "-w", "-S", f"-I{CORE}", source, "-o", str(assembly)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, list[str]] = {}
    function = ""
    for line in assembly.read_text().splitlines():
        if label := re.match(r"([a-z_]+):", line):
            function = label[1]
        elif instruction := re.match(r"\s+(stlu?r|ldar|ldapu?r)\s", line):
            found.setdefault(function, []).append(instruction[1])
    return found


@pytest.mark.parametrize("function", WANTED)
def test_handshakes_are_stlr_and_ldar(ordered, function):
    pattern = ".* ".join(f"\\b{each}\\b" for each in WANTED[function])
    assert re.search(pattern, " ".join(ordered[function])), (
        f"{function}: {ordered[function]}, wanted {WANTED[function]}"
    )
