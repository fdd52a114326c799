"""Batched sampling from a causal language model over a KV cache: prompts in, tokens and their logprobs out.

Used by `engine.py`, in one thread.

The log-probability of a token is log softmax(logits / temperature) at that token, over the whole vocabulary,
in nats: the distribution a learner recomputes. `top_p` narrows what is drawn, not what is reported. A greedy
row (temperature 0) reports temperature 1.
"""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

FinishReason = Literal["stop", "length"]

# Log-probabilities of some tokens at one position, by token id; the token that stands there comes first.
TokenLogprobs = dict[int, float]


class NotFinite(RuntimeError):
    """The model's output is not finite: NaN, or an infinity at a token that was sampled or is scored."""


@dataclass(frozen=True)
class Sampling:
    """How one answer is drawn."""

    max_tokens: int  # at least 1
    temperature: float = 1.0  # 0 is greedy
    top_p: float = 1.0  # in (0, 1]
    seed: int | None = None  # None draws from the model's own stream
    stop: tuple[str, ...] = ()  # the answer ends with the token that completes one; text is cut before it
    stop_token_ids: frozenset[int] = frozenset()  # beside the model's end tokens
    ignore_eos: bool = False
    top_logprobs: int = 0  # alternatives to report per token


@dataclass
class Row:
    """One answer on its way: a line of the batch. The sampler appends; any thread may `abandon`."""

    prompt: Sequence[int]
    sampling: Sampling
    seed: int | None = None
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    alternatives: list[TokenLogprobs] = field(default_factory=list)  # one per token, where asked for
    text: str = ""
    finish_reason: FinishReason | None = None
    abandoned: bool = False

    @property
    def live(self) -> bool:
        """Whether another token is wanted."""
        return self.finish_reason is None and not self.abandoned

    def abandon(self) -> None:
        """Stops sampling this row, whose request is gone. Never blocks."""
        self.abandoned = True


class PolicyModel:
    """A causal language model and its tokenizer, as a sampler; for one thread at a time.

    Args:
        model: a transformers causal LM that takes `position_ids` and returns `past_key_values`.
        tokenizer: its tokenizer.
        version: policy version of the weights it holds now.
        seed: of the stream that rows without a seed draw from.
    """

    def __init__(self, model: Any, tokenizer: Any, *, version: int = 0, seed: int = 0) -> None:
        self.model = model.eval()
        # A copy: fast tokenizers refuse to be used from two threads at once ("Already borrowed").
        self.tokenizer = copy.deepcopy(tokenizer)
        self.version = version
        self.device: torch.device = model.device
        self.vocab_size: int = model.config.vocab_size
        self.context: int = getattr(model.config, "max_position_embeddings", None) or 1 << 20
        self.end_ids = _end_ids(model, tokenizer)
        self._stream = torch.Generator(self.device).manual_seed(seed)
        # Logits of all prompt positions are large: ask for the last position alone where the model can.
        keep = "logits_to_keep" in inspect.signature(model.forward).parameters
        self._last_only = {"logits_to_keep": 1} if keep else {}

    @torch.inference_mode()
    def generate(self, rows: Sequence[Row]) -> None:
        """Extends every row until it is finished or abandoned. Blocks; all rows see the same weights.

        Raises NotFinite: the model gave no number for a token.
        """
        draw = _Draw(rows, self.device, self._stream)
        ids, mask = _left_padded([row.prompt for row in rows], self.device)
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        cache = None
        while any(row.live for row in rows):
            output = self.model(
                input_ids=ids,
                attention_mask=mask,
                position_ids=positions.clamp(max=self.context - 1),  # finished rows run on past their context
                past_key_values=cache,
                use_cache=True,
                **self._last_only,
            )
            cache = output.past_key_values
            tokens, logprobs = draw(output.logits[:, -1].float())
            self._append(rows, tokens, logprobs)
            ids = tokens[:, None]
            mask = torch.cat([mask, mask.new_ones(len(rows), 1)], dim=-1)
            positions = positions[:, -1:] + 1

    @torch.inference_mode()
    def score(self, token_ids: Sequence[int], top: int) -> list[TokenLogprobs | None]:
        """Returns the logprobs of each prompt token and of the `top` likeliest, at temperature 1. Blocks.

        The first position has no prediction: None. Raises NotFinite, as `generate`.
        """
        ids = torch.tensor([list(token_ids)], device=self.device)
        logprobs = self.model(input_ids=ids).logits[0, :-1].float().log_softmax(-1)
        scored = _alternatives(logprobs, list(token_ids[1:]), top)
        self._require_finite(entry[token] for entry, token in zip(scored, token_ids[1:], strict=True))
        return [None, *scored]

    def _require_finite(self, logprobs: Iterable[float]) -> None:
        if not all(map(math.isfinite, logprobs)):
            raise NotFinite(
                f"the output of policy version {self.version} is not finite -> look at its weights"
            )

    def _append(self, rows: Sequence[Row], tokens: Tensor, logprobs: Tensor) -> None:
        picked = tokens.tolist()
        values = logprobs.gather(-1, tokens[:, None])[:, 0].tolist()
        self._require_finite(value for row, value in zip(rows, values, strict=True) if row.live)
        top = max(row.sampling.top_logprobs for row in rows)
        others = _alternatives(logprobs, picked, top) if top else [{}] * len(rows)
        for row, token, value, other in zip(rows, picked, values, others, strict=True):
            if row.live:
                row.token_ids.append(token)
                row.logprobs.append(value)
                if row.sampling.top_logprobs:
                    row.alternatives.append(dict(list(other.items())[: row.sampling.top_logprobs + 1]))
                self._finish_if_due(row, token)

    def _finish_if_due(self, row: Row, token: int) -> None:
        sampling = row.sampling
        ended = token in sampling.stop_token_ids or (token in self.end_ids and not sampling.ignore_eos)
        if ended or self._stop_at(row) is not None:
            row.finish_reason = "stop"
        elif len(row.token_ids) >= sampling.max_tokens:
            row.finish_reason = "length"
        if row.finish_reason is not None:
            text = self.tokenizer.decode(row.token_ids, skip_special_tokens=True)
            cuts = [at for stop in sampling.stop if (at := text.find(stop)) >= 0]
            row.text = text[: min(cuts, default=None)]

    def _stop_at(self, row: Row) -> str | None:
        """The stop string that the newest token completed."""
        if not row.sampling.stop:
            return None
        # As many last tokens as can hold one: a token that adds no character is rare, eight in a row never.
        reach = max(map(len, row.sampling.stop)) + 8
        tail = self.tokenizer.decode(row.token_ids[-reach:], skip_special_tokens=True)
        return next((stop for stop in row.sampling.stop if stop in tail), None)


