"""Process reward models of transformers: many rows in one forward pass, a value read for each step."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from shmbridge.producers.rewards.errors import RewardsFailed
from shmbridge.producers.rewards.model_input import InputMaker, ModelInput
from shmbridge.producers.rewards.step_row import StepRow

if TYPE_CHECKING:
    import torch

Activation = Literal["softmax", "sigmoid", "none"]


@dataclass(frozen=True)
class TokenClass:
    """The value of a step is one class of a token classification head, at the token that is read.

    Args:
        good: index of the class that is the value: 1 in Qwen's and TRL's models.
        activation: "softmax" over the classes; "sigmoid", or "none", of that class alone.
    """

    good: int = 1
    activation: Activation = "softmax"

    def values(self, outputs: torch.Tensor) -> torch.Tensor:
        """Returns float32 (S,) of the outputs (S, classes)."""
        values = outputs.float()
        if self.activation == "softmax":
            return values.softmax(-1)[:, self.good]
        return values[:, self.good].sigmoid() if self.activation == "sigmoid" else values[:, self.good]


@dataclass(frozen=True)
class NextToken:
    """The value of a step is the probability of one next token, against another: 0 to 1.

    Args:
        good: id of the token that says that the step is right.
        bad: id of the one that says that it is wrong.
    """

    good: int
    bad: int

    def values(self, outputs: torch.Tensor) -> torch.Tensor:
        """Returns float32 (S,) of the outputs (S, vocabulary)."""
        return outputs[:, [self.good, self.bad]].float().softmax(-1)[:, 0]


def _known_ids(model: Any) -> int | None:
    """How many ids a model has embeddings for; None if it does not say."""
    try:
        table = model.get_input_embeddings()
    except (AttributeError, NotImplementedError):
        return None
    known: int | None = getattr(table, "num_embeddings", None)
    return known


class HuggingFacePrm:
    """A `StepJudge` that is a model of transformers, on the device where the model is.

    Give it to a `BatchedScorer`. It uses only the model, in the thread that calls it.

    Args:
        model: a token classification model, or a causal language model; it is put into eval mode.
        make_input: what the model is given of a row.
        read: how a value is made of the model's output.
        max_tokens: longest input; longer ones are refused, never cut. Default: what the model's config says.
    """

    def __init__(
        self,
        model: Any,
        make_input: InputMaker,
        read: TokenClass | NextToken,
        *,
        max_tokens: int | None = None,
    ) -> None:
        self._model, self._make_input, self._read = model.eval(), make_input, read
        self._max_tokens = max_tokens or getattr(model.config, "max_position_embeddings", None)
        self._ids = _known_ids(model)
        takes = inspect.signature(model.forward).parameters
        self._keeps_some = "logits_to_keep" in takes and isinstance(read, NextToken)
        self._options: dict[str, Any] = {"use_cache": False} if "use_cache" in takes else {}

    def score_now(self, rows: Sequence[StepRow]) -> list[list[float]]:
        """Returns the values of each row's steps. Blocks for one forward pass over all rows.

        Raises:
            RewardsFailed: an input is longer than the model takes, or has ids that it does not know. Whatever
                the model raises.
        """
        inputs = [self._checked(self._make_input(row)) for row in rows]
        asked = [each for each in inputs if each.reads]
        found = iter(self._forward(asked) if asked else [])
        return [next(found) if each.reads else [] for each in inputs]

    def _checked(self, made: ModelInput) -> ModelInput:
        if self._max_tokens is not None and len(made.ids) > self._max_tokens:
            raise RewardsFailed(
                f"a row is {len(made.ids)} tokens for the reward model, which takes {self._max_tokens}",
                hint="generate shorter rows, or use a model that takes longer ones",
            )
        if self._ids is not None and made.ids and not 0 <= min(made.ids) <= max(made.ids) < self._ids:
            wrong = next(each for each in made.ids if not 0 <= each < self._ids)
            raise RewardsFailed(
                f"a row has token {wrong}, and the reward model knows {self._ids}",
                hint="a model with another vocabulary than the policy's gets text: own_text=True, or OwnText",
            )
        return made

    def _forward(self, inputs: Sequence[ModelInput]) -> list[list[float]]:
        import torch

        longest = max(len(each.ids) for each in inputs)
        ids = torch.tensor([each.ids + [0] * (longest - len(each.ids)) for each in inputs])
        there = torch.tensor([[1] * len(each.ids) + [0] * (longest - len(each.ids)) for each in inputs])
        row = torch.tensor([at for at, each in enumerate(inputs) for _ in each.reads])
        position = torch.tensor([read for each in inputs for read in each.reads])
        kept, options, device = position, dict(self._options), self._model.device
        if self._keeps_some:  # a vocabulary of scores for every token of every row would not fit
            places: Any = position  # torch does not say what unique returns
            some, kept = places.unique(return_inverse=True)
            options["logits_to_keep"] = some.to(device)
        with torch.inference_mode():
            output = self._model(input_ids=ids.to(device), attention_mask=there.to(device), **options)
            logits = output.logits if hasattr(output, "logits") else output[0]
            values = self._read.values(logits[row.to(logits.device), kept.to(logits.device)]).tolist()
        done, scores = 0, []
        for each in inputs:
            scores.append(values[done : done + len(each.reads)])
            done += len(each.reads)
        return scores
