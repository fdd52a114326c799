"""vLLM, driven by its own calls over HTTP, in this process, or in an event loop. Imports no vLLM.

The worker reads the version from the weights segment within `update_weights`, all or nothing;
`start_weight_update` and `finish_weight_update` move no data. So requests see either set of weights, and a
pusher's death in between leaves a consistent model.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import time
from abc import abstractmethod
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any

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
from shmbridge.consumers.engines.pause_guard import Call, PauseGuard

_TIMEOUT_S = 60.0  # of calls other than updates
_SLEEP_TIMEOUT_S = 300.0
_NOT_THERE = 'start it with VLLM_SERVER_DEV_MODE=1 and --weight-transfer-config \'{"backend": "shmbridge"}\''


def begin_update(start: Callable[[], object], finish: Callable[[], object]) -> None:
    """Begins an update, also if a dead pusher left one active. Blocks; raises as `start`."""
    try:
        start()
    except Exception:
        # if none was active, starting failed for another reason, which is raised now
        with suppress(Exception):
            finish()
        start()


class _Vllm(Engine):
    """A vLLM of any transport: the calls that load a version, and their order."""

    @abstractmethod
    def call(self, name: str, *given: Any, timeout_s: float) -> Any:
        """Makes a call of vLLM's `LLM`, by its name, and returns the result. Blocks; raises EngineFailed."""

    @abstractmethod
    def engines(self) -> int:
        """Returns the number of data-parallel engines; each loads separately."""

    def update(self, update: Update) -> None:
        """Loads the version; sampling resumes in any case. Blocks.

        Kept requests are recomputed from their tokens: they continue exactly as under the new weights alone,
        and no cached prefix is of older weights.

        Raises:
            EngineFailed: the engine keeps its earlier version, unless the message names another state: new
                weights and an old cache, or uncertain weights, whose samples get an unknown version.
        """
        until = time.monotonic() + update.timeout_s

        def call(name: str, *given: Any) -> Any:
            return self.call(name, *given, timeout_s=max(until - time.monotonic(), 0.1))

        try:
            call("pause_generation", update.pause)
            begin_update(lambda: call("start_weight_update"), lambda: call("finish_weight_update", None))
            self._load(update, call)
            if not call("reset_prefix_cache", True):
                raise EngineFailed(
                    f"{self.address} has version {update.version}, and its prefix cache is still that of an "
                    "earlier one",
                    hint="pause with wait or abort: something holds its blocks",
                )
        except BaseException as error:
            self._resume_after(error)
            raise
        self.call("resume_generation", timeout_s=_TIMEOUT_S)

    def _load(self, update: Update, call: Callable[..., Any]) -> None:
        """Loads and stamps; if the weights are uncertain after a failure, stamps samples as unknown."""
        loaded = False
        try:
            call("update_weights", {"update_info": {"bridge": update.bridge, "version": update.version}})
            loaded = True
            call("finish_weight_update", str(update.version))
        except BaseException as error:  # also a signal's exception: the engine continues its running call
            if isinstance(error, EngineFailed) and not error.reached:
                raise
            try:
                why = "it has taken it" if loaded else doubt(error, self.engines())
                if why:
                    self.call("update_weight_version", UNKNOWN, timeout_s=_TIMEOUT_S)
                    call("reset_prefix_cache", True)
                note = why and doubt_hint(why)
            except EngineFailed as also:
                note = f"the version of its samples is unknown: {also.message}"
            if note and isinstance(error, EngineFailed):
                raise EngineFailed(error.message, hint="; ".join(filter(None, (note, error.hint)))) from error
            if note:
                error.add_note(note)
            raise

    def _resume_after(self, error: BaseException) -> None:
        """Resumes sampling after a failure, or adds to the error that it could not."""
        if isinstance(error, EngineFailed) and not error.reached:
            return
        try:
            self.call("resume_generation", timeout_s=_TIMEOUT_S)
        except EngineFailed as also:
            raise EngineFailed(
                f"{error}; and it may still be paused: {also.message}", hint="see its log, or start it again"
            ) from error

    def _failed(self, name: str, error: Exception) -> EngineFailed:
        return EngineFailed(f"{self.address}: {name}: {type(error).__name__}: {error}", hint="see its log")


