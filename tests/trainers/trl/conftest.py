"""A tiny model with 64 tokens, and what every test of TRL says to its trainers."""

import os

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")

import pytest

from shmbridge.testing.fixtures import known_groups

VOCABULARY = 64


@pytest.fixture(scope="session")
def tiny(tmp_path_factory) -> str:
    """The folder of a random model of 64 tokens, and its tokenizer; token 0 pads."""
    import torch
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

    folder = str(tmp_path_factory.mktemp("tiny"))
    words = models.WordLevel({f"w{number}": number for number in range(VOCABULARY)}, unk_token="w0")
    PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(words), pad_token="w0", eos_token="w1", unk_token="w0", padding_side="left"
    ).save_pretrained(folder)
    torch.manual_seed(3)
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 128}
    ends = {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": None}
    config = Qwen2Config(vocab_size=VOCABULARY, **shape, **heads, **ends, initializer_range=0.1)
    Qwen2ForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture
def settings(tmp_path):
    """Returns GRPOConfig with what all tests share: on the CPU, quiet, nothing saved."""
    from trl import GRPOConfig

    def make(**changed) -> GRPOConfig:
        given = {
            "output_dir": str(tmp_path / "out"), "use_cpu": True, "bf16": False, "seed": 3, "report_to": [],
            "save_strategy": "no", "logging_steps": 1, "disable_tqdm": True, "learning_rate": 1e-2,
            "per_device_train_batch_size": 4, "num_generations": 4, "max_steps": 1, "beta": 0.0,
            "gradient_accumulation_steps": 1, "lr_scheduler_type": "constant", "warmup_steps": 0,
        }  # fmt: skip
        return GRPOConfig(**given | changed)

    return make


@pytest.fixture
def known():
    """The five known groups of four rows."""
    return known_groups(seed=3, vocabulary=VOCABULARY, rows=4)
