"""Every Python block of docs/how-to/rewards.md runs, in order, in one process; its YAML is a config."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from own_bridges import clean_own_bridges, with_own_bridges

pytest.importorskip("transformers")
torch = pytest.importorskip("torch")

PAGE = Path(__file__).parents[3] / "docs/how-to/rewards.md"
SPECIAL = ["<|pad|>", "<|end|>", "<extra_0>", "<|unk|>"]


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE.read_text(), re.DOTALL)


@pytest.fixture
def tokenizer() -> Any:
    """A token per byte."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = {token: at for at, token in enumerate([*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet())])}
    made = Tokenizer(models.BPE(letters, []))
    made.add_special_tokens(SPECIAL)
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    names = dict(
        zip(("pad_token", "eos_token", "unk_token"), (SPECIAL[0], SPECIAL[1], SPECIAL[3]), strict=True)
    )
    return PreTrainedTokenizerFast(tokenizer_object=made, **names)


@pytest.fixture
def prm_folder(tokenizer: Any, tmp_path: Path) -> str:
    """A reward model with random weights."""
    from transformers import Qwen2Config, Qwen2ForTokenClassification

    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_labels": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    Qwen2ForTokenClassification(Qwen2Config(vocab_size=len(tokenizer), **sizes, **heads)).save_pretrained(
        tmp_path
    )
    tokenizer.save_pretrained(tmp_path)
    return str(tmp_path)


def test_the_examples_run_as_written(
    tokenizer: Any, prm_folder: str, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [("1+1?", "<think>two</think>\n\n\\boxed{2}"), ("2+2?", "five")]
    encoded = [[tokenizer.encode(text) for text in row] for row in rows]
    scope: dict[str, Any] = {
        "tokenizer": tokenizer,
        "prm_folder": prm_folder,
        "tokens": [prompt + answer for prompt, answer in encoded],
        "loss_mask": [[0] * len(prompt) + [1] * len(answer) for prompt, answer in encoded],
    }
    try:
        for block in blocks("python"):
            exec(compile(with_own_bridges(block), str(PAGE), "exec"), scope)
        assert scope["both"]["step_ends"] == [[len(row)] for row in scope["tokens"]]
    finally:
        scope.clear()
        clean_own_bridges()
    said = capsys.readouterr().out
    assert "[2 1] [2 1]" in said
    assert "[1.5, 0.004] [1.0, -1.0]" in said
    assert "{'base': 0.0, '<think>': 0.0, '\\\\boxed{': 0.0, 'length_bounty': 0.004}" in said


def test_the_yaml_is_a_config(tmp_path: Path) -> None:
    from shmbridge.producers.rewards import FormatMarker, LengthBounty, RewardConfig, read_config

    (text,) = blocks("yaml")
    path = tmp_path / "rewards.yaml"
    path.write_text(text)
    assert read_config(path) == RewardConfig(
        base={-1.0: 0.0},
        format_markers=(
            FormatMarker("<think>", 0.2),
            FormatMarker(r"answer: \d+", 0.3, True, "each", "wrong", "answer"),
        ),
        length_bounty=LengthBounty(0.2),
        clamp=(-1.0, 1.0),
    )


def test_the_links_lead_somewhere() -> None:
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", PAGE.read_text()):
        assert (PAGE.parent / target).exists(), target
