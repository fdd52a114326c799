"""Process reward models of transformers: the input of each row, one forward pass, a value for each step."""

from __future__ import annotations

import inspect
from bisect import bisect_right
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

from shmbridge.producers.rewards.steps import RewardsFailed, StepRow

if TYPE_CHECKING:
    import torch

Activation = Literal["softmax", "sigmoid", "none"]
QWEN_SYSTEM = "Please reason step by step, and put your final answer within \\boxed{}."


@dataclass(frozen=True, slots=True)
class ModelInput:
    """Token ids of the model's vocabulary, and the position whose output is the value of each step."""

    ids: list[int]
    reads: list[int]


class InputMaker(Protocol):
    """Makes the input of a model. Called in any thread."""

    def __call__(self, row: StepRow) -> ModelInput:
        """Returns the input for one row; as many reads as steps. Raises RewardsFailed."""
        ...


class OwnTokens:
    """The row's own ids, with a marker put in after each step.

    Args:
        marker: ids of the marker; its last one is read. Without any, the last token of each step is read.
        reuse: a step that has the marker's last id in it is read at the last of these, and gets no other.
        behind: ids at the end of a step that stay behind its marker, such as that of the end of a turn.
    """

    def __init__(
        self, marker: Sequence[int] = (), *, reuse: bool = False, behind: Collection[int] = ()
    ) -> None:
        self._marker, self._reuse, self._behind = list(marker), reuse, frozenset(behind)

    def __call__(self, row: StepRow) -> ModelInput:
        """Returns the whole row with its markers."""
        ids: list[int] = []
        reads: list[int] = []
        done = 0
        for start, end in zip(row.starts, row.ends, strict=True):
            own = self._own_marker(row.tokens, start, end)
            till = self._last_said(row.tokens, start, end) if own is None else own
            ids += [*row.tokens[done:till], *(self._marker if own is None else ())]
            reads.append(len(ids) - 1)
            done = till
        return ModelInput([*ids, *row.tokens[done:]], reads)

    def _own_marker(self, tokens: Sequence[int], start: int, end: int) -> int | None:
        """The index after the last marker in a step, if it is to be used."""
        if not (self._reuse and self._marker):
            return None
        return next((at + 1 for at in reversed(range(start, end)) if tokens[at] == self._marker[-1]), None)

    def _last_said(self, tokens: Sequence[int], start: int, end: int) -> int:
        said = (at + 1 for at in reversed(range(start, end)) if tokens[at] not in self._behind)
        return next(said, end)


class OwnText:
    """A question and the text of each step with a marker behind it, tokenised by the model's own tokenizer.

    What stands between two turns of the row, such as the result of a tool, is left out.

    Args:
        tokenizer: the model's, a fast one of transformers: it says which characters a token stands for.
        marker: text of the marker; the last token of each is read.
        begin: returns the text before the first step; by default the question and a space.
        between: text behind each marker but the last.
        special_tokens: whether the tokenizer adds its own, such as a BOS.
    """

    def __init__(
        self,
        tokenizer: Any,
        marker: str,
        *,
        begin: Callable[[StepRow], str] = lambda row: f"{row.question} ",
        between: str = "",
        special_tokens: bool = True,
    ) -> None:
        self._tokenizer, self._marker, self._begin = tokenizer, marker, begin
        self._between, self._special_tokens = between, special_tokens

    def __call__(self, row: StepRow) -> ModelInput:
        """Returns the tokens of the text."""
        text = self._begin(row)
        marker_ends: list[int] = []
        for step in row.step_texts:
            text += self._between if marker_ends else ""
            text += step.strip() + self._marker
            marker_ends.append(len(text))
        made = self._tokenizer(text, add_special_tokens=self._special_tokens, return_offsets_mapping=True)
        where = [(begin, at) for at, (begin, end) in enumerate(made["offset_mapping"]) if end > begin]
        begins = [begin for begin, _ in where]
        # the last token that begins at or before the marker's last character
        reads = [where[bisect_right(begins, end - 1) - 1][1] for end in marker_ends]
        ends = [made["offset_mapping"][read][1] for read in reads]
        if len(set(reads)) < len(reads) or any(a < b for a, b in zip(ends, marker_ends, strict=True)):
            raise RewardsFailed(
                f"the model's tokenizer has no token of its own for a marker {self._marker!r}",
                hint="another marker, or text between the steps",
            )
        return ModelInput(list(made["input_ids"]), reads)


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


