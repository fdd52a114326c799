"""A writer or a reader is SIGKILLed: what was put comes, nothing is left, nobody waits."""

import os
import signal

import pytest
import ray
import torch
import transfer_queue as tq
from tensordict import TensorDict

from shmbridge.segments import value_names

KEYS = [f"k{n}" for n in range(8)]


def put(keys, partition):
    fields = {"x": torch.arange(len(keys) * 1000.0).view(len(keys), 1000)}
    tq.kv_batch_put(keys, partition, TensorDict(fields, batch_size=len(keys)))
    return os.getpid()


def hold(keys, partition):
    global held
    held = tq.kv_batch_get(keys, partition)
    return float(held["x"].values().sum())


def kill(actor) -> None:
    os.kill(ray.get(actor.pid.remote()), signal.SIGKILL)
    with pytest.raises(ray.exceptions.RayActorError):
        ray.get(actor.pid.remote())


def test_what_a_killed_writer_put_comes(partition, peers, there):
    writer = peers()
    assert ray.get(writer.run.remote(put, KEYS, partition)) != os.getpid()
    kill(writer)
    wanted = torch.arange(8000.0)
    assert torch.equal(tq.kv_batch_get(KEYS, partition)["x"].values(), wanted)
    assert there(hold, KEYS, partition) == float(wanted.sum())


def test_a_killed_reader_leaves_nothing(queue, partition, peers):
    put(KEYS, partition)
    reader = peers()
    ray.get(reader.run.remote(hold, KEYS, partition))
    kill(reader)
    assert torch.equal(tq.kv_batch_get(KEYS, partition)["x"].values(), torch.arange(8000.0))
    tq.kv_clear(KEYS, partition)
    assert value_names(queue) == []
