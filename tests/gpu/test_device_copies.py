"""Work on a device: registered lanes, copies on a side stream, packs through its attentions.

Skipped where there is no CUDA device; SHMBRIDGE_TEST_DEVICE=cpu uses the processor instead, and leaves out
only tests that need CUDA's own memory.
"""

from __future__ import annotations

import os

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from shmbridge.consumers.device_batch import DeviceCopies  # noqa: E402
from shmbridge.consumers.engines.published_tensors import as_tensor  # noqa: E402
from shmbridge.consumers.learner.model import attention, forward  # noqa: E402
from shmbridge.consumers.pinned import CudaDriver, PinnedLanes, PinnedWeights  # noqa: E402
from shmbridge.weights import WeightsReader, WeightsWriter  # noqa: E402

DEVICE = os.environ.get("SHMBRIDGE_TEST_DEVICE", "cuda")
pytestmark = pytest.mark.skipif(DEVICE == "cuda" and not torch.cuda.is_available(), reason="no CUDA device")
needs_cuda = pytest.mark.skipif(
    DEVICE != "cuda", reason="registers memory with CUDA, or compiles kernels for it"
)


def group(count, seed=0):
    random = np.random.default_rng(seed)
    return {
        "tokens": [random.integers(0, 1000, count, dtype=np.int32) for _ in range(4)],
        "inference_logprobs": [-random.random(count).astype(np.float32) for _ in range(4)],
    }


def test_values_on_the_device_are_those_of_the_ring(make_producer, make_consumer):
    producer, consumer = make_producer(lane_bytes="16M"), make_consumer()
    with DeviceCopies(DEVICE, ("tokens", "inference_logprobs")) as copies:
        for seed in range(4):
            producer.put(group(50_000, seed))
        for seed, batch in zip(
            range(4), consumer.batches(groups=1, prefetch=2, make=copies.batch, timeout_s=20), strict=False
        ):
            expected = group(50_000, seed)
            assert batch.tokens.device.type == DEVICE
            np.testing.assert_array_equal(batch.tokens.cpu().numpy(), np.concatenate(expected["tokens"]))
            np.testing.assert_array_equal(
                batch.inference_logprobs.cpu().numpy(), np.concatenate(expected["inference_logprobs"])
            )
            batch.release()


@needs_cuda
def test_a_registered_lane_is_pinned_memory_until_it_is_let_go(make_producer, make_consumer):
    producer, consumer = make_producer(lane_bytes="16M"), make_consumer()
    producer.put(group(10_000))
    record = consumer.get(10.0)
    torch.empty(1, device="cuda")
    lanes = PinnedLanes(CudaDriver(), piece_bytes=4 << 20)
    lanes.pin(record)
    if lanes.bytes == 0:
        pytest.skip("this machine registers no shared memory: see the log")
    values = torch.from_numpy(record["tokens"].values)
    assert values.is_pinned()
    lanes.close()
    assert not values.is_pinned()


@needs_cuda
def test_weights_are_the_same_bits_through_registered_memory(bridge):
    """Out of one model on the device and into another, before and after the segment is registered."""
    sizes = {"embedding": (1000, 64), "odd": (7,), "large": (2048, 1024), "scalar": ()}
    with WeightsWriter(bridge) as writer, WeightsReader(bridge) as reader:
        out, into = PinnedWeights(writer), PinnedWeights(reader)
        for version in range(4):
            torch.manual_seed(version)
            model = {name: torch.randn(size, device="cuda").bfloat16() for name, size in sizes.items()}
            writer.publish(version, model.items())
            out.pin("cuda")
            with reader.lease() as lease:
                into.pin("cuda")
                views = {name: as_tensor(lease.tensors[name], lease.dtypes[name]) for name in sizes}
                assert all(view.is_pinned() for view in views.values())
                engine = {name: view.cuda() for name, view in views.items()}
                assert all(torch.equal(engine[name], model[name]) for name in sizes)
                del views
        assert out.bytes == into.bytes > 0
        out.close()
        into.close()


@needs_cuda
def test_a_refused_registration_is_not_raised_by_the_next_kernel():
    torch.empty(1, device="cuda")
    assert CudaDriver().register(4096, 4096) != 0
    torch.zeros(1, device="cuda").add_(1)
    torch.cuda.synchronize()


@pytest.mark.parametrize(
    "implementation",
    ["sdpa", "eager", attention.ROWS, pytest.param("flex_attention", marks=needs_cuda), "flash_attention_2"],
)
def test_packed_rows_are_apart(implementation):
    from transformers import Qwen2Config, Qwen2ForCausalLM

    if implementation == "flash_attention_2":
        pytest.importorskip("flash_attn")
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=28,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
        )
    ).to(DEVICE)
    attention.use(model, implementation)
    precision = torch.bfloat16 if implementation == "flash_attention_2" else torch.float32
    assert attention.keeps_rows_apart(model, precision)
    assert forward.leaves_logits_alone(model)
