"""Publishing weights: each rank writes its part, equal to the gathered tensors; with adapters only the
changed tensors are written again.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from shmbridge.consumers.learner.config.options import WeightsConfig
from shmbridge.consumers.learner.train.publishing import WeightsPublisher, first_version, weights_segment
from shmbridge.consumers.learner.world import ALONE
from shmbridge.weights import WeightsReader, WeightsWriter


@pytest.mark.parametrize(
    ("how", "dtype"),
    [("fsdp2", "float32"), pytest.param("fsdp2", "bfloat16", marks=pytest.mark.long), ("ddp", "bfloat16")],
)
def test_two_ranks_write_what_would_have_been_gathered(bridge, how, dtype):
    """Tensors of odd sizes, of one row, of one number, and one with two names; the second rank has no part of
    some.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ranks = []
    for rank in range(2):
        where = {
            "RANK": rank,
            "LOCAL_RANK": rank,
            "WORLD_SIZE": 2,
            "LOCAL_WORLD_SIZE": 2,
            "MASTER_PORT": port,
            "OMP_NUM_THREADS": 1,
        }
        environment = (
            os.environ | {name: str(value) for name, value in where.items()} | {"MASTER_ADDR": "127.0.0.1"}
        )
        command = [sys.executable, str(Path(__file__).with_name("publishing_rank.py")), bridge, how, dtype]
        ranks.append(
            subprocess.Popen(
                command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
            )
        )
    said = [rank.communicate(timeout=100) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], said
    assert said[0][0] == "equal\n"
    everything = {"even", "uneven", "one_row", "one", "many"}
    # larger than all other versions
    assert set(said[1][0].split()) == (everything if how == "fsdp2" else everything - {"many"})


def test_only_the_merged_tensors_of_a_model_with_adapters_are_written_again(bridge, tiny_model):
    pytest.importorskip("peft")
    from shmbridge.consumers.learner.model.lora import Lora, add_adapters

    model = tiny_model(1)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    add_adapters(model, Lora(rank=2, alpha=4.0, targets=("q_proj", "down_proj")), "base")
    adapted = {name for name in before if "q_proj.weight" in name or "down_proj.weight" in name}
    with WeightsReader(bridge) as reader, WeightsWriter(bridge) as writer:
        publisher = WeightsPublisher(model, torch.float32, ALONE, writer, None)
        publisher.publish(3)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora_" in name:
                    parameter.normal_()
        for version in (4, 5):
            publisher.publish(version)
        with reader.lease() as lease:
            assert lease.version == 5
            assert lease.changed_since(3) == lease.changed_since(4) == adapted
            assert lease.tensors.keys() == before.keys()
            merged = {
                name
                for name, tensor in before.items()
                if not np.array_equal(lease.tensors[name], tensor.numpy())
            }
            assert merged == adapted
        writer.close()
        # it does not know its predecessor's base, so it writes all tensors first
        with WeightsWriter(bridge) as successor:
            WeightsPublisher(model, torch.float32, ALONE, successor, None).publish(6)
        with reader.lease() as lease:
            assert lease.changed_since(5) == before.keys()


def test_a_learner_begins_above_what_readers_have_seen_though_its_segment_is_gone(bridge, tiny_model):
    """A learner of another model has replaced it, and died before its first version."""
    with WeightsReader(bridge) as reader:
        with WeightsWriter(bridge) as writer:
            writer.publish(7, [("first", np.zeros(4))])
        with (
            WeightsWriter(bridge) as writer,
            pytest.raises(ZeroDivisionError),
            writer.fill(8, [("second", "float32", (4,))]),
        ):
            raise ZeroDivisionError
        with weights_segment(bridge, WeightsConfig(), "float32", tiny_model(1), ALONE) as (
            publish,
            last_version,
        ):
            publish(first_version(None, -1, last_version))
            assert reader.version == 8