class _Draw:
    """Picks one token per row from a batch of logits, each row by its own temperature, nucleus and seed."""

    def __init__(self, rows: Sequence[Row], device: torch.device, stream: torch.Generator) -> None:
        temperature = torch.tensor([row.sampling.temperature for row in rows], device=device)[:, None]
        self._greedy = temperature[:, 0] == 0
        self._temperature = temperature.masked_fill(temperature == 0, 1.0)
        self._top_p = torch.tensor([row.sampling.top_p for row in rows], device=device)[:, None]
        self._narrow = bool((self._top_p < 1).any())
        self._stream = stream
        self._seeded = [
            (line, torch.Generator(device).manual_seed(row.seed))
            for line, row in enumerate(rows)
            if row.seed is not None
        ]

    def __call__(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Returns tokens int64[B] and log-probabilities float32[B, V] of float32[B, V] logits."""
        logprobs = (logits / self._temperature).log_softmax(-1)
        allowed = _nucleus(logprobs, self._top_p) if self._narrow else logprobs
        # argmax(log p - log E), E exponential, is a draw from p; a seeded row has its noise to itself.
        noise = torch.empty_like(allowed).exponential_(generator=self._stream)
        for line, generator in self._seeded:
            noise[line].exponential_(generator=generator)
        drawn = (allowed - noise.log()).argmax(-1)
        return torch.where(self._greedy, logprobs.argmax(-1), drawn), logprobs


def _nucleus(logprobs: Tensor, top_p: Tensor) -> Tensor:
    """Keeps the likeliest tokens up to and including the one that reaches `top_p`, at least one; the others
    become -inf.
    """
    ordered, order = logprobs.sort(-1, descending=True)
    probability = ordered.exp()
    cut = probability.cumsum(-1) - probability >= top_p
    cut[:, 0] = False  # also where top_p is 0 in float32
    return logprobs.masked_fill(torch.zeros_like(cut).scatter(-1, order, cut), float("-inf"))


def _alternatives(logprobs: Tensor, tokens: list[int], top: int) -> list[TokenLogprobs]:
    own = logprobs.gather(-1, torch.tensor(tokens, device=logprobs.device)[:, None])[:, 0].tolist()
    likeliest = logprobs.topk(min(top, logprobs.shape[-1]), dim=-1)
    ids, values = likeliest.indices.tolist(), likeliest.values.tolist()
    return [
        {token: value}
        | {each: its for each, its in zip(ids[line], values[line], strict=True) if its > -math.inf}
        for line, (token, value) in enumerate(zip(tokens, own, strict=True))
    ]


def _left_padded(prompts: Sequence[Sequence[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """Returns token ids and attention mask, int64[B, T]; every prompt ends in the last column."""
    width = max(map(len, prompts))
    ids = torch.zeros(len(prompts), width, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for line, prompt in enumerate(prompts):
        ids[line, width - len(prompt) :] = torch.tensor(list(prompt))
        mask[line, width - len(prompt) :] = 1
    return ids.to(device), mask.to(device)


def _end_ids(model: Any, tokenizer: Any) -> frozenset[int]:
    generation = getattr(model, "generation_config", None)
    named = getattr(generation, "eos_token_id", None)
    ids = named if isinstance(named, list) else [named]
    return frozenset(token for token in (*ids, tokenizer.eos_token_id) if token is not None)
