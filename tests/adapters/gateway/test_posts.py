"""Posts in progress: what a refused one leaves behind, how long one is remembered, how posts take turns, and
lanes that are removed.
"""

from __future__ import annotations

import asyncio
import gc
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest
from gateway_clients import group

import shmbridge
from shmbridge.consumers.gateway import gateway as operations
from shmbridge.consumers.gateway import posts
from shmbridge.consumers.gateway.bodies import Posted
from shmbridge.consumers.gateway.gateway import Gateway
from shmbridge.consumers.gateway.limits import GatewayOptions
from shmbridge.consumers.gateway.posts import Post, PostLedger, RemoteLane
from shmbridge.consumers.gateway.strict import StrictGateway
from shmbridge.httpd.door import Refused
from shmbridge.segments import MOUNT


class Rows(list[Any]):
    """Rows that can be watched by weak reference."""


class Connection:
    """The connection of an answer; the test says whether it was read."""

    gone = False

    def carry(self, carried: Any) -> None:
        self.carried = carried

    def next_request(self) -> None:
        """Nothing."""


@pytest.fixture
def lane(bridge: str) -> Iterator[RemoteLane]:
    lane = RemoteLane(GatewayOptions(bridge, lane_bytes="64K"), "env", lambda name: None)
    yield lane
    lane.close()


def body(*groups: dict[str, Any]) -> Posted:
    return Posted([*groups], b"%016d" % groups[0]["tokens"][0][0])


async def post(ledger: PostLedger, lane: RemoteLane, *groups: dict[str, Any], lost: bool = False) -> int:
    """The status of a post of these groups, whose answer may be lost."""
    connection, status = Connection(), 200
    try:
        await ledger.take(body(*groups), lambda group: lane, connection, 0.0)
    except Refused as refused:
        status = refused.status
    if lost:
        connection.carried(False)
    return status


async def until(holds: Callable[[], Any], timeout_s: float = 20.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)


async def test_a_gateway_that_ends_refuses_a_post_whose_lane_is_being_opened(
    lane: RemoteLane, monkeypatch: pytest.MonkeyPatch
):
    opening, go_on = threading.Event(), threading.Event()

    def slowly(*arguments: Any, **options: Any) -> shmbridge.Producer:
        opening.set()
        go_on.wait(20)
        return shmbridge.Producer(*arguments, **options)

    monkeypatch.setattr(posts, "Producer", slowly)
    ledger = PostLedger(20.0)
    answer = asyncio.create_task(post(ledger, lane, group(1)))
    await until(opening.is_set)
    ledger.end()
    lane.close()
    go_on.set()
    assert await answer == 503
    assert ledger.counts["groups_total"] == 0


# -- what is kept
# ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lost", [False, True], ids=["answered", "answer lost"])
@pytest.mark.parametrize(("length", "status"), [(20_000, 422), (1_000, 503)], ids=["too big", "lane full"])
async def test_a_refused_post_keeps_no_body(lane: RemoteLane, lost: bool, length: int, status: int):
    """The body is freed with the answer, without a garbage collection."""
    ledger = PostLedger(0.05)
    answers = []
    gc.collect()
    gc.disable()
    try:
        while status not in answers:
            rows = Rows([[len(answers), *[1] * length]])
            gone = weakref.ref(rows)
            answers.append(
                await post(
                    ledger, lane, {"tokens": rows, "masks": [[1] * (length + 1)], "scores": [1.0]}, lost=lost
                )
            )
            del rows
            await asyncio.sleep(0)  # the task's end is told
            assert gone() is None, answers
            assert len(answers) < 50
    finally:
        gc.enable()


@pytest.mark.parametrize("kind", [Gateway, StrictGateway])
async def test_remembered_posts_are_forgotten_by_themselves(
    kind: type[Gateway], bridge: str, monkeypatch: pytest.MonkeyPatch
):
    """They are forgotten also when no further post comes."""
    monkeypatch.setattr(operations, "_LOOK_EVERY_S", 0.01)
    mode = kind(GatewayOptions(bridge))
    await mode.open()
    try:
        mode.ledger.remember(Post(Posted([], b"a digest")))
        monkeypatch.setattr(posts, "_REMEMBERED_S", 0.0)
        await until(lambda: not mode.ledger._lost)
    finally:
        await mode.close()


