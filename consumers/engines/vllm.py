"""The calls that load a version into vLLM, and their order, for each transport: HTTP, `LLM`, `AsyncLLM`.

The worker reads the version from the weights segment within `update_weights`, all or nothing; `start` and
`finish` move no data. So requests see either set of weights, and a pusher's death in between leaves a
consistent model.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any, Protocol, TypeVar

from shmbridge.consumers.engines.engine import (
    UNKNOWN,
    Engine,
    EngineFailed,
    EngineHttpError,
    NoAnswer,
    Pause,
    Update,
    ask,
    doubt,
    doubt_hint,
    version_of,
)
from shmbridge.consumers.engines.resume_watchdog_client import Call, PauseGuard


class VllmCalls(Protocol):
    """vLLM's calls. Each blocks and raises EngineFailed."""

    def pause(self, mode: Pause) -> None:
        """Stops sampling."""

    def start(self) -> None:
        """Begins an update; refused while one is active."""

    def load(self, update_info: dict[str, Any]) -> None:
        """Makes every worker load the weights."""

    def finish(self, version: str | None) -> None:
        """Ends the update; later samples are of this version."""

    def engines(self) -> int:
        """Returns the number of data-parallel engines; each loads separately."""

    def stamp(self, version: str) -> None:
        """Stamps later samples with this version, whatever the weights are."""

    def reset_cache(self) -> bool:
        """Drops all cached keys and values, also of requests in flight; returns whether it did."""

    def resume(self) -> None:
        """Resumes sampling."""


def bring_to(calls: VllmCalls, address: str, update: Update) -> None:
    """Loads a version into vLLM; sampling resumes in any case. Blocks.

    Kept requests are recomputed from their tokens: they continue exactly as under the new weights alone, and
    no cached prefix is of older weights.

    Raises:
        EngineFailed: it keeps its earlier version; or, if the message says so, it has new weights and an old
            cache, or its weights are uncertain and samples are stamped with an unknown version.
    """
    try:
        calls.pause(update.pause)
        begin_update(calls.start, lambda: calls.finish(None))
        _load(calls, update)
        if not calls.reset_cache():
            raise EngineFailed(
                f"{address} has version {update.version}, and its prefix cache is still that of an earlier "
                "one",
                hint="pause with wait or abort: something holds its blocks",
            )
    except BaseException as error:
        _resume_after(calls, error)
        raise
    calls.resume()


def begin_update(start: Callable[[], object], finish: Callable[[], object]) -> None:
    """Begins an update, also if a dead pusher left one active. Blocks; raises as `start`."""
    try:
        start()
    except Exception:
        # if none was active, starting failed for another reason, which is raised now
        with suppress(Exception):
            finish()
        start()


def _load(calls: VllmCalls, update: Update) -> None:
    """Loads and stamps; if the weights are uncertain after a failure, stamps samples as unknown."""
    taken = False
    try:
        calls.load({"bridge": update.bridge, "version": update.version})
        taken = True
        calls.finish(str(update.version))
    except BaseException as error:  # also a signal's exception: the engine continues its running call
        if isinstance(error, EngineFailed) and not error.reached:
            raise
        try:
            why = "it has taken it" if taken else doubt(error, calls.engines())
            if why:
                calls.stamp(UNKNOWN)
                calls.reset_cache()
            said = why and doubt_hint(why)
        except EngineFailed as also:
            said = f"the version of its samples is unknown: {also.message}"
        if said and isinstance(error, EngineFailed):
            raise EngineFailed(error.message, hint="; ".join(filter(None, (said, error.hint)))) from error
        if said:
            error.add_note(said)
        raise


def _resume_after(calls: VllmCalls, error: BaseException) -> None:
    """Resumes sampling after a failure, or adds to the error that it could not."""
    if isinstance(error, EngineFailed) and not error.reached:
        return
    try:
        calls.resume()
    except EngineFailed as also:
        raise EngineFailed(
            f"{error}; and it may still be paused: {also.message}", hint="see its log, or start it again"
        ) from error


_TIMEOUT_S = 60.0  # of calls other than updates
_SLEEP_TIMEOUT_S = 300.0
_NOT_THERE = 'start it with VLLM_SERVER_DEV_MODE=1 and --weight-transfer-config \'{"backend": "shmbridge"}\''


