"""SkyRL's own gathering of two ranks' FSDP, through the hook behind its worker."""

import asyncio
import runpy
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from tests.trainers.weights_contract import assert_published

EXAMPLE = Path(__file__).parents[3] / "examples/skyrl_train.py"


def of_policy_worker(model, bridge, rank):
    """SkyRL's policy worker from `init_weight_sync_state` on, whose base class is `BridgeWeights`."""
    example = SimpleNamespace(**runpy.run_path(str(EXAMPLE), run_name="example"))
    example.without_cuda()
    from shmbridge.consumers.skyrl.weights import BridgeWeights  # before SkyRL, which needs that on 3.11
    from skyrl.backends.skyrl_train.workers.fsdp import fsdp_worker  # isort: skip

    client, worker = SimpleNamespace(bridge=bridge, engines=()), object.__new__(BridgeWeights)
    asyncio.run(worker.init_weight_sync_state(client, None))
    inner = getattr(model, "module", model)
    if hasattr(fsdp_worker, "FSDPWeightExtractor"):  # SkyRL 0.3
        extractor = fsdp_worker.FSDPWeightExtractor(inner)

        def publish(step: int) -> None:
            chunks = extractor.extract_weights(torch.float32)
            asyncio.run(worker._weight_transfer_sender.send_chunks(chunks))

        return publish
    names = example.vllm_names()
    base = names["vllm.distributed.weight_transfer.base"]
    base.materialize_full_tensor = lambda tensor: getattr(tensor, "full_tensor", lambda: tensor)()
    with mock.patch.dict(sys.modules, names):
        from skyrl.backends.skyrl_train.weight_sync.sources import FsdpWeightSource

    worker._build_weight_source = lambda dtype, backend: FsdpWeightSource(inner, dtype)
    config = SimpleNamespace(model_dtype="float32")
    return lambda step: asyncio.run(worker._sync_weights_to_inference_engines(client, config))


@pytest.mark.timeout(300)
def test_two_ranks_publish_what_a_reader_finds_equal(bridge):
    assert_published(of_policy_worker, bridge, "ddp", "fsdp2")
