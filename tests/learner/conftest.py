"""A tiny model and hand-made packed batches, so that the learner is tested without a transport."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

VOCABULARY = 28


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture
def tiny_model() -> Callable[[int], PreTrainedModel]:
    """Return a maker of random models: seed -> 86,208 parameters, float32."""

    def make(seed: int) -> PreTrainedModel:
        torch.manual_seed(seed)
        config = Qwen2Config(
            vocab_size=VOCABULARY,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=4,
            max_position_embeddings=256,
            initializer_range=0.1,
            tie_word_embeddings=False,
        )
        return Qwen2ForCausalLM(config).eval()

    return make


@dataclass
class HandMadeBatch:
    """The attributes of a packed `shmbridge.Batch`."""

    tokens: np.ndarray
    cu_seqlens: np.ndarray
    position_ids: np.ndarray
    lengths: np.ndarray
    loss_mask: np.ndarray | None
    group_index: np.ndarray
    scores: np.ndarray | None
    advantages: np.ndarray | None
    inference_logprobs: np.ndarray | None
    temperature: np.ndarray | None
    prompt_length: np.ndarray | None
    overrides: list[str | None] | None
    generation_params: list[str | None] | None
    group_overrides: list[str | None] | None
    meta: list[Any]
    present: dict[str, np.ndarray] = field(default_factory=dict)
    released: int = 0

    def has(self, column: str) -> np.ndarray:
        return self.present.get(column, np.zeros(len(self.meta), dtype=bool))

    def release(self) -> None:
        self.released += 1


@pytest.fixture
def packed_batch() -> Callable[..., HandMadeBatch]:
    """Return a maker of batches from rows; None in a column's row means: its record carried none."""

    def make(
        rows: Sequence[Sequence[int]],
        *,
        masks: Sequence[Sequence[int] | None] | None = None,
        groups: Sequence[int] | None = None,
        scores: Sequence[float | None] | None = None,
        advantages: Sequence[Sequence[float] | None] | None = None,
        logprobs: Sequence[Sequence[float] | None] | None = None,
        temperatures: Sequence[float | None] | None = None,
        prompt_lengths: Sequence[int | None] | None = None,
        overrides: Sequence[str | None] | None = None,
        generation_params: Sequence[str | None] | None = None,
        group_overrides: Sequence[str | None] | None = None,
        version: int = 0,
        envs: Sequence[str] | None = None,
        published_ns: Sequence[int] | None = None,
    ) -> HandMadeBatch:
        present: dict[str, np.ndarray] = {}

        def ragged(name: str, values: Sequence[Any] | None, dtype: type) -> np.ndarray | None:
            if values is None:
                return None
            present[name] = np.array([row is not None for row in values])
            filled = [np.zeros(len(t)) if v is None else v for t, v in zip(rows, values, strict=True)]
            return np.concatenate(filled).astype(dtype)

        def scalar(name: str, values: Sequence[float | None] | None, dtype: type) -> np.ndarray | None:
            if values is None:
                return None
            present[name] = np.array([value is not None for value in values])
            return np.array([0.0 if value is None else value for value in values], dtype=dtype)

        group_of = list(groups if groups is not None else [0] * len(rows))

        def record(group: int) -> SimpleNamespace:
            first = group_of.index(group)
            return SimpleNamespace(
                min_policy_version=version,
                max_policy_version=version,
                redelivered=False,
                env_name="test" if envs is None else envs[first],
                group_id=f"group-{group}",
                t_publish_ns=0 if published_ns is None else published_ns[first],
            )

        records = {group: record(group) for group in group_of}
        return HandMadeBatch(
            tokens=np.concatenate([np.asarray(row, dtype=np.int32) for row in rows]),
            cu_seqlens=np.cumsum([0] + [len(row) for row in rows]).astype(np.int32),
            position_ids=np.concatenate([np.arange(len(row), dtype=np.int32) for row in rows]),
            lengths=np.array([len(row) for row in rows], dtype=np.int32),
            loss_mask=ragged("loss_mask", masks, np.uint8),
            group_index=np.asarray(group_of, dtype=np.int32),
            scores=scalar("score", scores, np.float64),
            advantages=ragged("advantages", advantages, np.float32),
            inference_logprobs=ragged("inference_logprobs", logprobs, np.float32),
            temperature=scalar("temperature", temperatures, np.float32),
            prompt_length=scalar("prompt_length", prompt_lengths, np.int32),
            overrides=None if overrides is None else list(overrides),
            generation_params=None if generation_params is None else list(generation_params),
            group_overrides=None if group_overrides is None else list(group_overrides),
            meta=[records[group] for group in group_of],
            present=present,
        )

    return make
