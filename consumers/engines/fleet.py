"""Several engines as one, and servers known only by their URL: all load a version in parallel."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from shmbridge.consumers.engines.engine import Engine, EngineFailed, Pause, Update, answer_of, version_of
from shmbridge.consumers.engines.sglang import SglangHttp
from shmbridge.consumers.engines.vllm import VllmAsync, VllmHttp, VllmOffline

_REQUEST_TIMEOUT_S = 10.0  # of one request
_FIRST_S, _LONGEST_S = 0.002, 0.1  # between two requests


class Following(Engine):
    """One server, at a URL."""

    def __init__(self, url: str) -> None:
        self.address = url.rstrip("/")

    def update(self, update: Update) -> None:
        """Waits until the server has loaded or refused this version. Blocks; raises EngineFailed."""
        until, tick = time.monotonic() + update.timeout_s, _FIRST_S
        while True:
            said = _said_version(self.address)
            version = version_of(said.get("version"))
            if version == update.version:
                return
            refused = said.get("refused_version") == update.version
            if refused or time.monotonic() >= until:
                error = said.get("last_error")
                raise EngineFailed(
                    f"{self.address} is at version {version}, "
                    + (
                        f"and refused {update.version}"
                        if refused
                        else f"not {update.version}, after {update.timeout_s:.0f} s"
                    )
                    + (f": {error}" if error else ""),
                    hint=f"does it follow bridge {update.bridge!r}? see its log",
                )
            time.sleep(tick)
            tick = min(2 * tick, _LONGEST_S)

    def version(self) -> int | None:
        """Returns the version that the server samples with. Blocks; raises EngineFailed."""
        return version_of(_said_version(self.address).get("version"))


def _said_version(url: str) -> dict[str, Any]:
    """Returns the server's "version", and "refused_version" and "last_error" if present.

    Blocks; raises EngineFailed, also if the server reports no version.
    """
    # the policy server reports it in /health
    for path, word in (("/policy_version", "version"), ("/health", "weight_version")):
        if word in (said := answer_of(url, path, timeout_s=_REQUEST_TIMEOUT_S)):
            return said | {"version": said[word]}
    raise EngineFailed(
        f"{url} does not say which policy version it has", hint="is that a server that follows a bridge?"
    )


# (route, key in its response, kind), in the order of requests. Self-updating servers first: they must not
# be pushed to, even if they could be. /health last: SGLang generates a token for it, and hangs while paused.
_KINDS: tuple[tuple[str, str, Callable[[str], Engine]], ...] = (
    ("/policy_version", "version", Following),
    ("/get_world_size", "world_size", VllmHttp),
    ("/model_info", "model_path", SglangHttp),
    ("/health", "weight_version", Following),
)


class AtUrl(Engine):
    """A server of any supported kind at a URL; its kind is detected once."""

    def __init__(self, url: str) -> None:
        self.address = url.rstrip("/")
        self._found: Engine | None = None

    def update(self, update: Update) -> None:
        """Loads the version into the server, which samples on return. Blocks; raises EngineFailed."""
        self._engine().update(update)

    def version(self) -> int | None:
        """Returns the version that the server samples with. Blocks; raises EngineFailed."""
        return self._engine().version()

    def sleep(self, pause: Pause) -> bool:
        """Makes the server free its memory, if it can. Blocks; raises EngineFailed."""
        return self._engine().sleep(pause)

    def wake(self) -> None:
        """Undoes a sleep. Blocks; raises EngineFailed."""
        self._engine().wake()

    def close(self) -> None:
        """Closes the connection's resources. Idempotent."""
        if self._found is not None:
            self._found.close()

    def _engine(self) -> Engine:
        self._found = self._found or engine_at(self.address)
        return self._found


def engine_at(url: str) -> Engine:
    """Detects the engine at an address. Blocks for a few requests; raises EngineFailed."""
    for path, word, kind in _KINDS:
        if word in answer_of(url, path, timeout_s=_REQUEST_TIMEOUT_S):
            return kind(url)
    raise EngineFailed(
        f"{url} does not take weights: it has neither "
        f"{', '.join(path for path, *_ in _KINDS[:2])} nor {_KINDS[2][0]}",
        hint="vLLM needs VLLM_SERVER_DEV_MODE=1, or --middleware "
        "shmbridge.consumers.vllm.middleware.ShmBridge",
    )


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
        f"{given!r} is not an engine", hint='pass "http://host:port", a vllm.LLM, an AsyncLLM, or an Engine'
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
