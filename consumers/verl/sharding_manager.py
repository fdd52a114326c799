"""The seed recipe's context manager: inside it the inference engine has the trained model's weights.

sharding_manager = AtroposShardingManager("run1", model, llm)
with sharding_manager:
    responses = sharding_manager.inference_engine.generate(prompts)
...                                     # its memory is free here; train
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any, Self

from shmbridge.consumers.weight_sync import WeightSync

__all__ = ["AtroposShardingManager"]


class AtroposShardingManager:
    """`WeightSync.updated` under the seed recipe's name; enter it before each rollout. Not reentrant.

    Args:
        bridge: whose weights segment is used.
        training_model: a torch module, as `WeightSync.push` takes it.
        inference_engine: a vLLM `LLM`, an address, or what else `WeightSync` takes.
        options: of `WeightSync`.

    Raises: as `WeightSync`.
    """

    def __init__(self, bridge: str, training_model: Any, inference_engine: Any, **options: Any) -> None:
        self.training_model, self.inference_engine = training_model, inference_engine
        self._sync = WeightSync(bridge, inference_engine, **options)
        self._entered = ExitStack()

    def __enter__(self) -> Self:
        """Wakes the engine and loads the model's weights; blocks until it samples with them."""
        self._entered.enter_context(self._sync.updated(self.training_model))
        return self

    def __exit__(self, *error: Any) -> None:
        """Makes the engine free its memory, also after an error in the block."""
        self._entered.__exit__(*error)

    def close(self) -> None:
        """Closes engine and segment; idempotent."""
        self._sync.close()
