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
import ctypes
import functools
import hmac
import importlib
import importlib.util
import itertools
import json
import os
import runpy
import signal
import sys
import threading
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

Json = dict[str, Any]


def _front_door() -> None:
    """Loads shmbridge's HTTP front door by its files, which need the standard library alone."""
    here = Path(__file__).resolve().parents[2]  # the installed package, or the checkout
    folder = next(each for each in (here / "httpd", here / "shmbridge" / "httpd") if each.is_dir())
    for name in ("door", "threads"):
        spec = importlib.util.spec_from_file_location(f"shmbridge.httpd.{name}", folder / f"{name}.py")
        assert spec is not None
        assert spec.loader is not None
        module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)


if __name__ == "__main__" and not TYPE_CHECKING:
    _front_door()

from shmbridge.httpd.door import BadRequest, Bounds, Refused, json_object  # noqa: E402
from shmbridge.httpd.threads import Handler, ThreadServer  # noqa: E402

SECRET = "SHMBRIDGE_ENV_SECRET"
HEADER = "X-Shmbridge-Secret"

# What each call must bring.
CALLS: dict[str, dict[str, Any]] = {
    "rows": {},
    "row": {"row": int},
    "init": {"env_class": str, "extras": dict, "prompt": list, "env_config": dict | None},
    "step": {"episode": int, "action": str},
    "metrics": {"episode": int},
    "close": {"episode": int},
}
_NAMES = {int: "a whole number", str: "text", list: "a list"}

# A connection is an episode, which waits for the policy between two calls, for as long as that takes.
BOUNDS = Bounds(connections=1 << 14, body_bytes=64 << 20, bodies_bytes=256 << 20, room_s=60.0)

_PR_SET_PDEATHSIG = 1


class Episodes:
    """The episodes that run, by number, and the data set's rows. Any thread; calls of an episode in turn."""

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


class EnvHandler(Handler):
    """One connection, which stays open from call to call."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    episodes: Episodes
    secret: str

    def setup(self) -> None:
        """Begins a connection."""
        super().setup()
        self._mine: set[int] = set()

    def finish(self) -> None:
        """Closes the environments that the connection's end has left."""
        for number in self._mine:
            try:
                self.episodes.close({"episode": number})
            except BaseException:
                traceback.print_exc()
        super().finish()

    def do_POST(self) -> None:
        """Answers one call; the secret comes before the body."""
        if not hmac.compare_digest(self.header(HEADER).encode(), self.secret.encode()):
            raise Refused(403, "these are another producer's environments", "secret")
        name = self.path.lstrip("/")
        if name not in CALLS:
            raise Refused(404, f"there is no call {name!r} -> POST /{', /'.join(CALLS)}", "path")
        with self.received() as body:
            asked = json_object(body)
        for key, kind in CALLS[name].items():
            if not isinstance(asked.get(key), kind) or isinstance(asked[key], bool):
                raise BadRequest(
                    f"{name} wants {key}, {_NAMES.get(kind, 'an object')} -> see {Path(__file__).name}"
                )
        if name in ("step", "metrics") and not self.episodes.has(asked["episode"]):
            raise Refused(404, f"there is no episode {asked['episode']} -> /init begins one", "episode")
        self.answer(*self._called(name, asked), "application/json")

    def _called(self, name: str, asked: Json) -> tuple[int, bytes]:
        try:
            answer = getattr(self.episodes, name)(asked)
            if name == "init":
                self._mine.add(answer["episode"])
            return 200, _json(answer)
        except Refused:
            raise
        except BaseException as error:  # an environment's SystemExit is its error, too
            traceback.print_exc()
            return 500, _json({"error": f"{type(error).__name__}: {error}"})

    def refuse(self, refused: Refused) -> None:
        """Answers a refused call with its reason, and closes the connection with its environments."""
        self.answer(refused.status, _json({"error": refused.detail}), "application/json", refused)


def _json(answer: Json) -> bytes:
    return json.dumps(answer, default=_plain).encode()


def _plain(value: Any) -> Any:
    """What JSON lacks: numpy's numbers and arrays as Python's, anything else as text."""
    return value.tolist() if hasattr(value, "tolist") else str(value)


def end_with(parent: int) -> None:
    """Has the kernel end this process when `parent` does, at once if it is gone already."""
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent:
        os._exit(1)


def main() -> None:
    """Serves until it is told to end."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repo_id", required=True, help="data set whose rows are served: a path or a name")
    parser.add_argument("--split", default="train")
    parser.add_argument("--import", dest="modules", action="append", default=[], metavar="MODULE")
    parser.add_argument("--port", type=int, default=0, help="0: a free one")
    parser.add_argument("--parent", type=int, help="pid of the process to end with")
    parser.add_argument("--ready-fd", type=int, help="where the port is written once it serves")
    options = parser.parse_args()
    if options.parent is not None:
        end_with(options.parent)
    if not getattr(sys.flags, "safe_path", False):
        sys.path[0] = os.getcwd()  # as with `python -m`; the folder of this script is no place for imports
    for name in ("skyrl_gym", *options.modules):
        importlib.import_module(name)
    EnvHandler.episodes = Episodes(options.repo_id, options.split)
    EnvHandler.secret = os.environ.pop(SECRET, "")
    with ThreadServer(("127.0.0.1", options.port), EnvHandler, BOUNDS) as server:
        port = server.server_address[1]
        if options.ready_fd is None:
            print(f"http://127.0.0.1:{port}", flush=True)
        else:
            os.write(options.ready_fd, f"{port}\n".encode())
            os.close(options.ready_fd)
        server.serve_forever()


if __name__ == "__main__":
    main()
