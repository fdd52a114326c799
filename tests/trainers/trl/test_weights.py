"""Both trainers' hooks publish what two ranks hold in parts; `test_ranks.py` trains with FSDP 1 and 2."""

import functools
import time
from types import SimpleNamespace

import pytest
import torch

from tests.trainers.weights_contract import assert_published


def of_grpo_trainer(model, bridge, rank):
    """What `ShmGRPOTrainer` calls for each version."""
    from shmbridge.consumers.weight_sync import WeightSync, push_from_ranks

    sync = WeightSync(bridge, []) if rank == 0 else None
    return functools.partial(push_from_ranks, sync, model)


def of_async_trainer(model, bridge, rank):
    """TRL's own gathering, on all ranks, into `ShmWeightTransfer` on the first one."""
    from accelerate import PartialState
    from trl.experimental.async_grpo.async_grpo_trainer import AsyncGRPOTrainer

    from shmbridge.consumers.trl import ShmWeightTransfer

    PartialState(cpu=True)  # TRL's log asks it
    worker = SimpleNamespace(bridge=bridge, next_policy_version=lambda free: free, update_model_version=print)
    transfer = ShmWeightTransfer(worker) if rank == 0 else None
    accelerator = SimpleNamespace(
        is_main_process=rank == 0, wait_for_everyone=torch.distributed.barrier, device=torch.device("cpu"),
        unwrap_model=lambda model: getattr(model, "module", model),
    )  # fmt: skip
    trainer = SimpleNamespace(
        accelerator=accelerator, model=model, weight_transfer=transfer, rollout_worker=worker, model_version=0
    )
    trainer._streaming_iter = functools.partial(AsyncGRPOTrainer._streaming_iter, trainer)
    if transfer is not None:
        transfer.init_weight_transfer()
    return lambda step: AsyncGRPOTrainer._sync_weight_merged(trainer, time.time())


@pytest.mark.timeout(300)
def test_two_ranks_publish_what_a_reader_finds_equal(bridge):
    assert_published(of_grpo_trainer, bridge, "ddp", "fsdp1", "fsdp2")


@pytest.mark.timeout(300)
@pytest.mark.parametrize("adapters", ["", "1"])
def test_so_do_two_ranks_of_zero_3(bridge, adapters, monkeypatch):
    pytest.importorskip("deepspeed")
    monkeypatch.setenv("ADAPTERS", adapters)
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    assert_published(of_grpo_trainer, bridge, "zero3")


@pytest.mark.timeout(300)
def test_so_does_the_async_trainer(bridge):
    assert_published(of_async_trainer, bridge, "ddp", "fsdp2")
