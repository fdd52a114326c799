"""A vLLM `LLM` in this process. It samples only during its calls, so it is never paused. Imports no vLLM."""

from __future__ import annotations

from typing import Any

from shmbridge.consumers.engines.engine import Engine, EngineFailed, Pause, Update, version_of
from shmbridge.consumers.engines.vllm_steps import bring_to


class VllmOffline(Engine):
    """One `LLM`; call its methods in the thread that calls `generate`.

    Args:
        llm: made with `weight_transfer_config` of the backend "shmbridge".
    """

    in_process = True

    def __init__(self, llm: Any) -> None:
        self.address = f"the LLM of {llm.llm_engine.vllm_config.model_config.model}"
        self._llm = llm

    def update(self, update: Update) -> None:
        """Loads the version into the engine. Blocks; raises EngineFailed."""
        bring_to(self, self.address, update)

    def version(self) -> int | None:
        """Returns the version that samples are stamped with. Blocks."""
        return version_of(self._llm.get_weight_version())

    def sleep(self, pause: Pause) -> bool:
        """Moves weights to host memory and drops the cache, given `enable_sleep_mode`. Blocks."""
        can_sleep = bool(self._llm.llm_engine.vllm_config.model_config.enable_sleep_mode)
        if can_sleep:
            self._llm.sleep(level=1)
        return can_sleep

    def wake(self) -> None:
        """Wakes the engine. Blocks."""
        if self._llm.llm_engine.is_sleeping():
            self._llm.wake_up()

    # The calls of `vllm_steps.py`:

    def pause(self, mode: Pause) -> None:
        """Does nothing: the engine does not sample between two calls."""

    def resume(self) -> None:
        """Does nothing."""

    def start(self) -> None:
        """Begins an update."""
        self._called("start_weight_update")

    def load(self, update_info: dict[str, Any]) -> None:
        """Makes every worker load the weights."""
        self._called("update_weights", {"update_info": update_info})

    def finish(self, version: str | None) -> None:
        """Ends the update."""
        self._called("finish_weight_update", version)

    def engines(self) -> int:
        """Returns 1: an `LLM` is one engine."""
        return 1

    def stamp(self, version: str) -> None:
        """Stamps later samples with this version."""
        self._called("update_weight_version", version)

    def reset_cache(self) -> bool:
        """Drops cached keys and values."""
        return bool(self._called("reset_prefix_cache", True))

    def _called(self, name: str, *args: object) -> Any:
        try:
            return getattr(self._llm, name)(*args)
        except Exception as error:  # any error of a worker
            raise EngineFailed(
                f"{self.address}: {name}: {type(error).__name__}: {error}", hint="see its log"
            ) from error
