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
import os
import runpy
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from types import UnionType
from typing import TYPE_CHECKING, Any, ClassVar


def _front_door() -> None:
    """Loads shmbridge's HTTP server by its files, which need the standard library alone."""
    here = Path(__file__).resolve().parents[2]  # the installed package, or the checkout
    httpd = next(each for each in (here / "httpd", here / "shmbridge" / "httpd") if each.is_dir())
    shared = Path(__file__).resolve().parents[1] / "env_process"
    for room, folder, name in (
        ("httpd", httpd, "door"),
        ("httpd", httpd, "threads"),
        ("producers.env_process", shared, "server"),
    ):
        spec = importlib.util.spec_from_file_location(f"shmbridge.{room}.{name}", folder / f"{name}.py")
        assert spec is not None
        assert spec.loader is not None
        module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)


if __name__ == "__main__" and not TYPE_CHECKING:
    _front_door()

from shmbridge.httpd.door import Refused  # noqa: E402
from shmbridge.producers.env_process.server import BOUNDS, SECRET, Json, add_server_flags, end_with, serve  # noqa: E402

__all__ = ["BOUNDS", "SECRET", "Episodes", "main"]


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
        reader = runpy.run_path(str(Path(__file__).with_name("rows.py")))
        rows: list[Json] = reader["rows_of"](self._repo_id, self._split)
        return rows

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
        """Gives the environment an answer; its metadata, which nobody carries, may be no JSON."""
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
        sys.path[0] = os.getcwd()  # as with `python -m`; the folder of this script is no place for imports
    for name in ("skyrl_gym", *options.modules):
        importlib.import_module(name)
    serve(Episodes(options.repo_id, options.split), options.port, options.ready_fd, BOUNDS)


if __name__ == "__main__":
    main()
