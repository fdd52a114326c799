"""Chooses a model's batch layout: tests whether it keeps packed rows apart, and has attentions that do.

By default a transformers model builds an (N, N) mask from position ids that restart (releases from 4.53 on),
and computes all of it. `ROWS` computes only each row's own square, with torch's fast causal kernel. It is
used unless the model already runs flash or flex attention, which support packs.
"""

from __future__ import annotations

import copy
import functools
import importlib.util
import inspect
from collections.abc import Callable, Sequence
from itertools import accumulate, groupby
from typing import Any, Literal, cast

import torch
from torch import Tensor

from shmbridge.consumers.learner import Refusal
from shmbridge.consumers.learner.data.microbatch import Layout
from shmbridge.consumers.learner.model.forward import borders, evaluating

ROWS = "shmbridge_rows"
VARLEN = "shmbridge_varlen"
# attentions with these prefixes support packs, or skip masked blocks
_VARLEN = ("flash_attention", "flex_attention")
# attention features of some layers that `rows_attention` does not compute
_BEYOND = ("softcap", "s_aux")
_FRONT, _OTHER, _BACK = (5, 3, 2, 6, 4), (1, 7, 0, 2, 9), (3, 1, 4, 1, 5, 2, 6)


class LayoutUnfit(Refusal, ValueError):
    """The model mixes the rows of a pack; the message names it and says what to do."""


def settle(
    model: Any,
    wanted: Literal["padded", "packed", "auto"],
    precision: torch.dtype,
    say: Callable[[str], None],
) -> Layout:
    """Sets a model's attention and returns the layout for it, after a few short forward passes.

    "auto" is "packed" if the model keeps rows apart without a mask; if it needs a mask, padding is faster.

    Args:
        model: a causal language model of transformers, on its device, not yet wrapped for several ranks.
        wanted: "padded", "packed" or "auto".
        precision: of the forward passes to come.
        say: prints a line for the user.

    Raises:
        LayoutUnfit: `wanted` is "packed", but the model does not keep rows apart.
    """
    if wanted == "padded":
        return "padded"
    before = str(model.config._attn_implementation)
    knows_packs = before.startswith(_VARLEN)
    if not knows_packs and not _in_pieces(model):
        own = _logits(model, (_BACK,), precision, packed=False)
        for implementation in attentions_for_packs(next(model.parameters()).device, precision):
            if not _takes(model, implementation):
                continue
            if keeps_rows_apart(model, precision) and _gives(model, own, precision):
                return "packed"
            if implementation != ROWS:
                say(
                    f"{implementation} is there and is not used: {type(model).__name__} does not keep the "
                    "rows of one pack apart with it"
                )
        if str(model.config._attn_implementation) != before:
            use(model, before)
    if (knows_packs or wanted == "packed") and keeps_rows_apart(model, precision):
        return "packed"
    said = f"{type(model).__name__} with {before} attention does not keep the rows of one pack apart"
    if wanted == "packed":
        raise LayoutUnfit(f"{said} -> --batch-layout padded")
    say(f"{said}, so batches are padded")
    return "padded"


def settle_for(
    device: torch.device,
    model: Any,
    wanted: Literal["padded", "packed", "auto"],
    precision: torch.dtype,
    say: Callable[[str], None],
) -> Layout:
    """As `settle`, for a model that is moved to its device by shards: tests a small one of the same kind."""
    few = _few_layers(model, device)
    if few is None:
        return settle(model, wanted, precision, say)
    layout = settle(few, wanted, precision, say)
    found = str(few.config._attn_implementation)
    if found != str(model.config._attn_implementation):
        use(model, found)
    return layout


def _few_layers(model: Any, device: torch.device) -> Any:
    """Returns a random model of the same kind with a layer of each type; None if it cannot be made."""
    try:
        config = copy.deepcopy(model.config)
        text = config.get_text_config()
        sorts = list(getattr(text, "layer_types", None) or ())
        count, all_of_them = max([2, *(sorts.index(each) + 1 for each in sorts)]), text.num_hidden_layers
        for name, value in list(vars(text).items()):
            if isinstance(value, list) and len(value) == all_of_them:
                setattr(text, name, value[:count])
        text.num_hidden_layers = min(count, all_of_them)
        few = type(model)(config).to(device, next(model.parameters()).dtype).eval()
        if str(few.config._attn_implementation) != str(model.config._attn_implementation):
            use(few, str(model.config._attn_implementation))
    except Exception:  # models of other libraries are constructed differently
        return None
    return few


