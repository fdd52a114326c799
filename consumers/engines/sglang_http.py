"""An SGLang server, driven over its routes: pause_generation, update_weights_from_disk, continue_generation.

SGLang takes weights in this form only from a path, a group of GPUs, or pickled handles; it gets a path in
memory. Knows those routes, as the sources of 0.5.6 to 0.5.23 have them; tests have a stand-in for the server
that checks requests against these, not SGLang itself.

SGLang does not say whether it sleeps, and its scheduler ends when it is woken awake or given weights asleep.
So its word for the version of its weights says so meanwhile: that stays with the server, whoever pushes next,
and goes when the server is started again.
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

_TIMEOUT_S = 60.0  # of what is not an update
# SGLang's word for a pause. It has none for "wait": an update by itself waits for the requests in flight, and
# holds new ones.
_MODES: dict[Pause, str | None] = {"keep": "retract", "wait": None, "abort": "abort"}

# Before that, a cache that is not flushed ends its scheduler, and it is not while requests wait that were put
# back: an AssertionError.
_KEEPS_SINCE = (0, 5, 21)
_ASLEEP = "asleep:"  # before the word for the version

_LOAD = "/update_weights_from_disk"
_CONTINUE: Call = ("/continue_generation", {})


class SglangHttp(Engine):
    """One server. Needs room in /dev/shm for the weights once more.

    Args:
        url: where it listens, such as http://127.0.0.1:30000.
    """

    def __init__(self, url: str) -> None:
        self.address = url.rstrip("/")
        self._guard = PauseGuard(self.address)
        self._folders: dict[str, SafetensorsFolder] = {}  # by bridge
        self._keeps = False  # known to survive that requests are kept

    def update(self, update: Update) -> None:
        """Has the server at the version, and sampling.

        Blocks for a copy in memory, too; raises EngineFailed.
        """
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
        except BaseException as error:  # a signal's, too, after which this process may live on
            if not isinstance(error, EngineFailed) or error.reached:
                self._go_on(error)
            raise
        self._go_on()

    def version(self) -> int | None:
        """Returns the version that the server says it has. Blocks; raises EngineFailed."""
        return version_of(self._word().removeprefix(_ASLEEP))

    def sleep(self, pause: Pause) -> bool:
        """Has the server give its memory back, where it was started with --enable-memory-saver; nothing may
        be in flight.

        Blocks.
        """
        if not self._server_info().get("enable_memory_saver"):
            return False
        until = time.monotonic() + _TIMEOUT_S
        if not (word := self._word()).startswith(_ASLEEP):
            self._name(_ASLEEP + word, until)  # first: a server goes on with a call whose caller is gone
            try:
                self._ask("/release_memory_occupation", {}, until)
            except EngineHttpError:
                with suppress(EngineFailed):
                    self._name(word, until)
                raise
        return True

    def wake(self) -> None:
        """Undoes a sleep, whoever sent it there; its weights are undefined until the next update. Blocks."""
        if (word := self._word()).startswith(_ASLEEP):
            until = time.monotonic() + _TIMEOUT_S
            self._ask("/resume_memory_occupation", {}, until)
            self._name(word.removeprefix(_ASLEEP), until)

    def close(self) -> None:
        """Ends the child process, remove the weights' copy. Idempotent."""
        self._guard.close()
        while self._folders:
            self._folders.popitem()[1].close()

    def _require_ready(self, update: Update) -> None:
        """Raises EngineFailed where an update would end the server."""
        if self._word().startswith(_ASLEEP):
            raise EngineFailed(
                f"{self.address} gave its memory back, and takes no weights",
                hint="push with `updated`, which wakes it",
            )
        if update.pause == "keep" and not self._keeps:
            package = str(self._server_info().get("version"))
            known = re.match(r"(\d+)\.(\d+)\.(\d+)", package)
            numbers = tuple(map(int, known.groups())) if known else (0, 0, 0)
            if (0, 0, 0) < numbers < _KEEPS_SINCE:  # of a build without a number nothing is known
                raise EngineFailed(
                    f"{self.address} is SGLang {package}, which can end when requests that it is to keep "
                    "are in flight",
                    hint=f"SGLang {'.'.join(map(str, _KEEPS_SINCE))} or newer, or pause='wait' or 'abort' "
                    "(--pause)",
                )
            self._keeps = True

    def _word(self) -> str:
        """The server's word for the version of its weights."""
        said = ask(self.address, "/model_info", timeout_s=_TIMEOUT_S, method="GET")
        return str(said.get("weight_version")) if isinstance(said, dict) else ""

    def _server_info(self) -> dict[str, Any]:
        said = ask(self.address, "/server_info", timeout_s=_TIMEOUT_S, method="GET")
        return said if isinstance(said, dict) else {}

    def _name(self, word: str, until: float) -> None:
        self._ask("/update_weight_version", {"new_version": word, "abort_all_requests": False}, until)

    def _written(self, update: Update) -> str:
        if update.bridge not in self._folders:
            self._folders[update.bridge] = SafetensorsFolder(update.bridge)
        try:
            return str(self._folders[update.bridge].write(update.version))
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
            self._ask(*_CONTINUE, time.monotonic() + _TIMEOUT_S)  # also when the time for the update is over
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
        said = ask(self.address, path, body, timeout_s=max(until - time.monotonic(), 0.1))
        return said if isinstance(said, dict) else {}


def _load_body(path: str, version: int) -> dict[str, Any]:
    return {
        "model_path": path,
        "load_format": "safetensors",
        "weight_version": str(version),
        "flush_cache": True,
    }
