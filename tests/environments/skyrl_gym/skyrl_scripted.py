"""A tokenizer of bytes and pieces of text, and a token server whose answers a test writes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from shmbridge.producers.rollout import Message, Sampled, Sampling

TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
SPECIAL = ["<|end|>", "<|pad|>", "<|user|>", "<|assistant|>", "<|system|>"]
# Merges that lie across tags, so that one token holds the end of a tag and what follows.
MERGES = ["th", "in", "nk", "th in", "ink", "ow", "/ th", "k>", "k> s", ">s", "o <", "o w", "er", "an", "sw"]


def piece_tokenizer() -> Any:
    """Returns the tokenizer: one token for each byte, further ones for pieces of words and tags."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {each: at for at, each in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    merges = []
    for pair in MERGES:
        first, second = pair.split(" ") if " " in pair else (pair[0], pair[1:])
        if first in vocabulary and second in vocabulary and first + second not in vocabulary:
            vocabulary[first + second] = len(vocabulary)
            merges.append((first, second))
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(each, special=True) for each in SPECIAL])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|end|>",
        pad_token="<|pad|>",
        clean_up_tokenization_spaces=False,
        chat_template=TEMPLATE,
    )


class Scripted:
    """Samples what `answer(prompt as text, how often it was asked)` says; logprob i is -(i + 1) / 128.

    An answer is text, then an end token, or the tokens themselves.
    """

    def __init__(self, tokenizer: Any, answer: Callable[[str, int], str | list[int]]) -> None:
        self.tokenizer, self.answer = tokenizer, answer
        self.asked: list[tuple[list[int], list[int], list[float]]] = []  # prompt, tokens, log-probabilities
        self.version = 7

    async def sample(
        self, prompt: Sequence[int], sampling: Sampling, messages: Sequence[Message] = ()
    ) -> Sampled:
        await asyncio.sleep(0)
        said = self.answer(self.tokenizer.decode(list(prompt)), len(self.asked))
        if isinstance(said, str):
            said = [*self.tokenizer.encode(said, add_special_tokens=False), self.tokenizer.eos_token_id]
        reason = "stop"
        if sampling.max_tokens is not None and len(said) > sampling.max_tokens:
            said, reason = said[: sampling.max_tokens], "length"
        logprobs = [-(at + 1) / 128 for at in range(len(said))]
        self.asked.append((list(prompt), said, logprobs))
        return Sampled(list(said), logprobs, [self.version] * len(said), reason)
