"""What a BridgeDataset releases, and when: all of its rows and columns in docs/reference/releases.md."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from torch.utils.data import DataLoader

import shmbridge
from shmbridge.consumers.dataset import BridgeDataset

PUT = 5
ROWS = 2  # of a group
RECORDS = 10_000


class Stop(Exception):
    pass


@dataclass(frozen=True)
class Way:
    """One way to read: the data set's options, items of a group, and how many groups are released once
    `items` were handed out.
    """

    name: str
    options: dict[str, Any]
    items: int
    released: Callable[[int], int]


WAYS = [
    *(Way(f"batches {n}", {"prefetch": n}, 1, lambda items: items - 1) for n in (0, 2)),
    Way("rows", {"items": "rows"}, ROWS, lambda items: (items - 1) // ROWS),
    *(Way(f"checkpoint {n}", {"hold": "checkpoint", "prefetch": n}, 1, lambda items: 0) for n in (0, 2)),
    Way("rows until a checkpoint", {"items": "rows", "hold": "checkpoint"}, ROWS, lambda items: 0),
    Way("a rank", {"rank": 0, "world_size": 1}, 1, lambda items: items - 1),
]
HANDED_OUT = 3
ways = pytest.mark.parametrize("way", WAYS, ids=[way.name for way in WAYS])


@pytest.fixture
def producer(bridge: str) -> Iterator[shmbridge.Producer]:
    with shmbridge.Producer(bridge, lane_bytes="4M") as producer:
        for number in range(PUT):
            producer.put({"tokens": [[number]] * ROWS, "loss_mask": [[1]] * ROWS})
        yield producer


@pytest.fixture
def data(bridge: str, producer: shmbridge.Producer, way: Way) -> BridgeDataset:
    return BridgeDataset(bridge, groups=1, timeout_s=10.0, **way.options)


@pytest.fixture
def left(make_consumer: Callable[[], shmbridge.Consumer]) -> Callable[[], list[int]]:
    """Returns the groups that the next consumer gets."""

    def take() -> list[int]:
        gc.collect()
        return [record.meta.sequence for record in make_consumer().poll()]

    return take


def from_(first: int) -> list[int]:
    return list(range(first, PUT))


@ways
def test_a_step_releases_what_the_last_one_yielded_or_nothing(
    way: Way, data: BridgeDataset, left: Any
) -> None:
    handed_out = HANDED_OUT + way.items
    with data:
        items = iter(data)
        for _ in range(handed_out):
            next(items)
    assert left() == from_(way.released(handed_out))


# a rank's shares are released by its steps alone
@pytest.mark.parametrize("way", WAYS[:-1], ids=lambda way: way.name)
def test_release_of_a_data_set_releases_what_was_handed_out(way: Way, data: BridgeDataset, left: Any) -> None:
    with data:
        items = iter(data)
        for _ in range(HANDED_OUT):
            next(items)
        data.release()
    assert left() == from_(HANDED_OUT // way.items)  # a batch of which rows are left stays


@ways
def test_break_releases_nothing(way: Way, data: BridgeDataset, left: Any) -> None:
    with data:
        for number, _item in enumerate(data, 1):
            if number == HANDED_OUT:
                break
        gc.collect()
        # of a rank's, those that the hub has heard of
        assert data.stats()["released_total"] <= way.released(HANDED_OUT)
        assert data.stats()["leases_dropped_total"] == 0
    assert left() == from_(way.released(HANDED_OUT))


@ways
@pytest.mark.parametrize("caught", ["inside", "outside"])
def test_an_exception_releases_nothing(way: Way, data: BridgeDataset, left: Any, caught: str) -> None:
    def read() -> None:
        for number, _item in enumerate(data, 1):
            if number == HANDED_OUT:
                raise Stop

    if caught == "inside":
        with data, pytest.raises(Stop):
            read()
    else:
        with pytest.raises(Stop), data:
            read()
    assert left() == from_(way.released(HANDED_OUT))


@ways
@pytest.mark.parametrize("end", ["close", "with", "collected"])
def test_the_end_of_a_data_set_releases_nothing(way: Way, data: BridgeDataset, left: Any, end: str) -> None:
    items = iter(data)
    for _ in range(HANDED_OUT):
        next(items)
    if end == "with":
        data.__exit__(None, None, None)
    else:
        data.close()
    if end == "collected":
        del items
    assert left() == from_(way.released(HANDED_OUT))


@pytest.mark.parametrize("end", ["break", "exception", "close", "with"])
@pytest.mark.parametrize("kind", ["batches", "rows"])
def test_a_worker_releases_at_its_own_steps_and_nothing_at_an_end(
    bridge: str, producer: shmbridge.Producer, left: Any, until: Any, end: str, kind: str
) -> None:
    """The worker is asked for one item ahead: when two are taken it makes or awaits its third, and has
    released two.
    """
    data = BridgeDataset(bridge, groups=1, items=kind, timeout_s=30.0)
    loader = DataLoader(data, batch_size=None, num_workers=1, prefetch_factor=1)
    taken = 2 if kind == "batches" else 2 * ROWS
    items = iter(loader)
    try:
        for _ in range(taken):
            next(items)
        until(lambda: producer.stats()["held"] <= PUT - 2)
        if end == "exception":
            raise Stop
        if end in ("close", "with"):
            data.__exit__(None, None, None) if end == "with" else data.close()
    except Stop:
        pass
    del items, loader  # ends the worker
    assert left() == from_(2)


@pytest.mark.parametrize(("persistent", "lost"), [(True, 2), (False, 1)])
def test_a_break_in_a_worker_loses_what_the_page_says(
    bridge: str, make_producer: Any, until: Any, persistent: bool, lost: int
) -> None:
    """With two items asked for ahead, items in the loader are dropped, and a worker that ends still holds its
    last one.
    """
    producer = make_producer(lane_bytes="1M")
    for number in range(12):
        producer.put({"tokens": [[number]], "loss_mask": [[1]]}, timeout_s=10.0)
    data = BridgeDataset(bridge, groups=1, timeout_s=30.0)
    loader = DataLoader(
        data, batch_size=None, num_workers=1, prefetch_factor=2, persistent_workers=persistent
    )
    for item in loader:
        if item["tokens"].tolist() == [2]:
            # the worker holds the last one that it was asked for
            until(lambda: producer.stats()["held"] <= 12 - 4)
            break
    again = next(iter(loader))
    assert (again["tokens"].tolist(), again["redelivered"].tolist()) == ([3 + lost], [not persistent])


@ways
def test_ten_thousand_records_pass_and_no_lease_is_dropped(bridge: str, make_producer: Any, way: Way) -> None:
    producer, at_once = make_producer(lane_bytes="4M"), 100
    with BridgeDataset(bridge, groups=at_once, timeout_s=10.0, **way.options) as data:
        items, numbers = iter(data), []
        for first in range(0, RECORDS, at_once):
            for number in range(first, first + at_once):
                producer.put({"tokens": [[number]], "loss_mask": [[1]]}, timeout_s=10.0)
            for item in itertools.islice(items, at_once if data.items == "rows" else 1):
                numbers += item["tokens"].tolist()
            if data.hold == "checkpoint":
                data.release()
        data.release()
        stats = data.stats()
    assert numbers == list(range(RECORDS))
    assert (stats["leases_dropped_total"], stats["leases_returned_total"]) == (0, 0)
    with shmbridge.Consumer(bridge) as hub:
        assert [record.meta.sequence for record in hub.poll()] == (
            [] if data.world_size is None else from_last(at_once)
        )


def from_last(count: int) -> list[int]:
    """The last share of a rank, which no later step has released."""
    return list(range(RECORDS - count, RECORDS))