def attentions_for_packs(device: torch.device, precision: torch.dtype) -> list[str]:
    """Returns the attentions to try, the fastest first; `ROWS` always works."""
    half = precision in (torch.float16, torch.bfloat16)
    flash = ["flash_attention_2"] if importlib.util.find_spec("flash_attn") is not None else []
    varlen = [VARLEN] if importlib.util.find_spec("torch.nn.attention.varlen") is not None else []
    return [*flash, *varlen, ROWS] if device.type == "cuda" and half else [ROWS]


def use(model: Any, implementation: str) -> None:
    """Sets a model's attention implementation; does nothing if the model does not support that."""
    if implementation in (ROWS, VARLEN):
        _register()
    model.set_attn_implementation(implementation)


def _takes(model: Any, implementation: str) -> bool:
    try:
        use(model, implementation)
    except (AttributeError, ImportError, ValueError):
        # not available in this release, on this machine or for this model
        return False
    return str(model.config._attn_implementation) == implementation  # some releases only warn


def keeps_rows_apart(model: Any, precision: torch.dtype = torch.float32) -> bool:
    """Returns whether a row in a pack gets the same logits as alone. Blocks for three forward passes."""
    try:
        alone, first, second = (
            _logits(model, rows, precision) for rows in ((_BACK,), (_FRONT, _BACK), (_OTHER, _BACK))
        )
    except (TypeError, ValueError, RuntimeError):
        # the model does not accept row boundaries, or the attention does not run here
        return False
    scale = max(float(alone.abs().max()), 1e-3)
    return _same(first, alone, precision) and float((first - second).abs().max()) <= 1e-5 * scale


def _gives(model: Any, logits: Tensor, precision: torch.dtype) -> bool:
    """Returns whether a model gives these logits for a row alone."""
    try:
        return _same(_logits(model, (_BACK,), precision, packed=False), logits, precision)
    except (TypeError, ValueError, RuntimeError):
        return False


def _same(logits: Tensor, others: Tensor, precision: torch.dtype) -> bool:
    """Returns whether the values are equal up to summation order."""
    rounding = 1e-4 if precision == torch.float32 else 5e-2
    return float((logits - others).abs().max()) <= rounding * max(float(others.abs().max()), 1e-3)


def _in_pieces(model: Any) -> bool:
    """Returns whether chunked layers need the mask: without it they attend to all of a long row."""
    return "chunked_attention" in (getattr(model.config.get_text_config(), "layer_types", None) or ())


def rows_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    *,
    row_lengths: Sequence[int] | None = None,
    sliding_window: int | None = None,
    **rest: Any,
) -> tuple[Tensor, None]:
    """Computes causal attention within each row of a pack: a kernel call per run of rows of equal length.

    Without `row_lengths` it is the attention that transformers calls "sdpa".

    Args:
        module: the attention layer.
        query: (1, heads, N, width); key and value: (1, key heads, N, width).
        row_lengths: tokens of each row, N in all.
        sliding_window: tokens visible to a token, itself included; None: back to the start of the row.

    Raises:
        ValueError: the layer's attention is not a plain softmax of products: capped, or with a sink.
    """
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    if row_lengths is None or attention_mask is not None:
        whole = sdpa_attention_forward(module, query, key, value, attention_mask, dropout, scaling, **rest)
        return cast(tuple[Tensor, None], whole)
    _refuse_beyond(module, rest)
    grouped = query.shape[1] != key.shape[1]
    done, at = [], 0
    for length, run in groupby(row_lengths):
        count = len(list(run))
        end = at + count * length
        q, k, v = (_squares(each[:, :, at:end], count, length) for each in (query, key, value))
        mask = (
            None
            if sliding_window is None or length <= sliding_window
            else _band(length, sliding_window, query.device)
        )
        out = torch.nn.functional.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=mask,
            dropout_p=dropout,
            scale=scaling,
            is_causal=mask is None,
            enable_gqa=grouped,
        )
        done.append(out.transpose(1, 2).reshape(1, count * length, out.shape[1], out.shape[3]))
        at = end
    return torch.cat(done, dim=1), None


