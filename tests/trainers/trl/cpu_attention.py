"""What a CPU needs to run TRL's `AsyncGRPOTrainer`: the two things in it that are CUDA's only.

TRL's tree attention calls one function of a flash-attention kernel; `varlen_attention` computes the same from
its definition. `get_peak_flops_per_device` asks CUDA for the device's name, for a throughput metric.
"""

from types import SimpleNamespace

import torch
from trl.experimental.async_grpo import async_grpo_trainer, packing


def varlen_attention(query, key, value, cu_q, cu_k, max_q, max_k, *, softmax_scale, causal, window_size):
    """Attention of each segment of queries over its keys; causal from the last key on. No window."""
    assert causal
    assert window_size == (-1, -1)
    outputs = []
    for q0, q1, k0, k1 in zip(cu_q[:-1], cu_q[1:], cu_k[:-1], cu_k[1:], strict=True):
        heads = query.size(1) // key.size(1)
        q = query[q0:q1].transpose(0, 1)
        k, v = (each[k0:k1].repeat_interleave(heads, 1).transpose(0, 1) for each in (key, value))
        scores = q @ k.transpose(1, 2) * (softmax_scale or q.size(-1) ** -0.5)
        hidden = torch.ones(scores.shape[1:], dtype=torch.bool).triu(1 + k.size(1) - q.size(1))
        outputs.append(scores.masked_fill(hidden, -torch.inf).softmax(-1) @ v)
    return torch.cat(outputs, 1).transpose(0, 1)


def on_cpu(monkeypatch) -> None:
    """Replaces both, for one test."""
    monkeypatch.setattr(
        packing, "_flash_attn", lambda: SimpleNamespace(flash_attn_varlen_func=varlen_attention)
    )
    monkeypatch.setattr(async_grpo_trainer, "get_peak_flops_per_device", lambda *_: None)
