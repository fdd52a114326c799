"""An SGLang server, driven over its routes: pause_generation, update_weights_from_disk, continue_generation.

The routes are those of 0.5.6 to 0.5.23, from their sources; the tests use a stand-in server that checks
requests against them, not SGLang itself. SGLang loads weights from a path, a group of GPUs, or pickled
handles; it gets a path in shared memory.

SGLang does not report whether it sleeps, and its scheduler ends if it is woken while awake, or given weights
while asleep. So the server's weight version is marked while it sleeps. The mark stays with the server, for
any later pusher, and disappears when the server restarts.
"""

from __future__ import annotations

import json
import re
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from shmbridge.consumers.engines.engine import (
    Engine,
    EngineFailed,
    EngineHttpError,
    Pause,
    Update,
    ask,
    version_of,
)
from shmbridge.consumers.engines.pause_guard import Call, PauseGuard
from shmbridge.errors import WeightsMismatch
from shmbridge.segments import EngineFolder, remove_dead_folders
from shmbridge.weights import WeightsReader

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


_WORDS = {
    "bool": "BOOL",
    "uint8": "U8",
    "int8": "I8",
    "uint16": "U16",
    "int16": "I16",
    "uint32": "U32",
    "int32": "I32",
    "uint64": "U64",
    "int64": "I64",
    "float16": "F16",
    "bfloat16": "BF16",
    "float32": "F32",
    "float64": "F64",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
}
_ALIGNMENT = 8  # of the data, after the header


class SafetensorsFolder:
    """A folder with the newest version only. One thread.

    Args:
        bridge: of the weights. It is part of the folder's name, so that any start of the bridge removes a
            killed process's files.
    """

    def __init__(self, bridge: str) -> None:
        self._bridge = bridge
        self._reader: WeightsReader | None = None
        self._folder: EngineFolder | None = None
        remove_dead_folders(bridge)

    def write(self, version: int) -> Path:
        """Returns a folder with `model.safetensors` of the segment's newest version, which must be `version`.

        Blocks for the copy.

        Raises:
            OSError: no memory left. ValueError: the segment's newest version is another one.
            WeightsMismatch: it has values that are not finite.
        """
        self._remove()
        self._folder = EngineFolder(self._bridge)
        folder = self._folder.path
        self._reader = self._reader or WeightsReader(self._bridge)
        with self._reader.lease() as weights:
            if weights.version != version:
                raise ValueError(
                    f"version {version} is wanted, bridge {self._bridge!r} has {weights.version}"
                )
            weights.require_finite()
            partial = folder / "partial"
            with partial.open("wb") as file:
                file.write(_head(weights.tensors, weights.dtypes))
                for tensor in weights.tensors.values():
                    file.write(np.ascontiguousarray(tensor).reshape(-1).view(np.uint8).data)
        partial.rename(folder / "model.safetensors")
        return folder

    def close(self) -> None:
        """Removes the folder. Idempotent."""
        if self._reader is not None:
            self._reader.close()
            self._reader = None
        self._remove()

    def _remove(self) -> None:
        folder, self._folder = self._folder, None
        if folder is not None:
            folder.remove()


def _head(tensors: Any, dtypes: Any) -> bytes:
    table, at = {}, 0
    for name, tensor in tensors.items():
        table[name] = {
            "dtype": _WORDS[dtypes[name]],
            "shape": list(tensor.shape),
            "data_offsets": [at, at + tensor.nbytes],
        }
        at += tensor.nbytes
    text = json.dumps({"__metadata__": {"format": "pt"}, **table}).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return len(text).to_bytes(8, "little") + text
