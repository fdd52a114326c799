"""Batch assembly: leased groups into padded or packed arrays, beside NumPy, torch and one memcpy of the same
bytes.

`pytest bench/test_bench_batch.py --benchmark-group-by=param:case`. One process, one thread; the groups lie in
a lane and stay there. Every maker's arrays are compared with every other's before anything is timed, and a
byte of each page is read inside the timed call. Rows have half to all of the tokens that the case says. The
NumPy and torch makers get their rows as ready lists: only joining and padding is timed. Knows public names
only.
"""

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

import shmbridge
from shmbridge.record import Group

SEED = 20260101
ROWS = 8
CASES = [
    (groups, length, layout)
    for groups in (8, 64)
    for length in (512, 2048)
    for layout in ("packed", "padded")
]
PER_TOKEN = {
    "tokens": np.int32,
    "loss_mask": np.uint8,
    "advantages": np.float32,
    "inference_logprobs": np.float32,
}
PAGE = 4096

Arrays = dict[str, Any]  # ndarrays or CPU tensors


@dataclass
class Case:
    """One batch to make, and its groups."""

    layout: str
    groups: list[Group]
    records: dict[str, list[np.ndarray]]  # column -> its values, record by record, in the lane
    rows: dict[str, list[np.ndarray]]  # column -> its values, row by row, in the lane
    lengths: np.ndarray
    put: Callable[[], None]  # the same groups once more
    consumer: shmbridge.Consumer

    @property
    def tokens(self) -> int:
        return int(self.lengths.sum())


