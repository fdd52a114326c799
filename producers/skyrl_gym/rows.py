"""Reads the rows of a data set: from files, from a folder of them, or by the data set's name.

Needs nothing of shmbridge: `env_server.py` runs it in other Python environments, too. pyarrow and datasets
are imported for what they read.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

Row = dict[str, Any]

KINDS = (".parquet", ".jsonl", ".json")


def rows_of(source: str, split: str = "train") -> list[Row]:
    """Returns the rows of a data set, all in memory. Blocks for the disk, or for the download.

    Args:
        source: a parquet, json or jsonl file; a folder of these, or one that `datasets` has saved; else a
            data set's name, with its split if it is another: "name:validation".
        split: the part that is wanted. Of a folder: files whose names begin with it, if there are any.

    Raises:
        ValueError: it cannot be read, has no rows, or no such split; the message says which.
        ImportError: pyarrow or datasets is needed, and is not installed.
    """
    path = Path(source).expanduser()
    if path.is_dir():
        rows = _saved(path, split) if _is_saved(path) else _folder(path, split)
    elif path.is_file():
        rows = _file(path)
    elif path.suffix in KINDS or source.startswith(("/", ".", "~")):
        raise ValueError(f"there is no file or folder {source}")
    else:
        rows = _named(source, split)
    if not rows:
        raise ValueError(f"{source} has no rows")
    return rows


def _folder(path: Path, split: str) -> list[Row]:
    files = sorted(each for each in path.rglob("*") if each.suffix in KINDS and each.is_file())
    files = [each for each in files if not any(part.startswith(".") for part in each.relative_to(path).parts)]
    chosen = [each for each in files if each.name.startswith(split)] or files
    if not chosen:
        raise ValueError(f"the folder {path} has no file of {', '.join(KINDS)}")
    return [row for each in chosen for row in _file(each)]


def _file(path: Path) -> list[Row]:
    if path.suffix == ".parquet":
        import pyarrow as pa
        import pyarrow.parquet as pq

        try:
            rows: list[Row] = pq.read_table(path).to_pylist()
        except pa.ArrowException as error:
            raise ValueError(f"{path}: {error}") from None
        return rows
    if path.suffix not in KINDS:
        raise ValueError(f"{path} is none of {', '.join(KINDS)}")
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".json" and text.lstrip().startswith("["):
        decoded: list[Row] = _decoded(text, str(path), list)
        return decoded
    lines = enumerate(text.splitlines(), 1)
    return [_decoded(line, f"{path}, line {number}", dict) for number, line in lines if line.strip()]


def _decoded(text: str, where: str, kind: type) -> Any:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ValueError(f"{where}: no JSON: {error}") from None
    if not isinstance(value, kind):
        raise ValueError(f"{where}: a {type(value).__name__}, where a {kind.__name__} is wanted")
    return value


def _is_saved(path: Path) -> bool:
    return any((path / name).is_file() for name in ("dataset_dict.json", "state.json"))


def _saved(path: Path, split: str) -> list[Row]:
    import datasets

    return _split(datasets.load_from_disk(str(path)), str(path), split)


def _named(source: str, split: str) -> list[Row]:
    import datasets

    name, _, said = source.partition(":")
    try:
        loaded = datasets.load_dataset(name)
    except Exception as error:  # of datasets, of the hub's client, of the network
        raise ValueError(
            f"{name} is no file or folder here, and no data set that could be loaded: {error}"
        ) from error
    return _split(loaded, name, said or split)


def _split(loaded: Any, name: str, split: str) -> list[Row]:
    if hasattr(loaded, "column_names") and isinstance(loaded.column_names, dict):
        if split not in loaded:
            raise ValueError(f"{name} has no split {split!r}: it has {', '.join(loaded)}")
        loaded = loaded[split]
    rows: list[Row] = loaded.to_list()
    return rows
