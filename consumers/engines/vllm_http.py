"""A stock vLLM server, driven over its reinforcement-learning routes (VLLM_SERVER_DEV_MODE=1).

The weights themselves go through the bridge's segment; requests carry the bridge's name and a version. A
server stays paused when its pusher dies, so a child process ends the update then.
"""

from __future__ import annotations

import time
from typing import Any

from shmbridge.consumers.engines.engine import Engine, EngineFailed, Pause, Update, version_of
from shmbridge.consumers.engines.http_calls import EngineHttpError, ask
from shmbridge.consumers.engines.resume_watchdog_client import Call, PauseGuard
from shmbridge.consumers.engines.vllm_steps import bring_to

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
