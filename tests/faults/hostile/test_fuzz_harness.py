"""The C fuzz targets build, their seeds hold good records, and a short seeded run finds nothing.

The long run is a make target.
"""

import shutil
import struct
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from . import seeds

HERE = Path(__file__).parent
CORE = HERE.parents[2] / "shmbridge" / "_ext" / "c"
SANITIZED = [
    "-std=gnu11",
    "-g",
    "-O1",
    "-Wall",
    "-Wno-unused-function",
    "-fsanitize=address,undefined",
    "-fno-sanitize-recover=undefined",
]

Run = Callable[..., str]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Builds a target and runs it; its output. Any sanitizer's report is a failure."""
    compiler = shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        pytest.skip("no C compiler")
    folder = tmp_path_factory.mktemp("fuzz")
    probe = subprocess.run(
        [compiler, "-fsanitize=address,undefined", "-xc", "-", "-o", "/dev/null"],
        input="int main(void){return 0;}",
        text=True,
        capture_output=True,
    )
    if probe.returncode:
        pytest.skip(f"{compiler} has no sanitizers here")

    def build_and_run(target: str, *arguments: object) -> str:
        program = folder / target
        if not program.exists():
            subprocess.run(
                [compiler, *SANITIZED, f"-I{CORE}", str(HERE / f"{target}.c"), "-o", str(program)], check=True
            )
        ended = subprocess.run(
            [str(program), *map(str, arguments)], cwd=folder, capture_output=True, text=True, timeout=120
        )
        assert ended.returncode == 0, ended.stderr[-3000:]
        return ended.stdout

    return build_and_run


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("seeds")
    seeds.main(folder)
    return sorted(folder.glob("lane-*"))


def test_the_seeds_are_good_lanes(run: Run, corpus: list[Path]) -> None:
    """Otherwise the fuzzer would reach only the first refusal."""
    said = run("fuzz_lane", 0, 1, *corpus)
    wanted = sum(len(puts) + 1 for puts in seeds.groups().values()) + seeds.GROWING
    assert f"{len(corpus)} seeds hold {wanted} good records" in said


def test_a_short_run_over_the_reader(run: Run, corpus: list[Path]) -> None:
    assert "no finding" in run("fuzz_lane", 2, 7, *corpus)


def test_a_short_run_over_the_writer(run: Run, corpus: list[Path]) -> None:
    assert "no finding" in run("fuzz_writer", 2, 7, *sorted(corpus[0].parent.glob("writer-*")))


def test_a_scribbled_slot_gives_a_producer_no_memory_outside_its_lane(run: Run, tmp_path: Path) -> None:
    """It commits, its slot's extent is overwritten and released, and it claims again."""
    slots = 4096 + 256 * 64 + 4096
    steps = [
        seeds.step(0, value=4000),
        seeds.step(2),
        seeds.step(7, at=slots + 16, value=1 << 30),
        seeds.step(7, at=slots + 24, value=1 << 20),
        seeds.step(4),
        seeds.step(6),
        seeds.step(0, value=3000),
        seeds.step(2),
    ]
    (tmp_path / "scribbled").write_bytes(b"".join(steps))
    run("fuzz_writer", tmp_path / "scribbled")


def test_steps_are_as_long_as_the_target_thinks() -> None:
    assert len(seeds.step(0)) == struct.calcsize("<4BIQ") == 16
