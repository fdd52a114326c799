"""Log-probabilities of trained tokens, and entropy: from logits, or in chunks from hidden states.

In chunks all logits are never in memory at once: the output layer is applied to a chunk of tokens at a time,
and once more in the backward pass. 131,072 tokens of a vocabulary of 151,936 would need 80 GB of float32
logits, and as much again for their gradient; chunks of 1024 need 0.6 GB, twice.

Letters: n trained tokens, in any order, D hidden width, V vocabulary, c tokens of a chunk. Logarithms are
natural (nats).
"""

from __future__ import annotations

from typing import Any, Literal, overload

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

import shmbridge


def log_distribution(logits: Tensor, temperature: Tensor) -> Tensor:
    """Returns the log-probabilities of the distribution that was sampled from: (n, V) float32, nats.

    Args:
        logits: (n, V), the model's logits at the positions *before* the trained tokens, any float type.
        temperature: (n,) float32, sampling temperature, > 0; it divides the logits, as the sampler did.
    """
    return torch.log_softmax(logits.float() / temperature.unsqueeze(-1), dim=-1)


def chosen_logprobs(log_probabilities: Tensor, targets: Tensor) -> Tensor:
    """Returns the log-probability of each trained token: (n,) float32, nats.

    Args:
        log_probabilities: (n, V) float32, from `log_distribution`.
        targets: (n,) int64, the trained tokens.
    """
    return log_probabilities.gather(-1, targets.unsqueeze(-1)).squeeze(-1)


def entropy(log_probabilities: Tensor) -> Tensor:
    """Returns the entropy of each distribution, in nats: (n, V) float32 -> (n,) float32."""
    return -(log_probabilities.exp() * log_probabilities).sum(dim=-1)


@overload
def chosen_logprobs_chunked(
    hidden: Tensor,
    lm_head_weight: Tensor,
    targets: Tensor,
    temperature: Tensor | float,
    chunk_tokens: int,
    *,
    with_entropy: Literal[False] = False,
) -> Tensor: ...


@overload
def chosen_logprobs_chunked(
    hidden: Tensor,
    lm_head_weight: Tensor,
    targets: Tensor,
    temperature: Tensor | float,
    chunk_tokens: int,
    *,
    with_entropy: Literal[True],
) -> tuple[Tensor, Tensor]: ...


def chosen_logprobs_chunked(
    hidden: Tensor,
    lm_head_weight: Tensor,
    targets: Tensor,
    temperature: Tensor | float,
    chunk_tokens: int,
    *,
    with_entropy: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Returns the log-probability of each target under softmax(hidden @ lm_head_weight.T / temperature).

    Differentiable once, with respect to `hidden` and `lm_head_weight`. Beyond inputs and gradients it holds
    at most two float32 tensors of (c, V) and two of the weight's size at a time. The weight's gradient is
    added up in float32 whatever the weight's type. The product is made in the type that a linear layer would
    use: autocast's where that is on, else that of `hidden`.

    Args:
        hidden: (n, D) floating, the model's last hidden states *before* the chosen tokens.
        lm_head_weight: (V, D) floating, the output layer, without bias.
        targets: (n,) int64, the chosen tokens, each in 0 .. V - 1.
        temperature: (n,) float32 or a number, sampling temperature, > 0; it divides the logits.
        chunk_tokens: c, tokens per chunk, at least 1.
        with_entropy: return the entropy of each distribution too, with gradient.

    Returns:
        (n,) float32, nats, and with `with_entropy` a second one; float64 if `hidden` is float64.

    Raises:
        ValueError: shapes disagree, or chunk_tokens is below 1.
    """
    count, vocabulary = hidden.shape[0], lm_head_weight.shape[0]
    if (
        hidden.ndim != 2
        or lm_head_weight.ndim != 2
        or hidden.shape[1] != lm_head_weight.shape[1]
        or targets.shape != (count,)
    ):
        raise ValueError(
            f"hidden {tuple(hidden.shape)}, lm_head_weight {tuple(lm_head_weight.shape)} and targets "
            f"{tuple(targets.shape)} do not fit: give (n, D), (V, D) and (n,)"
        )
    if chunk_tokens < 1:
        raise ValueError(
            f"chunk_tokens {chunk_tokens} is not a number of tokens: give at least 1, as "
            f"{2**28 // vocabulary} for 1 GiB"
        )
    exact = torch.promote_types(hidden.dtype, torch.float32)
    heat = torch.as_tensor(temperature, dtype=exact, device=hidden.device).expand(count)
    logprobs, entropy = _Chunked.apply(hidden, lm_head_weight, targets, heat, chunk_tokens, with_entropy)
    return (logprobs, entropy) if with_entropy else logprobs


class _Chunked(torch.autograd.Function):
    """The forward and the backward pass, chunk by chunk."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        temperature: Tensor,
        chunk: int,
        with_entropy: bool,
    ) -> tuple[Tensor, Tensor]:
        kind = hidden.device.type
        product = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden.dtype
        logprobs = temperature.new_empty(hidden.shape[0])
        entropy = temperature.new_empty(hidden.shape[0] if with_entropy else 0)
        with torch.autocast(kind, enabled=False):
            typed = weight.to(product)
            for part in _parts(hidden.shape[0], chunk):
                logs = _chunk_distribution(hidden[part], typed, temperature[part], product)
                logprobs[part] = logs.gather(1, targets[part, None]).squeeze(1)
                if with_entropy:
                    entropy[part] = -(logs.exp().mul_(logs).sum(1))
                del logs  # before the next chunk's are made
        ctx.save_for_backward(hidden, weight, targets, temperature, entropy)
        ctx.chunk, ctx.product, ctx.with_entropy = chunk, product, with_entropy
        return logprobs, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, for_logprobs: Tensor, for_entropy: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, targets, temperature, entropy = ctx.saved_tensors
        wanted_hidden, wanted_weight = ctx.needs_input_grad[:2]
        hidden_gradient = torch.empty_like(hidden) if wanted_hidden else None
        weight_gradient = torch.zeros_like(weight, dtype=temperature.dtype) if wanted_weight else None
        with torch.autocast(hidden.device.type, enabled=False):
            typed = weight.to(ctx.product)
            for part in _parts(hidden.shape[0], ctx.chunk):
                logs = _chunk_distribution(hidden[part], typed, temperature[part], ctx.product)
                push = for_logprobs[part, None]
                # d log p(y) / d z_j = [j = y] - p_j;   d H / d z_j = -p_j (log p_j + H)
                slope = logs.exp()
                if ctx.with_entropy:
                    slope.mul_(logs.add_(entropy[part, None]).mul_(-for_entropy[part, None]).sub_(push))
                else:
                    slope.mul_(-push)
                slope.scatter_add_(1, targets[part, None], push)
                slope.div_(temperature[part, None])
                del logs  # before the products are made, and the slopes before the next chunk's
                typed_slope = slope.to(ctx.product)
                if hidden_gradient is not None:
                    hidden_gradient[part] = typed_slope @ typed
                if weight_gradient is not None:
                    weight_gradient += typed_slope.T @ hidden[part].to(ctx.product)
                del slope, typed_slope
        return (
            hidden_gradient,
            None if weight_gradient is None else weight_gradient.to(weight.dtype),
            None,
            None,
            None,
            None,
        )