class VllmHttp(Engine):
    """One server, at a URL such as http://127.0.0.1:8000."""

    def __init__(self, url: str) -> None:
        self.address = url.rstrip("/")
        self._guard = PauseGuard(self.address)
        self._can_sleep: bool | None = None

    def update(self, update: Update) -> None:
        """Loads the version into the server, which samples on return. Blocks; raises EngineFailed."""
        bring_to(
            _Routes(self.address, self._guard, time.monotonic() + update.timeout_s), self.address, update
        )

    def version(self) -> int | None:
        """Returns the version that the server stamps samples with. Blocks; raises EngineFailed."""
        return version_of(_ask(self.address, "/weight_info", _TIMEOUT_S, method="GET").get("weight_version"))

    def sleep(self, pause: Pause) -> bool:
        """Moves the server's weights to host memory, if it has --enable-sleep-mode. Blocks."""
        if self._can_sleep is None:
            info = _ask(self.address, "/server_info", _TIMEOUT_S, method="GET", config_format="json")
            config = info.get("vllm_config") or {}
            self._can_sleep = bool((config.get("model_config") or {}).get("enable_sleep_mode"))
        if self._can_sleep:
            _ask(self.address, "/sleep", _SLEEP_TIMEOUT_S, level="1", mode=pause)
        return self._can_sleep

    def wake(self) -> None:
        """Wakes the server, also from another pusher's sleep; does nothing if it is awake. Blocks."""
        if _ask(self.address, "/is_sleeping", _TIMEOUT_S, method="GET").get("is_sleeping"):
            _ask(self.address, "/wake_up", _SLEEP_TIMEOUT_S)

    def close(self) -> None:
        """Ends the child process. Idempotent."""
        self._guard.close()


_PAUSE = "/pause"
_RESET: Call = ("/reset_prefix_cache?reset_running_requests=true", None)
_RESUME: Call = ("/resume", None)


class _Routes:
    """The calls of one update, within its deadline, and those to replay if this process dies."""

    def __init__(self, url: str, guard: PauseGuard, until: float) -> None:
        self._url, self._guard, self._until = url, guard, until

    def pause(self, mode: Pause) -> None:
        with self._guard.pausing(_RESUME):
            self._ask(_PAUSE, mode=mode, clear_cache="false")

    def start(self) -> None:
        self._ask("/start_weight_update")

    def load(self, update_info: dict[str, Any]) -> None:
        body = {"update_info": update_info}
        # The server continues a call whose caller is gone. Loading twice is harmless, and loaded weights get
        # their version.
        finish: Call = ("/finish_weight_update", {"weight_version": str(update_info["version"])})
        self._guard.left([("/update_weights", body), finish], [_RESET], [_RESUME])
        self._ask("/update_weights", body)

    def finish(self, version: str | None) -> None:
        if version is None:
            self._ask("/finish_weight_update")
            return
        body = {"weight_version": version}
        self._guard.left([("/finish_weight_update", body)], [_RESET], [_RESUME])
        self._ask("/finish_weight_update", body)

    def engines(self) -> int:
        workers, of_each = (self._world_size(include_dp) for include_dp in ("true", "false"))
        return workers // of_each

    def _world_size(self, include_dp: str) -> int:
        return int(
            _ask(self._url, "/get_world_size", _TIMEOUT_S, method="GET", include_dp=include_dp)["world_size"]
        )

    def stamp(self, version: str) -> None:
        # even after the update's deadline
        _ask(self._url, "/update_weight_version", _TIMEOUT_S, {"new_version": version})

    def reset_cache(self) -> bool:
        return bool(self._ask(_RESET[0]).get("success"))

    def resume(self) -> None:
        self._guard.left([_RESUME])
        _ask(self._url, _RESUME[0], _TIMEOUT_S)  # even after the update's deadline
        self._guard.left()

    def _ask(self, path: str, body: object = None, **query: str) -> dict[str, Any]:
        return _ask(self._url, path, max(self._until - time.monotonic(), 0.1), body, **query)


def _ask(
    url: str, path: str, timeout_s: float, body: object = None, *, method: str = "POST", **query: str
) -> dict[str, Any]:
    try:
        return ask(url, path, body, timeout_s=timeout_s, method=method, **query)
    except EngineHttpError as refused:
        if refused.no_route:  # but after a pause there was a server
            raise EngineFailed(
                f"{url} has no route {path}", hint=_NOT_THERE, reached=path != _PAUSE
            ) from None
        raise


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
        bring_to(_AsyncCalls(self, time.monotonic() + update.timeout_s), self.address, update)

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


class _AsyncCalls:
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
