"""Several engines as one: all load a version in parallel, and a failing one does not delay the others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from shmbridge.consumers.engines.autodetect import AtUrl
from shmbridge.consumers.engines.engine import Engine, EngineFailed, Pause, Update
from shmbridge.consumers.engines.vllm_async import VllmAsync
from shmbridge.consumers.engines.vllm_offline import VllmOffline


def engine_of(given: Any) -> Engine:
    """Returns an Engine for an Engine, a URL, a vLLM `LLM`, or an `AsyncLLM` (called in its event loop).

    Raises EngineFailed for any other object.
    """
    if isinstance(given, Engine):
        return given
    if isinstance(given, str) and given.startswith(("http://", "https://")):
        return AtUrl(given)
    if hasattr(given, "pause_generation") and hasattr(given, "start_weight_update"):
        return VllmAsync(given)
    if hasattr(given, "llm_engine") and hasattr(given, "start_weight_update"):
        return VllmOffline(given)
    raise EngineFailed(
        f"{given!r} is no engine", hint='pass "http://host:port", a vllm.LLM, an AsyncLLM, or an Engine'
    )


class Fleet:
    """One or more engines that are always called together, and closed with this. One thread."""

    def __init__(self, engines: Sequence[Engine]) -> None:
        self.engines = tuple(engines)
        remote = [engine for engine in engines if not engine.in_process]
        # One thread per engine: after an interrupted call, the engine's running call ends before the next
        # begins.
        self._threads = (
            {engine: ThreadPoolExecutor(1, "engine") for engine in remote} if len(remote) > 1 else {}
        )

    def require_callable(self) -> None:
        """Raises EngineFailed if calls from this thread would fail. Never blocks."""
        for engine in self.engines:
            engine.require_callable()

    def update(self, update: Update) -> dict[str, EngineFailed]:
        """Loads a version into all; returns the failures by address. Blocks for the slowest."""
        return self._each(lambda engine: engine.update(update))

    def newest_version(self) -> int | None:
        """Returns the highest version of any engine; None without one. Blocks for the slowest."""
        said: list[int] = []

        def ask(engine: Engine) -> None:
            if (version := engine.version()) is not None:
                said.append(version)

        self._each(ask)
        return max(said, default=None)

    def sleep(self, pause: Pause) -> dict[str, EngineFailed]:
        """Makes all free their memory; returns the failures by address. Blocks for the slowest."""
        return self._each(lambda engine: engine.sleep(pause))

    def wake(self) -> dict[str, EngineFailed]:
        """Wakes all; returns the failures by address. Blocks for the slowest."""
        return self._each(lambda engine: engine.wake())

    def close(self) -> None:
        """Closes all. Idempotent; blocks for running calls."""
        for thread in self._threads.values():
            thread.shutdown()
        for engine in self.engines:
            engine.close()

    def _each(self, ask: Callable[[Engine], object]) -> dict[str, EngineFailed]:
        failed: dict[str, EngineFailed] = {}

        def asked(engine: Engine) -> None:
            try:
                ask(engine)
            except EngineFailed as error:
                failed[engine.address] = error
            except Exception as error:
                # an unexpected error also counts as this engine's failure only
                failed[engine.address] = EngineFailed(
                    f"{engine.address}: {type(error).__name__}: {error}", hint="see its log"
                )
                failed[engine.address].__cause__ = error

        elsewhere = [thread.submit(asked, engine) for engine, thread in self._threads.items()]
        for engine in self.engines:
            if engine not in self._threads:
                asked(engine)
        for each in elsewhere:
            each.result()
        return failed


def raise_for(failed: dict[str, EngineFailed], of: int, what: str) -> None:
    """Raises EngineFailed if any engine failed: its own error if that is the only engine."""
    if not failed:
        return
    errors = list(failed.values())
    if of == 1:
        raise errors[0]
    reasons = "; ".join(error.message for error in errors)
    raise EngineFailed(f"{len(errors)} of {of} engines {what}: {reasons}", hint=errors[0].hint) from errors[0]
