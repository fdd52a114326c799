"""Tokenizers of three kinds and tiny reward models with random weights; nothing is downloaded."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789+-=.,:?<>/{}\\ \nки"
SPECIAL = ["<|pad|>", "<|end|>", "<extra_0>", "<|unk|>"]
TEXTS = [
    "Step 1: we add two and two.\n\nStep 2: that is four.\n\nThe answer is four.\n\n\n",
    "naïve café größe 雪が降る 🙂 é\n\nzwei\n",
    "<think>a b c</think> \\boxed{4} ки\n",
]


def fast(tokenizer: Any, **special: str) -> Any:
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<|pad|>",
        eos_token="<|end|>",
        unk_token="<|unk|>",
        clean_up_tokenization_spaces=False,
        **special,
    )


def characters() -> Any:
    """A token per character, as examples/tiny_model.py makes them."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    vocabulary = {token: index for index, token in enumerate([*SPECIAL, *LETTERS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<|unk|>"))
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    template = (
        "{% for message in messages %}{{ message['role'] + ':' + message['content'] + '<|end|>' }}"
        "{% endfor %}"
        "{% if add_generation_prompt %}{{ 'assistant:' }}{% endif %}"
    )
    return fast(tokenizer, chat_template=template, extra_special_tokens=["<extra_0>"])


def trained(pre: Any, decoder: Any, alphabet: list[str]) -> Any:
    from tokenizers import Tokenizer, models, trainers

    tokenizer = Tokenizer(models.BPE(unk_token="<|unk|>"))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre, decoder
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(TEXTS * 3, trainer)
    return fast(tokenizer)


def bytes_level() -> Any:
    """As those of GPT-2, Qwen and Llama 3: a character may be spread over tokens."""
    from tokenizers import decoders, pre_tokenizers

    level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return trained(level, decoders.ByteLevel(), pre_tokenizers.ByteLevel.alphabet())


def metaspace() -> Any:
    """As those of Llama 2 and Mistral: the space belongs to the word behind it, the first has none."""
    from tokenizers import decoders, pre_tokenizers

    return trained(pre_tokenizers.Metaspace(), decoders.Metaspace(), sorted(set("".join(TEXTS))))


KINDS: dict[str, Callable[[], Any]] = {"characters": characters, "bytes": bytes_level, "metaspace": metaspace}


@pytest.fixture(scope="session")
def make_tokenizer() -> Callable[[str], Any]:
    """A tokenizer of one of the three kinds, made once."""
    made: dict[str, Any] = {}

    def make(kind: str) -> Any:
        if kind not in made:
            made[kind] = KINDS[kind]()
        return made[kind]

    return make


@pytest.fixture(scope="session")
def policy(make_tokenizer: Callable[[str], Any]) -> Any:
    """The policy's tokenizer: a token per character."""
    return make_tokenizer("characters")


def config(vocabulary: int, **more: Any) -> Any:
    from transformers import Qwen2Config

    return Qwen2Config(
        vocab_size=vocabulary,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        tie_word_embeddings=False,
        initializer_range=0.3,
        pad_token_id=0,
        **more,
    )


@pytest.fixture(scope="session")
def classifier_folder(policy: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A token classification model of two classes, with the policy's vocabulary."""
    from transformers import Qwen2ForTokenClassification

    folder = tmp_path_factory.mktemp("classifier")
    torch.manual_seed(1)
    Qwen2ForTokenClassification(config(len(policy), num_labels=2)).save_pretrained(folder)
    policy.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def causal_folder(make_tokenizer: Callable[[str], Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A causal language model with a vocabulary of its own."""
    from transformers import Qwen2ForCausalLM

    folder = tmp_path_factory.mktemp("causal")
    tokenizer = make_tokenizer("bytes")
    torch.manual_seed(2)
    Qwen2ForCausalLM(config(len(tokenizer))).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def make_group(policy: Any) -> Callable[..., dict[str, Any]]:
    """A group of (prompt, response) texts, in the policy's tokens."""

    def make(*rows: tuple[str, str], **columns: Any) -> dict[str, Any]:
        prompts, answers = zip(*[[policy.encode(text) for text in row] for row in rows], strict=True)
        return {
            "tokens": [prompt + answer for prompt, answer in zip(prompts, answers, strict=True)],
            "loss_mask": [
                [0] * len(prompt) + [1] * len(answer) for prompt, answer in zip(prompts, answers, strict=True)
            ],
            **columns,
        }

    return make


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)
