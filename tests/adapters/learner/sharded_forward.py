"""Run once per rank: log-probabilities and gradients through a model wrapped for DDP or FSDP2 equal those of
the model alone.
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from transformers import Qwen2Config, Qwen2ForCausalLM

from shmbridge.consumers.learner.data.microbatch import micro_batches
from shmbridge.consumers.learner.data.training_rows import TrainingRows
from shmbridge.consumers.learner.model import attention, forward

CASES = [("ddp", False), ("ddp", True), ("fsdp2", False), ("fsdp2", True), ("fsdp2-head", False)]


def model(tied: bool) -> Qwen2ForCausalLM:
    torch.manual_seed(4)
    made = Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=28,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            initializer_range=0.2,
            tie_word_embeddings=tied,
        )
    )
    attention.use(made, attention.ROWS)
    return made


def rows(rank: int) -> TrainingRows:
    made = torch.Generator().manual_seed(rank)
    lengths = [5, 9, 3, 12]
    count = sum(lengths)
    trained = torch.ones(count, dtype=torch.bool)
    starts = [0, 5, 14, 17]
    trained[starts] = False
    return TrainingRows(
        tokens=torch.randint(0, 28, (count,), generator=made).int().numpy(),
        cu_seqlens=torch.tensor([*starts, count], dtype=torch.int32).numpy(),
        trained=trained.numpy(),
        advantages=torch.ones(count).numpy(),
        sampled_logprobs=torch.ones(count).numpy(),
        temperature=torch.tensor([1.0, 0.7, 1.2, 1.0]).numpy(),
    )


def whole(each: torch.Tensor) -> torch.Tensor:
    return each.full_tensor() if hasattr(each, "full_tensor") else each


def run(own: torch.nn.Module, rank: int, chunk: int | None) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Log-probabilities, and the gradient of their sum and that of their entropies."""
    own.zero_grad(set_to_none=True)
    found = []
    for micro in micro_batches(rows(rank), 20, torch.device("cpu"), "packed"):
        values, entropy = forward.trained_logprobs(
            own, micro, precision=torch.float32, chunk_tokens=chunk, with_entropy=True
        )
        assert entropy is not None
        (values.sum() + entropy.square().sum()).backward()
        found.append(values.detach())
    return torch.cat(found), [whole(each.grad) for each in own.parameters() if each.grad is not None]


def wrap(own: Qwen2ForCausalLM, wrapper: str) -> torch.nn.Module:
    if wrapper == "ddp":
        return torch.nn.parallel.DistributedDataParallel(own)
    from torch.distributed.fsdp import fully_shard

    for layer in own.model.layers:
        fully_shard(layer)
    if wrapper == "fsdp2-head":
        fully_shard(own.lm_head)
    fully_shard(own)
    return own


def check(wrapper: str, tied: bool) -> None:
    rank = dist.get_rank()
    alone = [run(model(tied), each, None) for each in range(dist.get_world_size())]
    # as both wrappers do
    gradients = [torch.stack(each).mean(0) for each in zip(*(one[1] for one in alone), strict=True)]
    wrapped = wrap(model(tied), wrapper)
    for chunk in (None, 4):
        values, found = run(wrapped, rank, chunk)
        torch.testing.assert_close(values, alone[rank][0], rtol=1e-5, atol=1e-5)
        assert len(found) == len(gradients)
        for one, other in zip(found, gradients, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4 * float(other.abs().max()))
        assert chunk is None or forward.leaves_logits_alone(wrapped)


def main() -> None:
    dist.init_process_group("gloo")
    for wrapper, tied in CASES:
        check(wrapper, tied)
        print("equal:", wrapper, "tied" if tied else "untied", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    assert os.environ["MASTER_ADDR"] == "127.0.0.1"
    main()
