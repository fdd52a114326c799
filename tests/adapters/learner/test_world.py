"""A world of one rank, and collectives of several, with threads in place of ranks."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from shmbridge.consumers.feed import lost_peer
from shmbridge.consumers.learner.stopping import Stopped, StopSignals
from shmbridge.consumers.learner.world import ALONE, PeerFailed, World, joined

LEAVING = """
import sys
from contextlib import suppress
from shmbridge.consumers.learner.world import joined
sys.setswitchinterval(60.0)  # another thread gets the interpreter's lock only where this one waits
with suppress(KeyError), joined("cpu", 60.0) as world:
    from torch.distributed import group
    held = group.WORLD  # as FSDP2 does, for as long as the model lives
    for word in range(20):
        assert world.all_gather(world.rank + word) == [word, word + 1]
    if "raises" in sys.argv:
        raise KeyError
"""


class Table:
    """The collectives of a test's ranks: each stores a value and gets all."""

    def __init__(self, size):
        self.barrier = threading.Barrier(size, timeout=10.0)
        self.words = [None] * size

    def gathered(self, rank, word):
        self.words[rank] = word
        self.barrier.wait()
        words = list(self.words)
        self.barrier.wait()
        return words


class ThreadWorld(World):
    def __init__(self, table, rank):
        self.table, self.rank, self.size = table, rank, len(table.words)

    def all_gather(self, word):
        return self.table.gathered(self.rank, word)


def each_of(size, does):
    """Return what each rank returned or raised."""
    table = Table(size)

    def run(rank):
        try:
            return does(ThreadWorld(table, rank))
        except Exception as error:
            return error

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(run, range(size)))


def test_collectives_of_a_single_rank_return_its_own_value():
    values = np.array([1.0, 2.0])
    assert ALONE.is_main
    assert ALONE.all_reduce_sum(values) is values
    assert ALONE.all_reduce_max(values) is values
    assert ALONE.broadcast("word") == "word"
    with pytest.raises(ValueError, match="own"), ALONE.together():
        raise ValueError("own")


def test_a_failure_of_one_is_known_to_all():
    def does(world):
        with world.together():
            if world.rank == 1:
                raise ValueError("no such token")
        return "on"

    first, second, third = each_of(3, does)
    assert isinstance(second, ValueError)
    for other in (first, third):
        assert isinstance(other, PeerFailed)
        assert str(other) == "rank 1: ValueError: no such token"


@pytest.mark.parametrize("how", ["returns", "raises"])
def test_ranks_that_leave_right_after_a_word_end_in_order(how):
    """Threads of Gloo that still held a tensor when the interpreter ended aborted one learner in ten; four at
    once, as it takes luck.
    """
    with contextlib.ExitStack() as ports:
        free = [ports.enter_context(socket.socket()) for _ in range(4)]
        for each in free:
            each.bind(("127.0.0.1", 0))
        numbers = [str(each.getsockname()[1]) for each in free]
    ranks = []
    for port, rank in itertools.product(numbers, ("0", "1")):
        where = {
            "RANK": rank,
            "LOCAL_RANK": rank,
            "WORLD_SIZE": "2",
            "LOCAL_WORLD_SIZE": "2",
            "MASTER_PORT": port,
            "OMP_NUM_THREADS": "1",
        }
        environment = os.environ | where | {"MASTER_ADDR": "127.0.0.1"}
        ranks.append(
            subprocess.Popen(
                [sys.executable, "-c", LEAVING, how], env=environment, stderr=subprocess.PIPE, text=True
            )
        )
    said = [rank.communicate(timeout=100)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0] * 8, said


def test_ranks_go_on_together_when_none_fails():
    def does(world):
        with world.together():
            word = world.rank
        return world.broadcast(word)

    assert each_of(3, does) == [0, 0, 0]


@pytest.mark.parametrize("size", [None, "1"])
def test_a_world_of_one_joins_nobody_with_or_without_torchrun(monkeypatch, size):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    if size:
        monkeypatch.setenv("WORLD_SIZE", size)
    with joined("cpu", 1.0) as world:
        assert world is ALONE


def test_only_errors_of_collectives_are_taken_for_a_lost_peer():
    assert lost_peer(
        RuntimeError("[/x/third_party/gloo/gloo/transport/tcp/pair.cc:1] Connection closed by peer")
    )
    assert not lost_peer(RuntimeError("CUDA out of memory"))


def test_noted_signals_raise_nothing():
    with StopSignals() as stops, stops.noted():
        with stops.held():
            signal.raise_signal(signal.SIGTERM)
        assert stops.received == signal.SIGTERM  # and nothing was raised
    with StopSignals() as stops:
        with stops.noted():
            pass
        with pytest.raises(Stopped):
            signal.raise_signal(signal.SIGINT)