def _parts(count: int, chunk: int) -> list[slice]:
    return [slice(start, start + chunk) for start in range(0, count, chunk)]


def _chunk_distribution(hidden: Tensor, weight: Tensor, temperature: Tensor, product: torch.dtype) -> Tensor:
    """Returns (c, V) in the temperature's type: log softmax of one chunk's tempered logits."""
    logits = (hidden.to(product) @ weight.T).to(temperature.dtype).div_(temperature[:, None])
    return torch.log_softmax(logits, dim=-1)


def batch_logprobs(model: Any, batch: shmbridge.Batch) -> Tensor:
    """Returns the log-probability of each token given those before it: float32, nats, shaped as
    `batch.tokens`, on the model's device.

    Value i belongs to token i, as in `batch.inference_logprobs`; the first token of a row, and padding, have
    0. Gradients flow into the model, unless within torch.no_grad(). Logits are divided by the column
    `temperature`, where a row has it. Rows are padded to the longest (B, T) and read with an attention mask,
    so rows of a packed batch do not see one another. Holds logits of (B, T, V) at once: for long rows see
    `chosen_logprobs_chunked`. Blocks for the model.

    Args:
        model: called as `model(input_ids=, attention_mask=)`, with right padding; returns logits (B, T, V),
            or an object with `logits`, as those of transformers.
        batch: packed or padded; may be released.
    """
    device = next((each.device for each in model.parameters()), torch.device("cpu"))
    lengths = torch.from_numpy(batch.lengths.astype(np.int64)).to(device)
    longest = int(batch.lengths.max(initial=0))
    there = torch.arange(longest, device=device) < lengths[:, None]
    tokens = torch.from_numpy(np.asarray(batch.tokens, np.int64)).to(device)
    if batch.layout == "packed":
        tokens = tokens.new_zeros(there.shape).masked_scatter(there, tokens)
    output = model(input_ids=tokens, attention_mask=there.long())
    logits = output if isinstance(output, Tensor) else output.logits
    found = torch.zeros(there.shape, dtype=torch.float32, device=device)
    if longest > 1:
        trained = there[:, 1:]
        temperature = _temperatures(batch).to(device)[:, None].expand(trained.shape)[trained]
        distribution = log_distribution(logits[:, :-1][trained], temperature)
        rest = found[:, 1:].masked_scatter(trained, chosen_logprobs(distribution, tokens[:, 1:][trained]))
        found = torch.cat([found[:, :1], rest], dim=1)
    return found if batch.layout == "padded" else found[there]


def _temperatures(batch: shmbridge.Batch) -> Tensor:
    """Returns the sampling temperature of each row, 1 where none is recorded: (B,) float32."""
    given = batch.temperature
    known = np.ones(len(batch), np.float32)
    if given is not None:
        known = np.where(batch.has("temperature") & (given > 0), given, 1.0).astype(np.float32)
    return torch.from_numpy(known)
