"""Log-probabilities of a micro-batch's trained tokens, computed with as few logits as possible.

The output layer sees only the hidden states that predict trained tokens: its `forward` is replaced during the
model's own. So everything runs inside the model, where sharded weights are gathered (DDP, FSDP2), and with
the model's own changes to logits (LoRA, a bias, scaling, capping). In chunks, the replaced layer returns
log-probabilities instead of logits, and at most one chunk of logits exists at a time.

Letters: n trained tokens of a micro-batch, D hidden width, V vocabulary.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from shmbridge.consumers import losses
from shmbridge.consumers.learner.data.microbatch import MicroBatch

log = logging.getLogger(__name__)

_CHUNK_BYTES = 256 << 20  # of float32 logits
_SMALL = 1 << 30  # bytes of a micro-batch's float32 logits below which no chunks are used
_Head = Callable[[Tensor], Tensor]

_as_they_are: weakref.WeakKeyDictionary[Any, bool] = weakref.WeakKeyDictionary()
# held while a layer is replaced
_locks: weakref.WeakKeyDictionary[Any, threading.Lock] = weakref.WeakKeyDictionary()
_changing_locks = threading.Lock()


def chunk_tokens_for(vocabulary: int, micro_tokens: int) -> int | None:
    """Returns tokens per chunk, for 256 MiB of logits; None (no chunks) if all take less than 1 GiB."""
    if 4 * vocabulary * micro_tokens <= _SMALL:
        return None
    return max(1, _CHUNK_BYTES // (4 * vocabulary))


def trained_logprobs(
    model: Any, micro: MicroBatch, *, precision: torch.dtype, chunk_tokens: int | None, with_entropy: bool
) -> tuple[Tensor, Tensor | None]:
    """Returns the log-probability of each trained token at the row's temperature. Blocks for the compute.

    Args:
        model: a causal language model, also in DDP, FSDP2 or LoRA. For packed micro-batches it must keep rows
            apart: see `attention.keeps_rows_apart`.
        micro: rows of either layout.
        precision: float32, or bfloat16 for an autocast forward pass.
        chunk_tokens: trained tokens whose logits exist at a time; None: all of them.
        with_entropy: also return the entropy of each distribution, with gradient.

    Returns:
        (n,) float32, nats, and the same of the entropy or None; n counts the trained tokens row after row.
    """
    if chunk_tokens is not None and leaves_logits_alone(model):
        return _in_chunks(model, micro, precision, chunk_tokens, with_entropy)
    where = micro.trained[:, 1:]
    with _head_replaced(model, lambda head, hidden: head(hidden[:, :-1][where])[None]) as used:
        logits = _forward(model, micro, precision)
    logits = logits[0] if used else logits[:, :-1][where]
    logs = losses.log_distribution(logits, micro.token_temperature)
    entropy: Tensor | None = _Entropy.apply(logs) if with_entropy else None  # type: ignore[no-untyped-call]
    return losses.chosen_logprobs(logs, micro.tokens[micro.trained]), entropy


class _Entropy(torch.autograd.Function):
    """`losses.entropy` that saves only its input for the backward pass."""

    @staticmethod
    def forward(ctx: Any, logs: Tensor) -> Tensor:
        ctx.save_for_backward(logs)
        return losses.entropy(logs)

    @staticmethod
    def backward(ctx: Any, push: Tensor) -> Tensor:
        logs: Tensor = ctx.saved_tensors[0]
        return (logs.exp() * (logs + 1.0)).mul_(-push[:, None])


def leaves_logits_alone(model: Any) -> bool:
    """Returns whether a model's logits are the output of its output layer: not scaled, capped or bypassed.

    Tested once per model, by a forward pass of two tokens. If False, it is logged and chunks are not used.
    """
    if model not in _as_they_are:
        device = next(model.parameters()).device
        given = torch.tensor([-60.0, -2.5, 0.0, 0.3, 47.0], device=device).expand(1, 2, 5)
        # Dropout would advance the random generators and so change a resumed run.
        with (
            torch.no_grad(),
            evaluating(model),
            _head_replaced(model, lambda head, hidden: given.to(hidden.dtype)) as used,
        ):
            out = model(input_ids=torch.zeros(1, 2, dtype=torch.int64, device=device), use_cache=False).logits
        _as_they_are[model] = (
            bool(used) and out.shape == given.shape and torch.equal(out.float(), given.to(out.dtype).float())
        )
        if not _as_they_are[model]:
            log.warning(
                "%s changes its logits behind its output layer, so they are made all at once",
                type(_unwrapped(model)).__name__,
            )
    return _as_they_are[model]


def _in_chunks(
    model: Any, micro: MicroBatch, precision: torch.dtype, chunk: int, with_entropy: bool
) -> tuple[Tensor, Tensor | None]:
    """As `trained_logprobs`; the output layer returns log-probabilities and entropies in place of logits."""
    where, targets, heat = micro.trained[:, 1:], micro.tokens[micro.trained], micro.token_temperature
    layer = _unwrapped(model).get_output_embeddings()
    is_plain = isinstance(layer, torch.nn.Linear) and layer.bias is None

    def instead(head: _Head, hidden: Tensor) -> Tensor:
        chosen = hidden[:, :-1][where]
        if not is_plain:
            return torch.stack(_through(head, chosen, targets, heat, chunk), dim=-1)[None]
        weight = layer.weight
        if with_entropy:
            pair = losses.chosen_logprobs_chunked(chosen, weight, targets, heat, chunk, with_entropy=True)
            return torch.stack(pair, dim=-1)[None]
        return losses.chosen_logprobs_chunked(chosen, weight, targets, heat, chunk)[None, :, None]

    with _head_replaced(model, instead):
        out = _forward(model, micro, precision)[0]
    return out[:, 0], out[:, 1] if with_entropy else None


def _through(head: _Head, hidden: Tensor, targets: Tensor, heat: Tensor, chunk: int) -> tuple[Tensor, Tensor]:
    """Computes chunk by chunk through any output layer; the backward pass computes each chunk again."""

    def part(own: Tensor, wanted: Tensor, temperature: Tensor) -> tuple[Tensor, Tensor]:
        logs = losses.log_distribution(head(own), temperature)
        return losses.chosen_logprobs(logs, wanted), losses.entropy(logs)

    cuts = range(0, len(targets), chunk)
    pieces = [(hidden[at : at + chunk], targets[at : at + chunk], heat[at : at + chunk]) for at in cuts]
    done = [checkpoint(part, *piece, use_reentrant=False) for piece in pieces]
    return torch.cat([each[0] for each in done]), torch.cat([each[1] for each in done])


def _forward(model: Any, micro: MicroBatch, precision: torch.dtype) -> Tensor:
    if micro.position_ids is None or micro.cu_seqlens is None:
        # A mask of ones means "no padding". Causality makes that correct for every real token, and the model
        # takes its fast causal kernel. Without a mask it would look for packed rows and build one.
        about = {"attention_mask": torch.ones_like(micro.tokens)}
    else:
        about = borders(micro.position_ids, micro.cu_seqlens, micro.row_lengths)
    with torch.autocast(micro.tokens.device.type, dtype=precision, enabled=precision != torch.float32):
        logits: Tensor = model(input_ids=micro.tokens, use_cache=False, **about).logits
    return logits


def borders(position_ids: Tensor, cu_seqlens: Tensor, row_lengths: tuple[int, ...]) -> dict[str, Any]:
    """Returns the forward arguments that give the row boundaries of a pack, under every attention's names."""
    return {
        "position_ids": position_ids,
        "cu_seq_lens_q": cu_seqlens,
        "cu_seq_lens_k": cu_seqlens,
        "max_length_q": max(row_lengths),
        "max_length_k": max(row_lengths),
        "row_lengths": row_lengths,
    }


@contextmanager
def _head_replaced(model: Any, instead: Callable[[_Head, Tensor], Tensor]) -> Iterator[list[bool]]:
    """Replaces the output layer's forward by `instead(own forward, input)`; yields [True] once called."""
    used: list[bool] = []
    head = _unwrapped(model).get_output_embeddings()
    if head is None:
        yield used
        return
    with _changing_locks:
        lock = _locks.setdefault(head, threading.Lock())
    with lock:
        own = head.forward

        def forward(hidden: Tensor) -> Tensor:
            used.append(True)
            return instead(own, hidden)

        head.forward = forward
        try:
            yield used
        finally:
            del head.forward


def _unwrapped(model: Any) -> Any:
    """The model inside DDP's wrapper."""
    return model.module if isinstance(model, torch.nn.parallel.DistributedDataParallel) else model


@contextmanager
def evaluating(model: Any) -> Iterator[None]:
    """Puts every module of a model in evaluation mode; restores each one's mode on exit. One thread."""
    before = [(module, module.training) for module in model.modules()]
    for module, _ in before:
        module.training = False
    try:
        yield
    finally:
        for module, training in before:
            module.training = training