def varlen_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    *,
    cu_seq_lens_q: Tensor | None = None,
    max_length_q: int | None = None,
    sliding_window: int | None = None,
    **rest: Any,
) -> tuple[Tensor, None]:
    """Computes the same as `rows_attention` in one call of torch's varlen kernel: on CUDA, in half precision.

    Args:
        cu_seq_lens_q: (rows + 1,) int32, where each row begins, then N.
        max_length_q: tokens of the longest row.
    """
    if cu_seq_lens_q is None or max_length_q is None or attention_mask is not None or dropout:
        return rows_attention(
            module, query, key, value, attention_mask, dropout, scaling, sliding_window=sliding_window, **rest
        )
    _refuse_beyond(module, rest)
    from torch.nn.attention.varlen import varlen_attn

    kind = query.device.type
    half = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else value.dtype
    q, k, v = (each[0].transpose(0, 1).to(half) for each in (query, key, value))
    options: dict[str, Any] = {"window_size": (-1 if sliding_window is None else sliding_window - 1, 0)}
    if (queries_each := q.shape[1] // k.shape[1]) > 1:
        if _kernel_takes("enable_gqa"):
            options["enable_gqa"] = True
        else:  # torch before 2.12
            k, v = (each.repeat_interleave(queries_each, dim=1) for each in (k, v))
    out = varlen_attn(
        q, k, v, cu_seq_lens_q, cu_seq_lens_q, max_length_q, max_length_q, scale=scaling, **options
    )
    assert isinstance(out, Tensor)
    return out[None], None


def _refuse_beyond(module: Any, features: dict[str, Any]) -> None:
    if beyond := [name for name in _BEYOND if features.get(name) is not None]:
        raise ValueError(
            f"{type(module).__name__} has {', '.join(beyond)} in its attention, which torch's kernel does "
            "not know"
        )


@functools.cache
def _kernel_takes(option: str) -> bool:
    """Returns whether this torch release's varlen attention has an option."""
    from torch.nn.attention.varlen import varlen_attn

    return option in inspect.signature(varlen_attn).parameters


def _squares(values: Tensor, count: int, length: int) -> Tensor:
    """(1, H, count * length, d) -> (count, H, length, d)"""
    heads, width = values.shape[1], values.shape[3]
    return values.reshape(heads, count, length, width).transpose(0, 1)


def _band(length: int, window: int, device: torch.device) -> Tensor:
    back = torch.arange(length, device=device)[:, None] - torch.arange(length, device=device)
    return (back >= 0) & (back < window)


def _register() -> None:
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

    def mask(**about: Any) -> Any:
        """Returns None for a pack, whose rows the attention keeps apart; otherwise sdpa's mask."""
        return None if about.get("attention_mask") is None else sdpa_mask(**about)

    for name, attention in ((ROWS, rows_attention), (VARLEN, varlen_attention)):
        AttentionInterface.register(name, attention)
        AttentionMaskInterface.register(name, mask)


def _logits(
    model: Any, rows: Sequence[Sequence[int]], precision: torch.dtype, *, packed: bool = True
) -> Tensor:
    """Returns (1, tokens of the last row, V) float32, of rows in a pack, or of one in a padded batch."""
    device = next(model.parameters()).device
    size = model.get_input_embeddings().num_embeddings
    lengths = tuple(len(row) for row in rows)
    tokens = torch.tensor([[token % size for row in rows for token in row]], device=device)
    about = {"attention_mask": torch.ones_like(tokens)}
    if packed:
        positions = torch.tensor([[at for length in lengths for at in range(length)]], device=device)
        ends = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device)
        about = borders(positions, ends, lengths)
    with (
        torch.no_grad(),
        evaluating(model),
        torch.autocast(device.type, dtype=precision, enabled=precision != torch.float32),
    ):
        logits: Tensor = model(input_ids=tokens, use_cache=False, **about).logits
    return logits[:, -lengths[-1] :].float()
