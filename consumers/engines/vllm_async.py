"""A vLLM `AsyncLLM` in this process, whose event loop runs in another thread than the pusher's."""

from __future__ import annotations

import asyncio
import concurrent.futures
import time
from collections.abc import Coroutine
from typing import Any, TypeVar

from shmbridge.consumers.engines.engine import Engine, EngineFailed, NoAnswer, Pause, Update, version_of
from shmbridge.consumers.engines.vllm_steps import bring_to

Result = TypeVar("Result")

_TIMEOUT_S = 60.0  # of calls other than updates
_SLEEP_TIMEOUT_S = 300.0


class VllmAsync(Engine):
    """One `AsyncLLM`. Call its methods in any thread but that of its event loop, which they would block.

    Args:
        llm: made with `weight_transfer_config` of the backend "shmbridge".
        loop: the engine's event loop; None: the running one.

    Raises:
        EngineFailed: no loop is running, and none was given.
    """

    def __init__(self, llm: Any, loop: asyncio.AbstractEventLoop | None = None) -> None:
        self.address = f"the AsyncLLM of {llm.vllm_config.model_config.model}"
        try:
            self._loop = loop or asyncio.get_running_loop()
        except RuntimeError:
            raise EngineFailed(
                f"{self.address} lives in an event loop, and none is running here",
                hint="make it there, or give VllmAsync its loop",
            ) from None
        self.llm = llm

    def require_callable(self) -> None:
        """Raises EngineFailed in the engine's own event loop. Never blocks."""
        try:
            running = asyncio.get_running_loop()
        except RuntimeError:
            return
        if running is self._loop:
            raise EngineFailed(
                f"{self.address}: this would wait for its own event loop",
                hint="await push_async, or updated_async",
            )

    def update(self, update: Update) -> None:
        """Loads the version into the engine, which samples on return. Blocks; raises EngineFailed."""
        bring_to(_Calls(self, time.monotonic() + update.timeout_s), self.address, update)

    def version(self) -> int | None:
        """Returns the version that samples are stamped with. Blocks; raises EngineFailed."""
        return version_of(self.done(self.llm.get_weight_version(), _TIMEOUT_S))

    def sleep(self, pause: Pause) -> bool:
        """Moves weights to host memory and drops the cache, given `enable_sleep_mode`. Blocks."""
        can_sleep = bool(self.llm.vllm_config.model_config.enable_sleep_mode)
        if can_sleep:
            self.done(self.llm.sleep(1, pause), _SLEEP_TIMEOUT_S)
        return can_sleep

    def wake(self) -> None:
        """Wakes the engine. Blocks."""
        if self.done(self.llm.is_sleeping(), _TIMEOUT_S):
            self.done(self.llm.wake_up(), _SLEEP_TIMEOUT_S)

    def done(self, call: Coroutine[Any, Any, Result], timeout_s: float) -> Result:
        """Runs a call in the engine's loop and returns its result. Blocks; raises EngineFailed."""
        name = getattr(call, "__name__", "the call")
        try:
            self.require_callable()
        except EngineFailed:
            call.close()
            raise
        future = asyncio.run_coroutine_threadsafe(call, self._loop)
        try:
            return future.result(timeout_s)
        except concurrent.futures.TimeoutError:
            future.cancel()
            raise NoAnswer(
                f"{self.address}: {name} did not end in {timeout_s:.0f} s", hint="see its log"
            ) from None
        except Exception as error:  # any error of a worker
            raise EngineFailed(
                f"{self.address}: {name}: {type(error).__name__}: {error}", hint="see its log"
            ) from error


class _Calls:
    """The calls of one update, within its deadline."""

    def __init__(self, engine: VllmAsync, until: float) -> None:
        self._engine, self._llm, self._until = engine, engine.llm, until

    def pause(self, mode: Pause) -> None:
        self._done(self._llm.pause_generation(mode=mode, clear_cache=False))

    def start(self) -> None:
        self._done(self._llm.start_weight_update())

    def load(self, update_info: dict[str, Any]) -> None:
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        self._done(self._llm.update_weights(WeightTransferUpdateRequest(update_info=update_info)))

    def finish(self, version: str | None) -> None:
        self._done(self._llm.finish_weight_update(version))

    def engines(self) -> int:
        return int(self._llm.vllm_config.parallel_config.data_parallel_size)

    def stamp(self, version: str) -> None:
        self._done(self._llm.update_weight_version(version))

    def reset_cache(self) -> bool:
        return bool(self._done(self._llm.reset_prefix_cache(True)))

    def resume(self) -> None:
        # even after the update's deadline
        self._engine.done(self._llm.resume_generation(), _TIMEOUT_S)

    def _done(self, call: Coroutine[Any, Any, Result]) -> Result:
        return self._engine.done(call, max(self._until - time.monotonic(), 0.1))
