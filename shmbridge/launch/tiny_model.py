"""Builds a model small enough to learn a skill from random weights on one CPU core, with a tokenizer to
match.

    python examples/tiny_model.py runs/tiny --seed 1
    python examples/tiny_model.py runs/tiny --seed 1 --heads 2    of 32 numbers: vLLM's least on a CPU

86,208 parameters and 28 tokens, one per character, in an ordinary Hugging Face folder: `AutoTokenizer` and
`AutoModelForCausalLM` load it, nothing is downloaded. Knows nothing of bridges. Called by `demo.py`, tests.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

SPECIAL = ["<|pad|>", "<|end|>", "<|user|>", "<|assistant|>", "<|system|>", "<|unk|>"]
CHARACTERS = "0123456789abcdefgh+>?:"
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def build(folder: Path, seed: int = 0, heads: int = 4) -> None:
    """Writes model and tokenizer into `folder`, the same weights for the same seed. Blocks for the disk."""
    build_tokenizer().save_pretrained(folder)
    build_model(seed, heads).save_pretrained(folder)


def build_tokenizer() -> Any:
    """Returns the tokenizer: one token per character, left padding, a chat template of role tokens."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: index for index, token in enumerate([*SPECIAL, *CHARACTERS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<|unk|>"))
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<|pad|>",
        eos_token="<|end|>",
        unk_token="<|unk|>",
        padding_side="left",
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE,
    )


def build_model(seed: int, heads: int = 4) -> Any:
    """Returns the model with random weights: two layers of width 64, whatever the number of heads."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(seed)
    return Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=len(SPECIAL) + len(CHARACTERS),
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=heads,
            num_key_value_heads=heads,
            max_position_embeddings=128,
            tie_word_embeddings=False,
            initializer_range=0.1,  # with the usual 0.02 a random model never samples anything worth a reward
            pad_token_id=SPECIAL.index("<|pad|>"),
            eos_token_id=SPECIAL.index("<|end|>"),
            bos_token_id=None,
        )
    )


def main() -> None:
    """Builds it as the command line says."""
    parser = argparse.ArgumentParser(description="Build a tiny random model and its tokenizer.")
    parser.add_argument("folder", type=Path, help="where to write it")
    parser.add_argument("--seed", type=int, default=0, help="of the random weights [0]")
    parser.add_argument(
        "--heads", type=int, default=4, help="of attention, in each layer; they share its width of 64 [4]"
    )
    options = parser.parse_args()
    build(options.folder, options.seed, options.heads)
    print(f"tiny model (seed {options.seed}) in {options.folder}")


if __name__ == "__main__":
    main()
