"""Loads published kinds of process reward models, each with its own way of asking."""

from __future__ import annotations

from typing import Any

from shmbridge.producers.rewards.errors import RewardsFailed
from shmbridge.producers.rewards.huggingface import HuggingFacePrm, NextToken, TokenClass
from shmbridge.producers.rewards.model_input import InputMaker, OwnText, OwnTokens
from shmbridge.producers.rewards.step_row import StepRow

QWEN_SYSTEM = "Please reason step by step, and put your final answer within \\boxed{}."


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