class VllmHttp(_Vllm):
    """A stock server, at a URL such as http://127.0.0.1:8000, with VLLM_SERVER_DEV_MODE=1.

    A server stays paused when its pusher dies, so a child process ends the update then.
    """

    def __init__(self, url: str) -> None:
        self.address = url.rstrip("/")
        self._guard = PauseGuard(self.address)
        self._can_sleep: bool | None = None

    def call(self, name: str, *given: Any, timeout_s: float) -> Any:
        """Asks the route of a call; tells the child what to repeat if this process dies."""
        match name:
            case "pause_generation":
                with self._guard.pausing(_RESUME):
                    return self._ask(_PAUSE, timeout_s, mode=given[0], clear_cache="false")
            case "start_weight_update":
                return self._ask("/start_weight_update", timeout_s)
            case "update_weights":
                # The server continues a call whose caller is gone. Loading twice is harmless, and loaded
                # weights get their version.
                load: Call = ("/update_weights", given[0])
                self._guard.left(
                    [load, _finish(str(given[0]["update_info"]["version"]))], [_RESET], [_RESUME]
                )
                return self._ask(load[0], timeout_s, load[1])
            case "finish_weight_update":
                finish = _finish(given[0])
                if given[0] is not None:
                    self._guard.left([finish], [_RESET], [_RESUME])
                return self._ask(finish[0], timeout_s, finish[1])
            case "update_weight_version":
                return self._ask("/update_weight_version", timeout_s, {"new_version": given[0]})
            case "reset_prefix_cache":
                return self._ask(_RESET[0], timeout_s).get("success")
            case _:
                self._guard.left([_RESUME])
                self._ask(_RESUME[0], timeout_s)
                return self._guard.left()

    def engines(self) -> int:
        """Returns the number of data-parallel engines; each loads separately. Blocks."""
        workers, of_each = (self._world_size(include_dp) for include_dp in ("true", "false"))
        return workers // of_each

    def _world_size(self, include_dp: str) -> int:
        answer = self._ask("/get_world_size", _TIMEOUT_S, method="GET", include_dp=include_dp)
        return int(answer["world_size"])

    def version(self) -> int | None:
        """Returns the version that the server stamps samples with. Blocks; raises EngineFailed."""
        return version_of(self._ask("/weight_info", _TIMEOUT_S, method="GET").get("weight_version"))

    def sleep(self, pause: Pause) -> bool:
        """Moves the server's weights to host memory, if it has --enable-sleep-mode. Blocks."""
        if self._can_sleep is None:
            info = self._ask("/server_info", _TIMEOUT_S, method="GET", config_format="json")
            config = info.get("vllm_config") or {}
            self._can_sleep = bool((config.get("model_config") or {}).get("enable_sleep_mode"))
        if self._can_sleep:
            self._ask("/sleep", _SLEEP_TIMEOUT_S, level="1", mode=pause)
        return self._can_sleep

    def wake(self) -> None:
        """Wakes the server, also from another pusher's sleep; does nothing if it is awake. Blocks."""
        if self._ask("/is_sleeping", _TIMEOUT_S, method="GET").get("is_sleeping"):
            self._ask("/wake_up", _SLEEP_TIMEOUT_S)

    def close(self) -> None:
        """Ends the child process. Idempotent."""
        self._guard.close()

    def _ask(
        self, path: str, timeout_s: float, body: object = None, *, method: str = "POST", **query: str
    ) -> dict[str, Any]:
        try:
            return ask(self.address, path, body, timeout_s=timeout_s, method=method, **query)
        except EngineHttpError as refused:
            if refused.no_route:  # but after a pause there was a server
                raise EngineFailed(
                    f"{self.address} has no route {path}", hint=_NOT_THERE, reached=path != _PAUSE
                ) from None
            raise


_PAUSE = "/pause"
_RESET: Call = ("/reset_prefix_cache?reset_running_requests=true", None)
_RESUME: Call = ("/resume", None)


def _finish(version: str | None) -> Call:
    return "/finish_weight_update", None if version is None else {"weight_version": version}


class VllmOffline(_Vllm):
    """An `LLM` in this process; call its methods in the thread that calls `generate`.

    It samples only during its calls, so it is never paused.

    Args:
        llm: made with `weight_transfer_config` of the backend "shmbridge".
    """

    in_process = True

    def __init__(self, llm: Any) -> None:
        self.address = f"the LLM of {llm.llm_engine.vllm_config.model_config.model}"
        self._llm = llm

    def call(self, name: str, *given: Any, timeout_s: float) -> Any:
        """Makes the call, without a limit of time."""
        if name in ("pause_generation", "resume_generation"):
            return None
        try:
            return getattr(self._llm, name)(*given)
        except Exception as error:  # any error of a worker
            raise self._failed(name, error) from error

    def engines(self) -> int:
        """Returns 1: an `LLM` is one engine."""
        return 1

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


class VllmAsync(_Vllm):
    """An `AsyncLLM` in this process. Call its methods in any thread but that of its event loop, which they
    would block.

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

    def call(self, name: str, *given: Any, timeout_s: float) -> Any:
        """Runs a call in the engine's loop. Blocks; raises EngineFailed, NoAnswer after the timeout."""
        arguments: list[Any] = [*given]
        options: dict[str, Any] = {}
        if name == "pause_generation":
            arguments, options = [], {"mode": given[0], "clear_cache": False}
        elif name == "update_weights":
            from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

            arguments = [WeightTransferUpdateRequest(**given[0])]
        self.require_callable()
        call: Coroutine[Any, Any, Any] = getattr(self.llm, name)(*arguments, **options)
        future = asyncio.run_coroutine_threadsafe(call, self._loop)
        try:
            return future.result(timeout_s)
        except concurrent.futures.TimeoutError:
            future.cancel()
            raise NoAnswer(
                f"{self.address}: {name} did not end in {timeout_s:.0f} s", hint="see its log"
            ) from None
        except Exception as error:  # any error of a worker
            raise self._failed(name, error) from error

    def engines(self) -> int:
        """Returns the number of data-parallel engines; each loads separately."""
        return int(self.llm.vllm_config.parallel_config.data_parallel_size)

    def version(self) -> int | None:
        """Returns the version that samples are stamped with. Blocks; raises EngineFailed."""
        return version_of(self.call("get_weight_version", timeout_s=_TIMEOUT_S))

    def sleep(self, pause: Pause) -> bool:
        """Moves weights to host memory and drops the cache, given `enable_sleep_mode`. Blocks."""
        can_sleep = bool(self.llm.vllm_config.model_config.enable_sleep_mode)
        if can_sleep:
            self.call("sleep", 1, pause, timeout_s=_SLEEP_TIMEOUT_S)
        return can_sleep

    def wake(self) -> None:
        """Wakes the engine. Blocks."""
        if self.call("is_sleeping", timeout_s=_TIMEOUT_S):
            self.call("wake_up", timeout_s=_SLEEP_TIMEOUT_S)