# -- whose turn it is
# ------------------------------------------------------------------------------------------------------------


class Endless:
    """A lane that always has room."""

    producer_id, posting = "endless", 0

    async def open(self) -> Any:
        return self

    def check(self, group: dict[str, Any]) -> None:
        """It fits."""

    async def put_async(self, *_: Any, **__: Any) -> int:
        return 1


@pytest.mark.parametrize("lanes", [1, 200])
async def test_a_body_of_very_many_groups_leaves_turns_to_others(lanes: int):
    endless, many = (
        [Endless() for _ in range(lanes)],
        [{"env_id": number, **group(1)} for number in range(50_000)],
    )
    turns, longest, last = 0, 0.0, time.thread_time()

    async def others() -> None:
        nonlocal turns, longest, last
        while True:
            await asyncio.sleep(0)
            now = time.thread_time()
            turns, longest, last = turns + 1, max(longest, now - last), now

    waiting = asyncio.create_task(others())
    ledger = PostLedger(60.0)
    await ledger.take(
        Posted(many, b"digest"), lambda group: endless[group["env_id"] % lanes], Connection(), 0.0
    )  # type: ignore[arg-type]
    waiting.cancel()
    with suppress(asyncio.CancelledError):
        await waiting
    assert ledger.counts["groups_total"] == 50_000
    assert [lane.posting for lane in endless] == [0] * lanes
    assert turns > 1000
    assert longest < 0.2  # of this thread's own work


# -- lanes that are lost
# ----------------------------------------------------------------------------------------------------------


def remove(lane: RemoteLane) -> None:
    assert lane.producer is not None
    (MOUNT / lane.producer.lane_name[1:]).unlink()


async def test_posts_go_on_in_a_new_lane_when_theirs_is_removed(
    lane: RemoteLane, make_consumer: Callable[..., shmbridge.Consumer]
):
    ledger, consumer = PostLedger(20.0), make_consumer()
    assert await post(ledger, lane, group(0)) == 200
    with consumer.get(5) as record:
        assert record.to_scored_data()["tokens"][0][0] == 0
    remove(lane)
    mark = 0
    while ledger.counts["lanes_replaced_total"] == 0:  # the names are looked at now and then
        mark += 1
        assert await post(ledger, lane, group(mark)) == 200
        with consumer.get(5) as record:
            assert record.to_scored_data()["tokens"][0][0] == mark
        await asyncio.sleep(0.05)
    assert await post(ledger, lane, group(0), group(1)) == 200
    assert ledger.counts["lanes_replaced_total"] == 1


async def more_posts_than_fit(ledger: PostLedger, lane: RemoteLane) -> tuple[list[asyncio.Task[int]], int]:
    """Ten posts under way, and how many of them are in the lane; the others wait for room."""
    waiting = [
        asyncio.create_task(
            post(ledger, lane, {"tokens": [[mark] * 2000], "masks": [[mark] * 2000], "scores": [1.0]})
        )
        for mark in range(10)
    ]
    await until(lambda: 0 < ledger.counts["groups_total"] == 10 - ledger.waiting)
    return waiting, ledger.counts["groups_total"]


async def test_posts_that_wait_for_room_in_a_lane_that_is_removed_all_go_on(lane: RemoteLane):
    ledger = PostLedger(60.0)
    waiting, fit = await more_posts_than_fit(ledger, lane)
    assert 2 < 10 - fit <= fit, "some are in, fewer wait"
    remove(lane)
    assert await asyncio.gather(*waiting) == [200] * 10
    assert (ledger.counts["lanes_replaced_total"], lane.posting, ledger.waiting) == (1, 0, 0)


async def test_a_lane_that_is_closed_refuses_posts_that_wait(lane: RemoteLane):
    """The gateway ends, or the environment has left: nothing opens another."""
    ledger = PostLedger(60.0)
    waiting, fit = await more_posts_than_fit(ledger, lane)
    lane.close()
    assert await asyncio.gather(*waiting) == [200] * fit + [503] * (10 - fit)
    assert lane.producer is None
