"""An SGLang server, driven over its routes: pause_generation, update_weights_from_disk, continue_generation.

The routes are those of 0.5.6 to 0.5.23, from their sources; the tests use a stand-in server that checks
requests against them, not SGLang itself. SGLang loads weights from a path, a group of GPUs, or pickled
handles; it gets a path in shared memory.

SGLang does not report whether it sleeps, and its scheduler ends if it is woken while awake, or given weights
while asleep. So the server's weight version is marked while it sleeps. The mark stays with the server, for
any later pusher, and disappears when the server restarts.
"""

from __future__ import annotations

import re
import time
from contextlib import suppress
from typing import Any

from shmbridge.consumers.engines.engine import Engine, EngineFailed, Pause, Update, version_of
from shmbridge.consumers.engines.http_calls import EngineHttpError, ask
from shmbridge.consumers.engines.resume_watchdog_client import Call, PauseGuard
from shmbridge.consumers.engines.safetensors_folder import SafetensorsFolder
from shmbridge.errors import WeightsMismatch

_TIMEOUT_S = 60.0  # of calls other than updates
# SGLang's pause modes. It has none for "wait": an update itself waits for the requests in flight, and holds
# new ones.
_MODES: dict[Pause, str | None] = {"keep": "retract", "wait": None, "abort": "abort"}

# Before that release, requests put back in the queue keep the cache from being flushed, which ends the
# scheduler with an AssertionError.
_KEEPS_SINCE = (0, 5, 21)
_ASLEEP = "asleep:"  # prefix of the version

_LOAD = "/update_weights_from_disk"
_CONTINUE: Call = ("/continue_generation", {})


class SglangHttp(Engine):
    """One server, at a URL. Needs room in /dev/shm for a copy of the weights."""

    def __init__(self, url: str) -> None:
        self.address = url.rstrip("/")
        self._guard = PauseGuard(self.address)
        self._folders: dict[str, SafetensorsFolder] = {}  # by bridge
        self._keeps = False  # known to support keeping requests

    def update(self, update: Update) -> None:
        """Loads the version into the server, through a copy in memory. Blocks; raises EngineFailed."""
        until = time.monotonic() + update.timeout_s
        self._require_ready(update)
        path = self._written(update)
        mode = _MODES[update.pause]
        if mode is None:
            self._load(path, update.version, until)
            return
        try:
            with self._guard.pausing(_CONTINUE):
                self._ask("/pause_generation", {"mode": mode}, until)
            self._guard.left([(_LOAD, _load_body(path, update.version))], [_CONTINUE])
            self._load(path, update.version, until)
        except BaseException as error:  # also a signal's exception, which this process may survive
            if not isinstance(error, EngineFailed) or error.reached:
                self._go_on(error)
            raise
        self._go_on()

    def version(self) -> int | None:
        """Returns the version that the server reports. Blocks; raises EngineFailed."""
        return version_of(self._word().removeprefix(_ASLEEP))

    def sleep(self, pause: Pause) -> bool:
        """Makes the server free its memory, if it has --enable-memory-saver. Blocks.

        No request may be in flight.
        """
        if not self._server_info().get("enable_memory_saver"):
            return False
        until = time.monotonic() + _TIMEOUT_S
        if not (word := self._word()).startswith(_ASLEEP):
            self._name(_ASLEEP + word, until)  # first, because a server continues a call whose caller is gone
            try:
                self._ask("/release_memory_occupation", {}, until)
            except EngineHttpError:
                with suppress(EngineFailed):
                    self._name(word, until)
                raise
        return True

    def wake(self) -> None:
        """Wakes the server; its weights are undefined until the next update. Blocks."""
        if (word := self._word()).startswith(_ASLEEP):
            until = time.monotonic() + _TIMEOUT_S
            self._ask("/resume_memory_occupation", {}, until)
            self._name(word.removeprefix(_ASLEEP), until)

    def close(self) -> None:
        """Ends the child process and removes the copy of the weights. Idempotent."""
        self._guard.close()
        while self._folders:
            self._folders.popitem()[1].close()

    def _require_ready(self, update: Update) -> None:
        """Raises EngineFailed if an update would crash the server."""
        if self._word().startswith(_ASLEEP):
            raise EngineFailed(
                f"{self.address} gave its memory back, and takes no weights",
                hint="push with `updated`, which wakes it",
            )
        if update.pause == "keep" and not self._keeps:
            package = str(self._server_info().get("version"))
            known = re.match(r"(\d+)\.(\d+)\.(\d+)", package)
            numbers = tuple(map(int, known.groups())) if known else (0, 0, 0)
            if (0, 0, 0) < numbers < _KEEPS_SINCE:  # a build without a number is not checked
                raise EngineFailed(
                    f"{self.address} is SGLang {package}, which can end when requests that it is to keep "
                    "are in flight",
                    hint=f"SGLang {'.'.join(map(str, _KEEPS_SINCE))} or newer, or pause='wait' or 'abort' "
                    "(--pause)",
                )
            self._keeps = True

    def _word(self) -> str:
        """Returns the server's weight version, as text."""
        said = ask(self.address, "/model_info", timeout_s=_TIMEOUT_S, method="GET")
        return str(said.get("weight_version"))

    def _server_info(self) -> dict[str, Any]:
        return ask(self.address, "/server_info", timeout_s=_TIMEOUT_S, method="GET")

    def _name(self, word: str, until: float) -> None:
        self._ask("/update_weight_version", {"new_version": word, "abort_all_requests": False}, until)

    def _written(self, update: Update) -> str:
        if update.bridge not in self._folders:
            self._folders[update.bridge] = SafetensorsFolder(update.bridge)
        try:
            return str(self._folders[update.bridge].write(update.version))
        except WeightsMismatch as error:
            raise EngineFailed(f"{self.address}: {error.message}", hint=error.hint) from error
        except (OSError, ValueError) as error:
            raise EngineFailed(
                f"{self.address}: no copy of version {update.version} for it: {error}", hint="raise /dev/shm"
            ) from error

    def _load(self, path: str, version: int, until: float) -> None:
        said = self._ask(_LOAD, _load_body(path, version), until)
        if not said.get("success"):
            raise EngineFailed(
                f"{self.address} did not take version {version}: {said.get('message', said)}",
                hint="see its log",
            )

    def _go_on(self, after: BaseException | None = None) -> None:
        try:
            self._ask(*_CONTINUE, time.monotonic() + _TIMEOUT_S)  # even after the update's deadline
        except EngineFailed as also:
            if after is None:
                raise
            if not isinstance(after, EngineFailed):
                after.add_note(f"{also.message}; it may still be paused")
                return
            raise EngineFailed(
                f"{after.message}; and it may still be paused: {also.message}", hint="see its log"
            ) from after
        self._guard.left()

    def _ask(self, path: str, body: object, until: float) -> dict[str, Any]:
        return ask(self.address, path, body, timeout_s=max(until - time.monotonic(), 0.1))


def _load_body(path: str, version: int) -> dict[str, Any]:
    return {
        "model_path": path,
        "load_format": "safetensors",
        "weight_version": str(version),
        "flush_cache": True,
    }
