"""Serves environments over HTTP on 127.0.0.1: `serve`. Every call is a POST of a JSON object and returns one.

An environment is closed with the connection that made it, if not before. Calls carry the secret that the
producer gave in SHMBRIDGE_ENV_SECRET. An environment's error is status 500 with `error`.

Imports the standard library and `shmbridge.httpd` alone.
"""

from __future__ import annotations

import argparse
import ctypes
import hmac
import json
import os
import signal
import traceback
from collections.abc import Mapping
from typing import Any, ClassVar, Protocol

from shmbridge.httpd.door import BadRequest, Bounds, Refused, json_object
from shmbridge.httpd.threads import Handler, ThreadServer

Json = dict[str, Any]

SECRET = "SHMBRIDGE_ENV_SECRET"
HEADER = "X-Shmbridge-Secret"

# A connection is an episode, which waits for the policy between two calls, for as long as that takes.
BOUNDS = Bounds(connections=1 << 14, body_bytes=64 << 20, bodies_bytes=256 << 20, room_s=60.0)

_NAMES = {int: "a whole number", str: "text", list: "a list", type(None): "null"}
_PR_SET_PDEATHSIG = 1


class Episodes(Protocol):
    """What is served: a method for each of its `CALLS`, of the JSON that it was sent. Any thread.

    `close` is one of them, and may be called twice. What a call returns as `episode` is the number of one
    that it made.
    """

    CALLS: ClassVar[Mapping[str, Mapping[str, Any]]]  # what each call must bring, and of which type

    def has(self, number: int) -> bool:
        """Returns whether this episode runs."""
        ...

    def close(self, asked: Json) -> Json:
        """Closes one."""
        ...


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
        name, calls = self.path.lstrip("/"), self.episodes.CALLS
        if name not in calls:
            raise Refused(404, f"there is no call {name!r} -> POST /{', /'.join(calls)}", "path")
        with self.received() as body:
            asked = json_object(body)
        for key, kind in calls[name].items():
            if not isinstance(asked.get(key), kind) or isinstance(asked.get(key), bool):
                raise BadRequest(f"{name} wants {key}, {_NAMES.get(kind, 'an object')} -> see its CALLS")
        number = asked.get("episode") if "episode" in calls[name] and name != "close" else None
        if number is not None and not self.episodes.has(number):
            raise Refused(404, f"there is no episode {number} -> begin one", "episode")
        self.answer(*self._called(name, asked), "application/json")

    def _called(self, name: str, asked: Json) -> tuple[int, bytes]:
        try:
            answer = getattr(self.episodes, name)(asked)
            if "episode" in answer:
                self._mine.add(answer["episode"])
            return 200, _json(answer)
        except Refused:
            raise
        except BaseException as error:  # an environment's SystemExit is its error, too
            traceback.print_exc()
            said = {name: str(getattr(error, name)) for name in ("message", "hint") if hasattr(error, name)}
            kind = type(error).__name__
            return 500, _json({"error": f"{kind}: {error}", "kind": kind, **said})

    def refuse(self, refused: Refused) -> None:
        """Answers a refused call with its reason, and closes the connection with its environments."""
        self.answer(refused.status, _json({"error": refused.detail}), "application/json", refused)


def add_server_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags that `EnvProcess` gives to its command."""
    parser.add_argument("--import", dest="modules", action="append", default=[], metavar="MODULE")
    parser.add_argument("--port", type=int, default=0, help="0: a free one")
    parser.add_argument("--parent", type=int, help="pid of the process to end with")
    parser.add_argument("--ready-fd", type=int, help="where the port is written once it serves")


def serve(episodes: Episodes, port: int, ready_fd: int | None, bounds: Bounds) -> None:
    """Serves without end; says where on `ready_fd`, or prints it. Blocks; any thread."""
    EnvHandler.episodes = episodes
    EnvHandler.secret = os.environ.pop(SECRET, "")
    with ThreadServer(("127.0.0.1", port), EnvHandler, bounds) as server:
        port = server.server_address[1]
        if ready_fd is None:
            print(f"http://127.0.0.1:{port}", flush=True)
        else:
            os.write(ready_fd, f"{port}\n".encode())
            os.close(ready_fd)
        server.serve_forever()


def end_with(parent: int) -> None:
    """Has the kernel end this process when `parent` does, at once if it is gone already."""
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent:
        os._exit(1)


def _json(answer: Json) -> bytes:
    return json.dumps(answer, default=_plain).encode()


def _plain(value: Any) -> Any:
    """What JSON lacks: numpy's numbers and arrays as Python's, anything else as text."""
    return value.tolist() if hasattr(value, "tolist") else str(value)