def qwen_math_prm(
    folder: str,
    *,
    separator: str = "<extra_0>",
    own_text: bool = False,
    system: str = QWEN_SYSTEM,
    tokenizer: Any = None,
    trust_remote_code: bool = False,
    **loading: Any,
) -> HuggingFacePrm:
    """Returns a model like Qwen2.5-Math-PRM: two classes, read at a separator behind each step. Blocks.

    Args:
        folder: of the model and its tokenizer, or its name.
        separator: one token of the model's.
        own_text: False: the row's own ids are the model's, too, as those of Qwen2.5 policies are. True: text
            is put into the model's chat template, for policies of other vocabularies; needs
            `StepRewards(tokenizer=)`.
        system: the system message, with `own_text`.
        tokenizer: the model's; default: that of the folder.
        trust_remote_code: Qwen's own models come with code that must be allowed to run.
        loading: for `from_pretrained` of the model, such as `dtype` or `device_map`.

    Raises:
        RewardsFailed: the separator is not one token.
    """
    tokenizer = tokenizer or _tokenizer(folder, trust_remote_code)
    marker = [_one_id(tokenizer, separator)]
    make_input: InputMaker = OwnTokens(marker, behind=tokenizer.all_special_ids)
    if own_text:

        def begin(row: StepRow) -> str:
            asked = [{"role": "system", "content": system}, {"role": "user", "content": row.question}]
            text: str = tokenizer.apply_chat_template(asked, tokenize=False, add_generation_prompt=True)
            return text

        make_input = OwnText(tokenizer, separator, begin=begin, special_tokens=False)
    model = _classifier(folder, trust_remote_code, loading)
    return HuggingFacePrm(model, make_input, TokenClass())


def trl_prm(
    folder: str,
    *,
    separator: str = "\n",
    own_text: bool = True,
    good: int = 1,
    tokenizer: Any = None,
    **loading: Any,
) -> HuggingFacePrm:
    """Returns a token classification model as TRL's PRMTrainer makes them. Blocks.

    Args:
        folder: of the model and its tokenizer, or its name.
        separator: the trainer's `step_separator`; the class of its last token is the step's.
        own_text: True: steps are tokenised with the model's tokenizer; needs `StepRewards(tokenizer=)`.
            False: the row's own ids are the model's, too.
        good: index of the class of right steps.
        tokenizer: the model's; default: that of the folder.
        loading: for `from_pretrained` of the model.
    """
    tokenizer = tokenizer or _tokenizer(folder, False)
    make_input: InputMaker = (
        OwnText(tokenizer, separator)
        if own_text
        else OwnTokens(_ids(tokenizer, separator), behind=tokenizer.all_special_ids)
    )
    return HuggingFacePrm(_classifier(folder, False, loading), make_input, TokenClass(good))


def next_token_prm(
    folder: str,
    *,
    tag: str,
    good: str,
    bad: str,
    between: str = "\n",
    own_text: bool = True,
    reuse: bool = True,
    tokenizer: Any = None,
    **loading: Any,
) -> HuggingFacePrm:
    """Returns a causal language model that says behind a tag, as the next token, what it thinks. Blocks.

    Args:
        folder: of the model and its tokenizer, or its name.
        tag: text behind each step.
        good, bad: text of the two tokens that are compared; the last token of each is taken.
        between: text behind each tag but the last, with `own_text`.
        own_text: as in `trl_prm`.
        reuse: without `own_text`: steps that have the tag already get no other.
        tokenizer: the model's; default: that of the folder.
        loading: for `from_pretrained` of the model.

    Raises:
        RewardsFailed: good and bad end in the same token.
    """
    from transformers import AutoModelForCausalLM

    tokenizer = tokenizer or _tokenizer(folder, False)
    ids = [_ids(tokenizer, text)[-1] for text in (good, bad)]
    if ids[0] == ids[1]:
        raise RewardsFailed(f"{good!r} and {bad!r} end in the same token of {folder}, {ids[0]}")
    make_input: InputMaker = (
        OwnText(tokenizer, tag, between=between)
        if own_text
        else OwnTokens(_ids(tokenizer, tag), reuse=reuse, behind=tokenizer.all_special_ids)
    )
    loader: Any = AutoModelForCausalLM
    return HuggingFacePrm(loader.from_pretrained(folder, **loading), make_input, NextToken(ids[0], ids[1]))


def math_shepherd(folder: str = "peiyi9979/math-shepherd-mistral-7b-prm", **options: Any) -> HuggingFacePrm:
    """Returns Math-Shepherd, or one trained like it: the tag ки, then + or -. Blocks.

    Args:
        folder: of the model and its tokenizer, or its name.
        options: of `next_token_prm`.
    """
    return next_token_prm(folder, **{"tag": " ки", "good": "+", "bad": "-", **options})


def _tokenizer(folder: str, trust_remote_code: bool) -> Any:
    from transformers import AutoTokenizer

    loader: Any = AutoTokenizer
    return loader.from_pretrained(folder, trust_remote_code=trust_remote_code)


def _classifier(folder: str, trust_remote_code: bool, loading: dict[str, Any]) -> Any:
    """A model of transformers' own, or one whose folder has its code under AutoModel."""
    from transformers import AutoConfig, AutoModel, AutoModelForTokenClassification

    config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
    own_code = "AutoModel" in (getattr(config, "auto_map", None) or {})
    loader: Any = AutoModel if own_code else AutoModelForTokenClassification
    return loader.from_pretrained(folder, trust_remote_code=trust_remote_code, **loading)


def _ids(tokenizer: Any, text: str) -> list[int]:
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False)
    return ids


def _one_id(tokenizer: Any, text: str) -> int:
    ids = _ids(tokenizer, text)
    if len(ids) != 1:
        raise RewardsFailed(f"the separator {text!r} is {len(ids)} tokens of the model, not one")
    return ids[0]
