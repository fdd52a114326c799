"""A tokenizer without a network, environments by name, and a server whose answers a test writes."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from shmbridge.producers.gem import AtroposGemEnv
from shmbridge.producers.rollout import Sampled
from tests.environments.byte_tokenizer import byte_tokenizer

ENVS = Path(__file__).parent / "envs"


class Scripted:
    """Samples what `answer(messages)` says; log-probability i is -(i + 1) / 128."""

    def __init__(self, answer: Callable[[Sequence[Any]], str], cut: bool = False) -> None:
        self.tokenizer, self._answer, self._cut = byte_tokenizer(), answer, cut

    async def sample(self, prompt, sampling, messages):
        tokens = self.tokenizer.encode(self._answer(messages), add_special_tokens=False)
        tokens += [] if self._cut else [self.tokenizer.eos_token_id]
        logprobs = [-(at + 1) / 128 for at in range(len(tokens))]
        return Sampled(tokens, logprobs, [3] * len(tokens), "length" if self._cut else "stop")


@pytest.fixture(scope="session")
def policy_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder of a tokenizer with a token per byte and a chat template."""
    folder = tmp_path_factory.mktemp("tokenizer")
    byte_tokenizer().save_pretrained(folder)
    return str(folder)


@pytest.fixture
def envs() -> ModuleType:
    """envs/atropos_envs.py, the same module that "path.py:Class" names."""
    from shmbridge.producers.gem.runtime import environment_class

    return sys.modules[environment_class(f"{ENVS / 'atropos_envs.py'}:ChatEnv").__module__]


@pytest.fixture
def make_env(envs: ModuleType, policy_tokenizer: str) -> Iterator[Callable[..., AtroposGemEnv]]:
    """`make_env(class name, **fields of its config)`, or options={...} of AtroposGemEnv."""
    made: list[AtroposGemEnv] = []

    def make(name: str, *, options: dict[str, Any] | None = None, **config: Any) -> AtroposGemEnv:
        options = {"tokenizer": policy_tokenizer, "timeout_s": 20.0, **(options or {})}
        made.append(AtroposGemEnv(getattr(envs, name), config=config, **options))
        return made[-1]

    yield make
    for env in made:
        env.close()


@pytest.fixture(scope="session")
def gem_envs() -> ModuleType:
    """envs/gem_envs.py, registered."""
    spec = importlib.util.spec_from_file_location("gem_envs", ENVS / "gem_envs.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def scripted() -> type[Scripted]:
    return Scripted
