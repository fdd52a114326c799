"""A Qwen2 so small that an engine starts with it in seconds, Hugging Face's results for the same weights, and
settings that engines need.

These tests run in an environment with vLLM (`make test-vllm`); elsewhere they are left out.
"""

from __future__ import annotations

import gc
import importlib.util
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

if importlib.util.find_spec("vllm") is None:
    collect_ignore_glob = ["test_*.py", "server/test_*.py"]

# What vLLM's CPU build needs, here and in every process that is started from here; read when vLLM starts an
# engine.
ENGINE_ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
}
os.environ.update(ENGINE_ENVIRONMENT)

ROOT = Path(__file__).parents[3]
sys.path[:0] = [str(ROOT / "examples"), str(Path(__file__).parent)]

PROMPT = [2, 7, 9, 12, 3]
NEW_TOKENS = 16


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Starting an engine belongs to the first test of a module."""
    for item in items:
        if item.path.parent == Path(__file__).parent and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(300))


@pytest.fixture(autouse=True, scope="module")
def _engines_end() -> Iterator[None]:
    """An engine in a cycle of objects keeps its processes until it is collected."""
    yield
    gc.collect()


@pytest.fixture(scope="session")
def learner_python() -> str:
    """The interpreter of learners and environments, whose packages are not vLLM's."""
    return os.environ.get("SHMBRIDGE_PYTHON", str(ROOT / ".venv/bin/python"))


@pytest.fixture(scope="session")
def make_model() -> Callable[..., Any]:
    """Call it with a seed for a Hugging Face model of random weights, float32; the vocabulary is that of
    `tiny_folder`'s tokenizer.
    """
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    def make(seed: int, *, tied: bool = False) -> Any:
        torch.manual_seed(seed)
        config = Qwen2Config(
            vocab_size=28,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=2,  # two workers have one each
            max_position_embeddings=512,
            initializer_range=0.1,
            tie_word_embeddings=tied,
            pad_token_id=0,
            eos_token_id=1,
            bos_token_id=None,
        )
        return Qwen2ForCausalLM(config).eval()

    return make


@pytest.fixture(scope="session")
def tiny_folder(
    make_model: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., Path]:
    """Call it for the folder of a model and its tokenizer, seed 0 unless said otherwise."""
    from tiny_model import build_tokenizer

    def folder(seed: int = 0, *, tied: bool = False) -> Path:
        made = tmp_path_factory.getbasetemp() / f"tiny-{seed}{'-tied' if tied else ''}"
        if not made.exists():
            make_model(seed, tied=tied).save_pretrained(made)
            build_tokenizer().save_pretrained(made)
        return made

    return folder


@pytest.fixture(scope="session")
def greedy() -> Callable[..., list[int]]:
    """Call it with a model for the greedy tokens that Hugging Face's `generate` gives, eos as any other
    token.
    """
    import torch

    def generate(model: Any, prompt: list[int] = PROMPT, tokens: int = NEW_TOKENS) -> list[int]:
        answer = model.generate(
            torch.tensor([prompt]),
            do_sample=False,
            max_new_tokens=tokens,
            min_new_tokens=tokens,
            eos_token_id=None,
        )
        return list(answer[0, len(prompt) :].tolist())

    return generate


@pytest.fixture(scope="session")
def vllm_greedy() -> Callable[..., list[int]]:
    """Call it with an offline `LLM` for its greedy tokens, eos as any other token."""
    from vllm import SamplingParams

    def generate(llm: Any, prompt: list[int] = PROMPT, tokens: int = NEW_TOKENS) -> list[int]:
        wanted = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        return list(
            llm.generate([{"prompt_token_ids": prompt}], wanted, use_tqdm=False)[0].outputs[0].token_ids
        )

    return generate


@pytest.fixture(scope="module")
def make_llm(tiny_folder: Callable[..., Path]) -> Iterator[Callable[..., Any]]:
    """Call it for an offline engine with our backend; shut down when the module's tests are over."""
    from vllm import LLM
    from vllm.config import WeightTransferConfig

    made: list[Any] = []

    def make(folder: Path | None = None, **options: Any) -> Any:
        usual = {
            "dtype": "float32",
            "enforce_eager": True,
            "max_model_len": 256,
            "max_num_seqs": 8,
            "seed": 0,
        }
        backend = WeightTransferConfig(backend="shmbridge")
        made.append(LLM(str(folder or tiny_folder()), weight_transfer_config=backend, **{**usual, **options}))
        return made[-1]

    yield make
    while made:
        made.pop().llm_engine.engine_core.shutdown()
