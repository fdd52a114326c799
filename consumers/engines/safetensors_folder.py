"""Writes a version as a safetensors file in shared memory, for engines that load from a path. Copies once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from shmbridge.segments import EngineFolder, remove_dead_folders
from shmbridge.weights import WeightsReader

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
