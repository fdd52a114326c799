"""A writer far ahead of its reader keeps pace with it, so that records stay in the cache; what that may cost
where it gains nothing is bounded. In a time that only moves when the writer looks at the clock: pace.c.
"""

import json
import shutil
import subprocess
from pathlib import Path

import pytest

import shmbridge

HERE = Path(__file__).parent
CORE = Path(shmbridge.__file__).parent / "_ext" / "c"
WINDOW = 4 << 20  # pace.c's
US = 1000


@pytest.fixture(scope="module")
def pace(tmp_path_factory):
    """Runs a writer and a reader; what came of it."""
    if (cc := shutil.which("cc")) is None:
        pytest.skip("no C compiler")
    program = tmp_path_factory.mktemp("pace") / "pace"
    flags = ["-std=gnu11", "-O1", "-Wall", "-Wno-unused-function", f"-I{CORE}"]
    subprocess.run([cc, *flags, str(HERE / "pace.c"), "-o", str(program)], check=True)

    def run(size: int, puts: int, put_us: int, period_us: int = 0, batch: int = 0) -> dict[str, int]:
        arguments = (size, puts, put_us * US, period_us * US, batch)
        done = subprocess.run(
            [program, *map(str, arguments)], check=True, capture_output=True, text=True, timeout=60
        )
        return json.loads(done.stdout)

    return run


@pytest.mark.parametrize(
    ("size", "put_us", "period_us"),
    [(35 << 10, 4, 13), (35 << 10, 4, 45), (280 << 10, 10, 17), (2 << 20, 80, 300)],
)
def test_a_faster_writer_is_as_fast_as_its_reader_and_its_records_stay_in_the_cache(
    pace, size, put_us, period_us
) -> None:
    done = pace(size, 3000, put_us, period_us)
    assert done["puts"] == 3000
    assert done["most_bytes"] <= max(WINDOW, 4 * size)
    assert done["waited_ns"] > 0
    assert done["longest_ns"] <= 2 * period_us * US, "about as long as until a release"


def test_a_writer_that_its_reader_keeps_up_with_never_waits(pace) -> None:
    assert pace(35 << 10, 3000, 4, period_us=3)["waits"] == 0


def test_a_writer_without_a_reader_never_waits(pace) -> None:
    assert pace(35 << 10, 1000, 4)["waits"] == 0


def test_records_too_large_for_the_cache_are_not_waited_for(pace) -> None:
    assert pace(8 << 20, 30, 400, period_us=500)["waits"] == 0


@pytest.mark.parametrize(
    ("size", "put_us", "batch"), [(35 << 10, 4, 200), (280 << 10, 10, 32), (2 << 20, 80, 8)]
)
def test_a_reader_that_releases_many_at_once_costs_few_waits(pace, size, put_us, batch) -> None:
    done = pace(size, 10_000, put_us, batch=batch)
    assert done["puts"] == 10_000
    assert done["waits"] <= 20
    assert done["waited_ns"] <= 0.02 * 10_000 * put_us * US
    assert done["most_bytes"] == batch * size


def test_a_slow_reader_costs_few_waits_until_the_lane_is_full(pace) -> None:
    done = pace(35 << 10, 4000, 4, period_us=5000)
    assert done["waits"] <= 12
    assert done["waited_ns"] <= 12 * 60 * US
