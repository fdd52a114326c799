"""Serves episodes of SkyRL-Gym environments over HTTP on 127.0.0.1.

    python env_server.py --repo_id DATA_SET [--split train] [--import MODULE] [--parent PID --ready-fd FD]

A script of its own, for Python environments without shmbridge: it needs the standard library, skyrl_gym, what
the environments need, and pyarrow or datasets for the rows. Every call is a POST of a JSON object and
returns one:

    /rows {}                                               count
    /row {row}                                             row: one task of the data set
    /init {env_class, extras, env_config, prompt}          episode, messages
    /step {episode, action}                                what the environment's step returns
    /metrics {episode}                                     metrics
    /close {episode}                                       nothing

An environment is closed with the connection that made it, if not before. Calls carry the secret that the
producer gave in SHMBRIDGE_ENV_SECRET. An environment's error is status 500 with `error`. With --parent it
ends as soon as that process does, also when that one is killed.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import importlib.util
import itertools
import json
import os
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from types import UnionType
from typing import TYPE_CHECKING, Any, ClassVar

__all__ = ["BOUNDS", "SECRET", "Episodes", "main"]
Row = dict[str, Any]
KINDS = (".parquet", ".jsonl", ".json")


def _front_door() -> None:
    """Loads shmbridge's HTTP server by its files, which need the standard library alone."""
    here = Path(__file__).resolve().parents[2]  # the installed package, or the checkout
    httpd = next(each for each in (here / "httpd", here / "shmbridge" / "httpd") if each.is_dir())
    shared = Path(__file__).resolve().parents[1]
    for room, folder, name in (
        ("httpd", httpd, "door"),
        ("httpd", httpd, "threads"),
        ("producers", shared, "env_server"),
    ):
        spec = importlib.util.spec_from_file_location(f"shmbridge.{room}.{name}", folder / f"{name}.py")
        assert spec is not None
        assert spec.loader is not None
        module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)


if __name__ == "__main__" and not TYPE_CHECKING:
    _front_door()

from shmbridge.httpd.door import Refused  # noqa: E402
from shmbridge.producers.env_server import BOUNDS, SECRET, Json, add_server_flags, end_with, serve  # noqa: E402


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


class Episodes:
    """The episodes that run, by number, and the data set's rows. Any thread; calls of an episode in turn."""

    CALLS: ClassVar[Mapping[str, Mapping[str, type | UnionType]]] = {
        "rows": {},
        "row": {"row": int},
        "init": {"env_class": str, "extras": dict, "prompt": list, "env_config": dict | None},
        "step": {"episode": int, "action": str},
        "metrics": {"episode": int},
        "close": {"episode": int},
    }

    def __init__(self, repo_id: str, split: str) -> None:
        self._running: dict[int, Any] = {}
        self._numbers = itertools.count()
        self._repo_id, self._split = repo_id, split
        self._reading = threading.Lock()

    @functools.cached_property
    def _rows(self) -> list[Json]:
        return rows_of(self._repo_id, self._split)

    def rows(self, asked: Json) -> Json:
        """Returns how many rows there are."""
        with self._reading:
            return {"count": len(self._rows)}

    def row(self, asked: Json) -> Json:
        """Returns one row."""
        with self._reading:
            if not 0 <= asked["row"] < len(self._rows):
                raise Refused(404, f"there is no row {asked['row']} of {len(self._rows)}", "row")
            return {"row": self._rows[asked["row"]]}

    def init(self, asked: Json) -> Json:
        """Makes an environment and begins its episode."""
        import skyrl_gym

        config: Any = {}
        if asked.get("env_config"):
            from omegaconf import OmegaConf

            config = OmegaConf.create(asked["env_config"])
        env = skyrl_gym.make(asked["env_class"], env_config=config, extras=asked["extras"])
        try:
            messages, _ = env.init(asked["prompt"])
        except BaseException:
            env.close()
            raise
        number = next(self._numbers)
        self._running[number] = env
        return {"episode": number, "messages": messages}

    def step(self, asked: Json) -> Json:
        """Gives the environment an answer; its metadata is left out: it may not be JSON."""
        said = dict(self._running[asked["episode"]].step(asked["action"]))
        said.pop("metadata", None)
        return said

    def has(self, number: int) -> bool:
        """Returns whether this episode runs."""
        return number in self._running

    def metrics(self, asked: Json) -> Json:
        """Returns the environment's metrics."""
        get_metrics = getattr(self._running[asked["episode"]], "get_metrics", dict)
        return {"metrics": get_metrics()}

    def close(self, asked: Json) -> Json:
        """Closes an environment; twice is allowed."""
        env = self._running.pop(asked["episode"], None)
        if env is not None:
            env.close()
        return {}


def main() -> None:
    """Serves until it is told to end."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repo_id", required=True, help="data set whose rows are served: a path or a name")
    parser.add_argument("--split", default="train")
    add_server_flags(parser)
    options = parser.parse_args()
    if options.parent is not None:
        end_with(options.parent)
    if not getattr(sys.flags, "safe_path", False):
        sys.path[0] = os.getcwd()  # as with `python -m`; not the folder of this script
    for name in ("skyrl_gym", *options.modules):
        importlib.import_module(name)
    serve(Episodes(options.repo_id, options.split), options.port, options.ready_fd, BOUNDS)


if __name__ == "__main__":
    main()
