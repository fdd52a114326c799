"""verl's own gathering of two ranks' FSDP, through the checkpoint engine `shmbridge`."""

import asyncio
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.trainers.weights_contract import assert_published

EXAMPLES = str(Path(__file__).parents[3] / "examples")


def of_checkpoint_engine(model, bridge, rank):
    """verl's FSDP engine gathers, as `ActorRolloutRefWorker.update_weights` calls it."""
    from torch.distributed.fsdp import FullyShardedDataParallel, ShardedStateDictConfig, StateDictType
    from verl.workers.engine.fsdp.transformer_impl import FSDPEngine

    from shmbridge.consumers.verl.weights import ShmCheckpointEngine

    engine = ShmCheckpointEngine(bucket_size=1, is_master=rank == 0, bridge=bridge)
    actor = SimpleNamespace(
        module=model,
        model_config=SimpleNamespace(lora={}, hf_config=SimpleNamespace(model_type="qwen2")),
        _uses_fsdp2_cpu_offload_policy=True, _is_offload_param=False, _qat_enabled=False,  # nothing to stage
    )  # fmt: skip

    if hasattr(model, "_fsdp_wrapped_module"):  # as verl does when it has wrapped it
        kind = StateDictType.SHARDED_STATE_DICT
        FullyShardedDataParallel.set_state_dict_type(model, kind, ShardedStateDictConfig())

    def publish(step: int) -> None:
        weights, _ = FSDPEngine.get_per_tensor_param(actor)
        asyncio.run(engine.send_weights(weights, global_steps=step))

    return publish


@pytest.mark.timeout(300)
def test_two_ranks_publish_what_a_reader_finds_equal(bridge, monkeypatch):
    for name, value in {"VERL_USE_EXTERNAL_MODULES": "verl_on_cpu", "VERL_PLATFORM": "cpu"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("PYTHONPATH", EXAMPLES)
    assert_published(of_checkpoint_engine, bridge, "fsdp1", "fsdp2")
