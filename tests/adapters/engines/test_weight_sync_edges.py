"""`WeightSync` under two pushes at once, a cancellation, Ctrl-C, an event loop that would wait for itself,
wrapped models, and models of which a process has only a part.
"""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

import shmbridge
from shmbridge.consumers.engines.engine import Engine, EngineFailed
from shmbridge.consumers.vllm.follow import Follower
from shmbridge.consumers.weight_sync import WeightSync
from shmbridge.weights import WeightsReader, WeightsWriter


class Recording(Engine):
    """An engine that records its calls, and whether two ever ran at once."""

    def __init__(self, address="http://recording"):
        self.address, self.said, self.busy, self.overlapped = address, [], False, False
        self.arrived, self.may = threading.Event(), threading.Event()
        self.may.set()

    def _asked(self, what):
        self.overlapped |= self.busy
        self.busy = True
        self.arrived.set()
        assert self.may.wait(30)
        self.said.append(what)
        self.busy = False

    def update(self, update):
        self._asked(update.version)

    def version(self):
        return None

    def sleep(self, pause):
        self._asked("sleep")
        return True

    def wake(self):
        self._asked("wake")


@pytest.fixture
def engine():
    return Recording()


def weights(value=0.0):
    return {"a": np.full(4, value)}


async def until(condition):
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.005)


# --- at once, and cancelled ---------------------------------------------------------------------------------


async def test_pushes_at_once_come_one_after_the_other(bridge, engine):
    with WeightSync(bridge, engine) as sync, WeightsReader(bridge) as reader:
        engine.may.clear()
        pushes = [asyncio.create_task(sync.push_async(weights(number))) for number in range(3)]
        await until(engine.arrived.is_set)
        assert reader.version == 0
        engine.may.set()
        assert sorted(await asyncio.gather(*pushes)) == [0, 1, 2]
    assert (engine.said, engine.overlapped) == ([0, 1, 2], False)


async def test_a_cancelled_push_is_over_when_its_cancellation_comes(bridge, engine):
    """The caller may change the model after the cancellation; a push still running would write some tensors
    of before and some of after.
    """
    with WeightSync(bridge, engine) as sync:
        engine.may.clear()
        push = asyncio.create_task(sync.push_async(weights()))
        await until(engine.arrived.is_set)
        for _ in range(2):
            push.cancel()
            await asyncio.sleep(0.05)
            assert not push.done()
        engine.may.set()
        with pytest.raises(asyncio.CancelledError):
            await push
        assert (engine.said, sync.version) == ([0], 0)


async def test_a_cancelled_entry_gives_the_memory_back(bridge, engine):
    entered = False

    async def rollout(sync):
        nonlocal entered
        async with sync.updated_async(weights()):
            entered = True

    with WeightSync(bridge, engine) as sync:
        engine.may.clear()
        around = asyncio.create_task(rollout(sync))
        await until(engine.arrived.is_set)
        around.cancel()
        await asyncio.sleep(0)
        engine.may.set()
        with pytest.raises(asyncio.CancelledError):
            await around
    assert (engine.said, entered) == (["wake", 0, "sleep"], False)


def test_an_interrupted_push_is_over_before_an_engine_is_asked_again(bridge, monkeypatch):
    """Ctrl-C while one of two engines hangs: its thread goes on, and must not overlap with that of the next
    push.
    """
    quick, slow = Recording("http://quick"), Recording("http://slow")
    with WeightSync(bridge, [quick, slow]) as sync:
        slow.may.clear()

        def interrupted(self, *more):
            assert slow.arrived.wait(10)
            raise KeyboardInterrupt

        with monkeypatch.context() as patched:
            patched.setattr("concurrent.futures.Future.result", interrupted)
            with pytest.raises(KeyboardInterrupt):
                sync.push(weights(), version=0)
        threading.Timer(0.2, slow.may.set).start()
        assert sync.push(weights(1.0)) == 1
    assert (quick.said, slow.said, slow.overlapped) == ([0, 1], [0, 1], False)


# --- event loops that would wait for themselves
# --------------------------------------------------------------


@pytest.mark.parametrize("others", [[], [Recording()]])
async def test_a_push_that_would_wait_for_its_own_loop_is_refused_before_anything_is_written(bridge, others):
    async def never():
        pytest.fail("called")

    llm = SimpleNamespace(
        vllm_config=SimpleNamespace(model_config=SimpleNamespace(model="tiny", enable_sleep_mode=True)),
        **dict.fromkeys(
            (
                "pause_generation",
                "start_weight_update",
                "get_weight_version",
                "resume_generation",
                "is_sleeping",
            ),
            never,
        ),
    )
    with WeightSync(bridge, [llm, *others]) as sync:
        with pytest.raises(EngineFailed, match="await push_async"):
            sync.push(weights())
        with pytest.raises(EngineFailed, match="updated_async"), sync.updated(weights()):
            pytest.fail("entered")
        assert sync.version is None
    assert all(other.said == [] for other in others)


