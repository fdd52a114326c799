"""A record that was overwritten in shared memory: it is discarded and counted, and all other groups are
served.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator

import pytest
from gateway_clients import group, marks

from shmbridge import Producer, Run
from shmbridge.consumers.gateway.batches import Taker
from shmbridge.consumers.gateway.environments import StateFile
from shmbridge.consumers.gateway.limits import GatewayOptions
from shmbridge.consumers.gateway.strict.queue import StrictTaker
from shmbridge.segments.segment import MOUNT

RUN = Run(batch_size=8, max_token_len=64)
ROLE = "a role that stands nowhere else"


@pytest.fixture(params=["default", "strict"])
def taker(request: pytest.FixtureRequest, bridge: str) -> Iterator[Taker]:
    state = StateFile(bridge)
    assert state.open()
    options = GatewayOptions(bridge, compat=request.param, lanes=8)
    taker = StrictTaker(options, state) if request.param == "strict" else Taker(options, state, lambda: False)
    taker.restore()
    yield taker
    taker.close()
    state.close()


@pytest.fixture
def lanes(make_producer: Callable[..., Producer]) -> list[Producer]:
    return [make_producer(), make_producer()]


def put_bad(producer: Producer, mark: int) -> None:
    """Puts a group with the bytes that `overwrite` looks for."""
    producer.put(group(mark) | {"messages": [[{"role": ROLE, "content": "x"}]] * 4}, foreign=True)


def overwrite(producer: Producer) -> None:
    with (MOUNT / producer.lane_name[1:]).open("r+b") as lane:
        lane.seek(lane.read().index(f'"{ROLE}"'.encode()))
        lane.write(b"\x01")


def read(taker: Taker) -> list[int] | None:
    batch = taker.next_batch(False)
    if batch is None:
        return None
    taker.proven(batch.number)
    return marks(json.loads(batch.body)["batch"])


def counted(taker: Taker) -> dict[str, float]:
    stats = taker.stats()
    names = (
        "bridge_discarded_total{corrupt}",
        "groups_discarded_total",
        "batches_out",
        "batches_to_serve_again",
        "bridge_queue_groups",
    )
    return {name: stats[name] for name in names}


def test_an_unreadable_record_is_counted_and_others_are_served(
    taker: Taker, lanes: list[Producer], caplog: pytest.LogCaptureFixture
):
    taker.register(RUN)
    put_bad(lanes[0], 1)
    lanes[1].put(group(2), foreign=True)
    overwrite(lanes[0])
    assert read(taker) is None, "two groups make a batch, and there is one"
    assert taker.step() == 0
    assert "is discarded" in caplog.text
    assert counted(taker) == {
        "bridge_discarded_total{corrupt}": 1,
        "groups_discarded_total": 1,
        "batches_out": 0,
        "batches_to_serve_again": 0,
        "bridge_queue_groups": 1,
    }
    for mark in (3, 4, 5):
        lanes[1].put(group(mark), foreign=True)
    assert sorted([*(read(taker) or ()), *(read(taker) or ())]) == [2, 3, 4, 5]
    assert (read(taker), taker.step(), taker.stats()["bridge_held"]) == (None, 2, 0)
    assert taker.consumer is not None
    assert taker.consumer.current_step == 2


def test_a_batch_that_was_handed_out_already_loses_its_unreadable_group(taker: Taker, lanes: list[Producer]):
    """Its answer was lost, and then a group of it was overwritten: its readable groups come first."""
    taker.register(RUN)
    put_bad(lanes[0], 1)
    lanes[1].put(group(2), foreign=True)
    batch = taker.next_batch(False)
    assert batch is not None
    overwrite(lanes[0])
    taker.lost(batch.number)
    assert (read(taker), taker.step()) == (None, 0)
    lanes[1].put(group(3), foreign=True)
    assert read(taker) == [2, 3]
    assert (taker.step(), taker.stats()["bridge_held"]) == (1, 0)


def test_a_batch_of_unreadable_groups_only(taker: Taker, lanes: list[Producer]):
    taker.register(Run(batch_size=4, max_token_len=64))
    put_bad(lanes[0], 1)
    overwrite(lanes[0])
    assert (read(taker), taker.step()) == (None, 0)
    lanes[0].put(group(2), foreign=True)
    assert read(taker) == [2]


def test_an_overwritten_group_that_was_read_is_released(taker: Taker, lanes: list[Producer]):
    """In strict mode the group is the latest example and cannot be shown; the batch's records are released
    all the same.
    """
    taker.register(RUN)
    lanes[1].put(group(2), foreign=True)
    put_bad(lanes[0], 1)
    batch = taker.next_batch(False)
    assert batch is not None
    overwrite(lanes[0])
    taker.proven(batch.number)
    assert (taker.stats()["bridge_held"], taker.stats()["bridge_released_total"]) == (0, 2)
    assert taker.latest() is None
    assert taker.reset() == 0
