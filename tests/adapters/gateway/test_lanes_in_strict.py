"""`--compat strict` and three things unknown to the original: groups in lanes before a registration, attached
environments, fragments.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from gateway_clients import group

from shmbridge import Producer, Run
from shmbridge.consumers.gateway.environments import StateFile
from shmbridge.consumers.gateway.limits import GatewayOptions
from shmbridge.consumers.gateway.strict import queue
from shmbridge.consumers.gateway.strict.queue import StrictTaker
from shmbridge.control import ControlClient
from shmbridge.control.messages import Register
from shmbridge.testing import wait_until

RUN = Run(batch_size=4, max_token_len=64, num_steps=1000)
WISH = {"desired_name": "http", "max_token_length": 64, "weight": 1.0, "min_batch_allocation": None}


@pytest.fixture
def start(bridge: str) -> Iterator[Callable[..., StrictTaker]]:
    """Starts the consumer side of a strict gateway from the state that an earlier one saved. One at a time:
    it ends the one before.
    """
    ends: list[Callable[[], None]] = []

    def end() -> None:
        while ends:
            ends.pop()()

    def start(**left: Any) -> StrictTaker:
        end()
        state = StateFile(bridge)
        assert state.open()
        ends.append(state.close)
        if left:
            state.update(compat="strict", **left)
        taker = StrictTaker(GatewayOptions(bridge, compat="strict", lane_bytes="1M", lanes=8), state)
        ends.append(taker.close)
        taker.restore()
        return taker

    yield start
    end()


def read(taker: StrictTaker) -> bytes | None:
    """The next batch, proven read."""
    batch = taker.next_batch(False)
    if batch is None:
        return None
    taker.proven(batch.number)
    return batch.body


def stats(taker: StrictTaker, *names: str) -> list[float]:
    assert taker.consumer is not None
    found = taker.consumer.stats()
    return [found[name] for name in names]


# -- groups that are there before a trainer is
# ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "earlier", [None, Run(batch_size=16)], ids=["first run", "another run than an earlier gateway's"]
)
def test_groups_that_came_before_the_registration_are_served(
    start: Callable[..., StrictTaker], make_producer: Callable[..., Producer], earlier: Run | None
):
    producer = make_producer()
    for mark in (7, 8):
        producer.put(group(mark), foreign=True)
    taker = start(**({} if earlier is None else {"run": earlier}))
    taker.register(RUN)
    assert taker.status() == {"current_step": 0, "queue_size": 2}
    assert [b"[[%d,0,3]" % mark in (read(taker) or b"") for mark in (8, 7)] == [True, True], (
        "the newest first, as there"
    )
    assert read(taker) is None
    assert stats(taker, "released_total", "held", "queue_groups", "leases_dropped_total") == [2, 0, 0, 0]


def test_a_second_registration_keeps_the_queue_as_it_is(
    start: Callable[..., StrictTaker], make_producer: Callable[..., Producer]
):
    """It is void: neither the batch size nor what is formed already changes, and nothing is queued twice."""
    producer = make_producer()
    taker = start()
    taker.register(RUN)
    for mark in (1, 2):
        producer.put(group(mark), foreign=True)
    taker.register(Run(batch_size=8))
    assert taker.status()["queue_size"] == 2
    assert b"[[2,0,3]" in (read(taker) or b"")
    taker.register(Run(batch_size=8))
    assert b"[[1,0,3]" in (read(taker) or b"")
    assert read(taker) is None


# -- one control plane for attached environments, one table for those that post
# ----------------------------------------------------


def admit(bridge: str, producer: Producer, env_id: int | None = None) -> int:
    """Returns the number of an attached environment."""
    with ControlClient(bridge, role="env", name="attached") as client:
        return client.request(
            Register("attached", 64, 16, producer_id=producer.producer_id, env_id=env_id), 5.0
        ).env_id


@pytest.mark.parametrize("had", [None, 0], ids=["new", "with a number of an earlier hub"])
def test_attached_environments_have_numbers_of_their_own(
    start: Callable[..., StrictTaker], make_producer: Callable[..., Producer], bridge: str, had: int | None
):
    """Otherwise their groups would count as those of an environment that posts, with another group size, and
    fit into no batch.
    """
    taker = start()
    taker.register(Run(batch_size=16, max_token_len=64))
    read(taker)
    posting = taker.register_env(WISH | {"group_size": 8})["env_id"]
    producer = make_producer()
    taker.look()
    attached = admit(bridge, producer, had)
    assert attached != posting
    assert admit(bridge, producer, attached) == attached, "it keeps the number"
    producer.put(group(1, 16, env_id=attached), foreign=True)
    assert b"[[1,0,3]" in (read(taker) or b"")
    assert taker.upstream.queue.buffered == 0


# -- after a restart
# ------------------------------------------------------------------------------------------------------------


def test_the_control_plane_counts_on_after_a_restart(
    start: Callable[..., StrictTaker], make_producer: Callable[..., Producer]
):
    """Attached environments are told the step that HTTP tells."""
    taker = start(run=RUN, step=500, started=True)
    assert taker.consumer is not None
    assert (taker.status()["current_step"], taker.consumer.current_step) == (500, 500)
    make_producer().put(group(1), foreign=True)
    read(taker)
    assert (taker.status()["current_step"], taker.consumer.current_step) == (501, 501)
    taker.register(RUN)  # the same trainer, again
    assert (taker.status()["current_step"], taker.consumer.current_step) == (501, 501)


# -- fragments
# ------------------------------------------------------------------------------------------------------------


def test_fragments_of_a_producer_that_ended_are_discarded(
    start: Callable[..., StrictTaker], make_producer: Callable[..., Producer]
):
    """Its lane goes then. Whatever is whole is served."""
    taker = start()
    taker.register(RUN)
    producer = make_producer()
    producer.put(group(1, 2), group_id="half", group_size=4)
    producer.put(group(2), foreign=True)
    producer.close()

    def discarded() -> bool:
        taker.take_all()
        return stats(taker, "discarded_total{partial}") == [1]

    wait_until(discarded, 10)
    assert b"[[2,0,3]" in (read(taker) or b"")
    wait_until(lambda: (taker.take_all(), stats(taker, "held", "lanes_dead"))[1] == [0, 0], 10)


def test_fragments_that_are_late_are_discarded(
    start: Callable[..., StrictTaker], make_producer: Callable[..., Producer], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(queue, "_FRAGMENTS_WAIT_S", 0.5)
    taker = start()
    taker.register(RUN)
    make_producer().put(group(1, 2), group_id="late", group_size=4)
    taker.take_all()
    assert stats(taker, "discarded_total{partial}", "held") == [0, 1]

    def discarded() -> bool:
        taker.take_all()
        return stats(taker, "discarded_total{partial}", "held") == [1, 0]

    wait_until(discarded, 10)