class InTheLoop:
    """An engine whose every step runs in its own event loop."""

    alive, in_doubt = True, False

    def __init__(self):
        self.loaded, self.loading, self.may = [], asyncio.Event(), asyncio.Event()

    async def is_paused(self):
        return False

    async def pause(self):
        pass

    async def load(self, version):
        self.loading.set()
        await self.may.wait()
        self.loaded.append(version)

    async def empty_caches(self):
        pass

    async def resume(self):
        pass


async def test_one_loop_may_publish_and_follow(bridge):
    """The follower holds a version while its engine loads it; the version after the next wants that slot."""
    live = InTheLoop()
    with WeightsWriter(bridge) as writer:
        follower = Follower(WeightsReader(bridge), live)
        await follower.start()
        await writer.publish_async(0, weights().items())
        await live.loading.wait()
        await writer.publish_async(1, weights().items())
        with pytest.raises(shmbridge.WeightsBusy, match="await publish_async") as raised:
            writer.publish(2, weights().items(), timeout_s=0.2)
        assert "a reader has held its slot" in str(raised.value)
        asyncio.get_running_loop().call_later(0.1, live.may.set)
        await writer.publish_async(2, weights().items())
        await until(lambda: follower.version == 2)
        await follower.close()
    assert live.loaded[0] == 0


# --- models that are wrapped
# ---------------------------------------------------------------------------------


def module():
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))


def published(bridge):
    with WeightsReader(bridge) as reader, reader.lease() as lease:
        return {name: array.copy() for name, array in lease.tensors.items()}


@pytest.mark.parametrize("how", ["compiled", "a compiled layer", "data parallel", "checkpointed", "both"])
def test_wrappers_are_not_in_the_names(bridge, engine, how):
    wrapped = module()
    match how:
        case "compiled":
            wrapped = torch.compile(wrapped)
        case "a compiled layer":
            wrapped[1] = torch.compile(wrapped[1])
        case "data parallel":
            wrapped = nn.DataParallel(wrapped)
        case "checkpointed":
            from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

            wrapped[0] = checkpoint_wrapper(wrapped[0])
        case "both":
            wrapped = torch.compile(nn.DataParallel(torch.compile(wrapped)))
    with WeightSync(bridge, engine) as sync:
        sync.push(wrapped)
        found = published(bridge)
    expected = dict(module().named_parameters())
    assert found.keys() == expected.keys()
    assert all((found[name] == parameter.detach().numpy()).all() for name, parameter in expected.items())


RANK = """
import os, sys
import torch
from torch import distributed, nn
from shmbridge.consumers.weight_sync import WeightSync
from shmbridge.errors import ConsumerTaken, WeightsMismatch
from shmbridge.weights import WeightsReader

bridge, how = sys.argv[1:]
distributed.init_process_group("gloo")
rank = distributed.get_rank()
torch.manual_seed(3)
model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
if how == "ddp":
    model = nn.parallel.DistributedDataParallel(model)
else:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))

from shmbridge.consumers.engines.engine import Engine
class Fake(Engine):
    address = "http://fake"
    update = lambda self, update: print("at", update.version, flush=True)
    version = lambda self: None

with WeightSync(bridge, Fake()) as sync:
    for each in range(2):
        if rank == each:
            try:
                sync.push(model)
            except (ConsumerTaken, WeightsMismatch) as refused:
                print(refused, flush=True)
        distributed.barrier()
    with WeightsReader(bridge) as reader:
        print("holds", sync.version, reader.version, flush=True)
        if reader.version is not None:
            with reader.lease() as lease:
                print(sorted(lease.tensors), flush=True)
    distributed.barrier()
distributed.destroy_process_group()
"""


@pytest.mark.parametrize("how", ["ddp", "fsdp2"])
def test_two_ranks_that_push_are_right_or_told_before_anything_is_written(bridge, how):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        where = {
            "WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free.getsockname()[1]),
            "OMP_NUM_THREADS": "1",
        }
    environment = os.environ | where | {"PYTHONPATH": str(Path(__file__).parents[3])}
    command = [sys.executable, "-c", RANK, bridge, how]
    ranks = [
        subprocess.Popen(
            command,
            env=environment | {"RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        said = [rank.communicate(timeout=100) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0, 0], said
    first, second = (lines.splitlines() for lines, _ in said)
    if how == "ddp":
        tensors = "['0.bias', '0.weight', '1.bias', '1.weight']"
        assert first == ["at 0", "holds 0 0", tensors]
        assert second[1:] == ["holds None 0", tensors]
        assert "one of several ranks" in second[0]
    else:
        for refused, holds in (first, second):
            assert "of which this process has a part" in refused
            assert "full_tensor()" in refused
            assert holds == "holds None None"
