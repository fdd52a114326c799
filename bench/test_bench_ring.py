"""The ring on its own: sizes, forms, producers, small records, a check over the bytes; and how the memory
that the limit uses matters.
"""

import pytest

from shmbridge.bench.contract import Plan
from shmbridge.bench.groups import LARGE, MIDDLE, SIZES, SMALL, TINY

PREFILLED = 7000  # records, below the slots of one lane of 64 MiB
full = pytest.mark.full


def shapes(quick, others):
    return [pytest.param(shape, id=str(shape), marks=() if shape in quick else full) for shape in others]


@pytest.mark.benchmark(group="sizes")
@pytest.mark.parametrize("shape", shapes((SIZES[0], SMALL, MIDDLE, LARGE, SIZES[-1]), SIZES))
def test_arrays_by_size(measured, shape):
    measured(Plan("ring", shape))


@pytest.mark.benchmark(group="forms")
@pytest.mark.parametrize("shape", shapes((MIDDLE,), (SMALL, MIDDLE, LARGE)))
@pytest.mark.parametrize("form", ["row_arrays", "tensors", "lists"])
def test_forms(measured, form, shape):
    if form == "tensors":
        pytest.importorskip("torch")
    measured(Plan("ring", shape, form))


@pytest.mark.benchmark(group="producers")
@pytest.mark.parametrize("producers", [1, pytest.param(2, marks=full), 4, pytest.param(8, marks=full), 16])
@pytest.mark.parametrize("form", ["arrays", pytest.param("lists", marks=full)])
def test_producers(measured, form, producers):
    measured(Plan("ring", MIDDLE, form, producers))


@pytest.mark.benchmark(group="small records")
@pytest.mark.parametrize("look", ["every byte", "nothing"])
def test_get_live(measured, look):
    measured(Plan("ring", TINY, look=look))


@pytest.mark.benchmark(group="small records")
@pytest.mark.parametrize("look", ["every byte", "nothing"])
def test_poll_drains_a_full_lane(measured, look, quick):
    measured(
        Plan("ring", TINY, take="poll", look=look),
        count=PREFILLED,
        rounds=5 if quick else 20,
        filled_first=True,
    )


@pytest.mark.benchmark(group="checksum")
@pytest.mark.parametrize("checksum", ["none", "crc32", "xxh3"])
def test_with_a_check_over_the_bytes(measured, checksum):
    if checksum == "xxh3":
        pytest.importorskip("xxhash")
    measured(Plan("ring", MIDDLE, checksum=checksum))


@pytest.mark.benchmark(group="memory")
@pytest.mark.parametrize("stores", ["plain", "past the cache"])
@pytest.mark.parametrize("mib", [1, 4, pytest.param(8, marks=full), 16, pytest.param(32, marks=full), 64])
def test_how_far_memory_goes_round(measured, mib, stores):
    """The limit in smaller lanes, so in memory that comes again sooner; beside it, in the same lane, with
    plain stores.
    """
    measured(Plan("limit", MIDDLE, lane_bytes=mib << 20, stores=stores))
