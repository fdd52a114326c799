"""Scaling: the cost of a group as trajectories grow longer, and with more lanes.

CPU time of one thread that puts, then takes.

How often a byte of values passes between the processor and memory determines the cost of large groups.
`python -m shmbridge.bench.passes` counts it with a simulated cache that is smaller than a group, as `perf`
does where the processor's own counters can be read:

| | read | written | what |
| --- | --- | --- | --- |
| put from arrays | 1.0 | 1.0 | the source, copied column by column into the lane; whether it is finite is
  seen while it is in the cache |
| put from lists | 10.4 | 1.0 | no array in between: 8 bytes of pointer and a number object of 32 for each
  number of 4, written once |
| take, in place | 1.0 | 0 | the reader's own look at the values; the ring adds the record's index, about a
  kilobyte |
| packed batch | 1.5 | 1.5 | one copy of each column, and the position of each token, 8 bytes beside 17 |
| padded batch | 2.8 | 4.4 | the same, then each column again into a rectangle of zeros |

A dense-core token has 17 bytes: 4 of id, 1 of mask, 12 of three floats. As Python lists it is four pointers
and number objects (a mask that is the token itself is told by its pointer): 3 floats and an int of 32 bytes
each with what the allocator adds, 5 lists of pointers, and those of the tokens a second time: 176 bytes, 10.4
times as many. Where a line has left the cache the processor reads it before a store to it, so "written"
counts twice on the memory bus but for stores that go past the cache.

Groups are of 8, lanes of 64 MiB in all: one of 64, or 64 of one. "full" fills the lane before it is emptied,
so that every line comes from memory; "one at a time" puts and takes one group, which stays in the cache as
long as it fits.
"""

import pytest

from shmbridge.bench.groups import SMALL, TINY, Shape
from shmbridge.bench.machine import LANE_BYTES
from shmbridge.bench.scaling import Cost, OneThread

full = pytest.mark.full
LENGTHS = [
    pytest.param(length, marks=() if length in (256, 16384, 131072) else full)
    for length in (256, 1024, 4096, 16384, 65536, 131072)
]
IN_ALL = 1600  # groups over all lanes


def medians(costs: list[Cost], shape: Shape) -> dict[str, float]:
    """Returns the medians of the rounds, figure by figure."""
    each = [cost.figures(shape) for cost in costs]
    return {key: sorted(one[key] for one in each)[len(each) // 2] for key in each[0]}


@pytest.mark.parametrize("form", ["lists", "arrays"])
@pytest.mark.parametrize("length", LENGTHS)
def test_longer_trajectories(benchmark, per_operation, quick, form, length):
    benchmark.group = f"longer trajectories, {form}"
    shape, seconds, rounds = Shape(length=length), 0.05 if quick else 0.2, 3 if quick else 5
    with OneThread(shape, form) as lane:
        costs, single = [], []
        lane.turn(lane.fits)
        benchmark.pedantic(lambda: costs.append(lane.turns(lane.fits, seconds)), rounds=rounds)
        per_operation([cost.seconds_per_group for cost in costs], tokens=shape.tokens)
        for _ in range(rounds):
            single.append(lane.turns(1, seconds / 2))
        benchmark.extra_info["label"] = str(shape)
        benchmark.extra_info.update(
            {
                "form": form,
                "rows": shape.rows,
                "length": length,
                "bytes": shape.bytes,
                "lane_bytes": LANE_BYTES,
                "in_lane": lane.fits,
            }
            | {"full": medians(costs, shape), "one at a time": medians(single, shape)}
        )
    assert sum(cost.groups for cost in costs) >= rounds


def fill(lane: OneThread, groups: int) -> None:
    lane.put(groups)


@pytest.mark.parametrize("layout", ["packed", "padded"])
@pytest.mark.parametrize("length", LENGTHS)
def test_longer_batches(benchmark, per_operation, quick, layout, length):
    benchmark.group = f"longer trajectories, {layout} batches"
    shape = Shape(length=length)
    with OneThread(shape, "arrays") as lane:
        groups, spent = min(8, lane.fits), []
        for _ in range(2):
            lane.put(groups)
            lane.gather(groups, layout)
        benchmark.pedantic(
            lambda: spent.append(lane.gather(groups, layout)),
            setup=lambda: fill(lane, groups),
            rounds=5 if quick else 10,
        )
    per_operation([each / groups for each in spent], operations=groups, tokens=shape.tokens)
    middle = sorted(spent)[len(spent) // 2] * 1e9 / groups
    benchmark.extra_info.update(
        {
            "label": str(shape),
            "layout": layout,
            "rows": shape.rows,
            "length": length,
            "groups": groups,
            "lane_bytes": LANE_BYTES,
        }
        | {
            "us_per_group": middle / 1e3,
            "ns_per_token": middle / shape.tokens,
            "ns_per_byte": middle / shape.bytes,
        }
    )


@pytest.mark.parametrize("shape", [TINY, SMALL], ids=str)
@pytest.mark.parametrize("lanes", [1, pytest.param(4, marks=full), pytest.param(16, marks=full), 64])
def test_more_lanes(benchmark, per_operation, quick, lanes, shape):
    """The same number of groups over all lanes; then through one of them while the others are idle; then a
    poll of nothing.
    """
    benchmark.group = f"more lanes, {shape}"
    rounds, seconds = (3, 0.05) if quick else (5, 0.2)
    with OneThread(shape, "arrays", lanes, LANE_BYTES // lanes) as all_lanes:
        costs, one_busy, empty = [], [], []
        all_lanes.turn(IN_ALL)
        benchmark.pedantic(lambda: costs.append(all_lanes.turns(IN_ALL, seconds)), rounds=rounds)
        per_operation([cost.seconds_per_group for cost in costs], tokens=shape.tokens)
        for _ in range(rounds):
            one_busy.append(all_lanes.turns(IN_ALL // 64, seconds / 2, lanes=1))
            empty.append(1e6 * all_lanes.poll_empty(500))
        benchmark.extra_info["label"] = f"{lanes} lane{'s' if lanes > 1 else ''}"
        benchmark.extra_info.update(
            {"lanes": lanes, "lane_bytes": LANE_BYTES // lanes, "groups": IN_ALL, "bytes": shape.bytes}
            | {
                "all busy": medians(costs, shape),
                "one busy": medians(one_busy, shape),
                "empty_poll_us": sorted(empty)[rounds // 2],
            }
        )