def draw_group(rng: np.random.Generator, length: int) -> dict[str, Any]:
    lengths = rng.integers(length // 2, length + 1, ROWS)
    lengths[0] = length
    return {
        "tokens": [rng.integers(0, 150_000, n, dtype=np.int32) for n in lengths],
        "loss_mask": [(rng.random(n) < 0.75).astype(np.uint8) for n in lengths],
        "score": rng.normal(size=ROWS),
        "advantages": [rng.normal(size=n).astype(np.float32) for n in lengths],
        "inference_logprobs": [-rng.exponential(size=n).astype(np.float32) for n in lengths],
    }


@pytest.fixture(params=CASES, ids=lambda case: f"{case[0]}x{ROWS}x{case[1]}-{case[2]}")
def case(request: pytest.FixtureRequest) -> Iterator[Case]:
    count, length, layout = request.param
    bridge, rng = f"bench-batch-{os.getpid()}-{count}-{length}-{layout}", np.random.default_rng(SEED)
    drawn = [draw_group(rng, length) for _ in range(count)]
    with shmbridge.Producer(bridge, lane_bytes="64M") as producer, shmbridge.Consumer(bridge) as consumer:

        def put() -> None:
            for group in drawn:
                producer.put(group)

        put()
        groups = []
        for record in consumer.poll():
            groups.append(Group(record._group_size, 0.0))
            groups[-1].append(record)
        assert len(groups) == count
        records = {name: [group.records[0][name].values for group in groups] for name in PER_TOKEN}
        rows = {name: [row for group in groups for row in group.records[0][name]] for name in PER_TOKEN}
        records["score"] = [group.records[0]["score"] for group in groups]
        lengths = np.concatenate([group.records[0]["tokens"].lengths for group in groups])
        yield Case(layout, groups, records, rows, lengths, put, consumer)
        for group in groups:
            group.records[0].release()
        for each in (groups, records, rows):  # views in the lane, which pytest may keep with the test
            each.clear()
        del record, group
    shmbridge.clean(bridge, dry_run=False)


# -- makers
# ------------------------------------------------------------------------------------------------------------


def arrays_of(batch: shmbridge.Batch) -> Arrays:
    return {
        **{name: batch[name] for name in (*PER_TOKEN, "score")},
        "position_ids": batch.position_ids,
        "cu_seqlens": batch.cu_seqlens,
    }


def with_shmbridge(case: Case) -> Arrays:
    return arrays_of(shmbridge.Batch(case.groups, case.layout))


def with_numpy(case: Case) -> Arrays:
    """Concatenation packed; a zeroed array and a row at a time padded."""
    made: Arrays = {"score": np.concatenate(case.records["score"])}
    made["cu_seqlens"] = np.concatenate(([0], np.cumsum(case.lengths, dtype=np.int64))).astype(np.int32)
    longest = int(case.lengths.max())
    if case.layout == "packed":
        made |= {name: np.concatenate(case.records[name]) for name in PER_TOKEN}
        made["position_ids"] = np.arange(case.tokens, dtype=np.int32) - np.repeat(
            made["cu_seqlens"][:-1], case.lengths
        )
        return made
    for name, dtype in PER_TOKEN.items():
        made[name] = np.zeros((len(case.lengths), longest), dtype)
        for to, row in zip(made[name], case.rows[name], strict=True):
            to[: len(row)] = row
    positions = np.arange(longest, dtype=np.int32)
    made["position_ids"] = np.where(positions < case.lengths[:, None], positions, np.int32(0))
    return made


def with_torch(case: Case) -> Callable[[Case], Arrays]:
    """pad_sequence over tensors that are there already; a maker for this case."""
    torch = pytest.importorskip("torch")
    from torch.nn.utils.rnn import pad_sequence

    torch.set_num_threads(1)
    rows = {name: [torch.from_numpy(row.copy()) for row in case.rows[name]] for name in PER_TOKEN}
    scores = [torch.from_numpy(each.copy()) for each in case.records["score"]]
    lengths = torch.from_numpy(case.lengths.astype(np.int64))

    def make(case: Case) -> Arrays:
        made = {name: pad_sequence(rows[name], batch_first=True) for name in PER_TOKEN}
        positions = torch.arange(int(lengths.max()), dtype=torch.int32)
        made["position_ids"] = torch.where(positions < lengths[:, None], positions, 0)
        ends = torch.cumsum(lengths, 0).to(torch.int32)
        return {
            **made,
            "score": torch.cat(scores),
            "cu_seqlens": torch.cat((torch.zeros(1, dtype=torch.int32), ends)),
        }

    return make


def touched(arrays: Arrays) -> int:
    """Reads a byte of every page."""
    return sum(int(np.asarray(array).reshape(-1).view(np.uint8)[::PAGE].sum()) for array in arrays.values())


def size_of(arrays: Arrays) -> int:
    return sum(np.asarray(array).nbytes for array in arrays.values())


# -- figures
# ------------------------------------------------------------------------------------------------------------


def measure(
    benchmark: Any, case: Case, maker: str, arrays: Arrays, call: Callable[..., Any], **options: Any
) -> None:
    """Times `call` and notes what it moved."""
    benchmark.group = f"batches, {case.layout}"
    label = f"{len(case.groups)} groups of {ROWS} x {case.lengths.max()}, {maker}"
    benchmark.extra_info.update(
        label=label,
        bytes=size_of(arrays),
        tokens=case.tokens,
        tokens_per_operation=case.tokens,
        rows=len(case.lengths),
        groups=len(case.groups),
    )
    benchmark.pedantic(call, rounds=20, warmup_rounds=3, **options)


def check_same(mine: Arrays, reference: Arrays) -> None:
    assert mine.keys() == reference.keys()
    for name, array in reference.items():
        assert np.asarray(mine[name]).dtype == array.dtype, name
        assert np.array_equal(np.asarray(mine[name]), array), name


def test_shmbridge(benchmark: Any, case: Case) -> None:
    arrays = with_shmbridge(case)
    check_same(arrays, with_numpy(case))
    measure(benchmark, case, "shmbridge", arrays, lambda: touched(with_shmbridge(case)))


def test_shmbridge_from_the_lane(benchmark: Any, case: Case) -> None:
    """The whole wait of a learner without prefetch: the last batch released, records taken, groups formed,
    arrays gathered.
    """
    arrays = with_shmbridge(case)
    batches = case.consumer.batches(groups=len(case.groups), layout=case.layout, prefetch=0, hold="caller")
    held: list[shmbridge.Batch] = []

    def take() -> int:
        if held:
            held.pop().release()
        held.append(next(batches))
        return touched(arrays_of(held[0]))

    measure(benchmark, case, "shmbridge, from the lane", arrays, take, setup=case.put)
    held.pop().release()
    batches.close()


def test_numpy(benchmark: Any, case: Case) -> None:
    measure(benchmark, case, "numpy", with_numpy(case), lambda: touched(with_numpy(case)))


def test_torch_pad_sequence(benchmark: Any, case: Case) -> None:
    if case.layout == "packed":
        pytest.skip("pad_sequence pads")
    make = with_torch(case)
    check_same(make(case), with_numpy(case))
    measure(benchmark, case, "torch", make(case), lambda: touched(make(case)))


def test_memcpy(benchmark: Any, case: Case) -> None:
    """The limit: as many bytes from one array to another, both of them there already."""
    arrays = with_shmbridge(case)
    source = np.concatenate([array.reshape(-1).view(np.uint8) for array in arrays.values()])
    to = np.ones_like(source)

    def copy() -> int:
        np.copyto(to, source)
        return touched({"copy": to})

    measure(benchmark, case, "memcpy", {"copy": to}, copy)
