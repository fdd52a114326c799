"""Gateways and the Atropos server as processes on ports of the kernel's choice, and what their clients
say.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import requests

ROOT = Path(__file__).parents[3]
RUN = {
    "wandb_group": "group",
    "wandb_project": "project",
    "batch_size": 8,
    "max_token_len": 64,
    "checkpoint_dir": "/ckpt",
    "save_checkpoint_interval": 5,
    "starting_step": 0,
    "num_steps": 100,
}
UPSTREAM = """
import socket, sys, uvicorn
from atroposlib.api.server import app

@app.get("/as-if-started-again")
async def as_if_started_anew():
    app.state._state.clear()

listener = socket.socket(fileno=int(sys.argv[1]))
uvicorn.Server(uvicorn.Config(app, log_level="critical")).run(sockets=[listener])
"""


def group(mark: int, rows: int = 4, **more: Any) -> dict[str, Any]:
    """A group whose first token says which it is."""
    return {
        "tokens": [[mark, row, 3] for row in range(rows)],
        "masks": [[-100, row, 3] for row in range(rows)],
        "scores": [float(row) for row in range(rows)],
        **more,
    }


def marks(batch: Any) -> list[int]:
    """Returns the marks of a batch's groups."""
    return [each["tokens"][0][0] for each in batch]


class Api:
    """A server of the API. Every request has a connection of its own, as BaseEnv's have."""

    def __init__(self, url: str) -> None:
        self.url = url

    @property
    def address(self) -> tuple[str, int]:
        host, _, port = self.url.removeprefix("http://").partition(":")
        return host, int(port)

    def get(self, path: str, body: Any = None, **options: Any) -> requests.Response:
        return requests.get(self.url + path, json=body, **{"timeout": 30, **options})

    def post(self, path: str, body: Any = None, **options: Any) -> requests.Response:
        return requests.post(self.url + path, json=body, **{"timeout": 30, **options})

    def register(self, **changes: Any) -> int:
        answer = self.post("/register", RUN | changes)
        assert answer.status_code == 200, answer.text
        return answer.json()["uuid"]

    def start(self, **changes: Any) -> None:
        """Registers a trainer, and polls once, which is what lets environments register at the original."""
        self.register(**changes)
        self.get("/batch")

    def register_env(
        self, name: str = "env", group_size: int = 4, weight: float = 1.0, share: float | None = None
    ) -> Any:
        wish = {
            "max_token_length": 64,
            "desired_name": name,
            "weight": weight,
            "group_size": group_size,
            "min_batch_allocation": share,
        }
        return self.post("/register-env", wish).json()

    def put(self, mark: int, rows: int = 4, **more: Any) -> Any:
        answer = self.post("/scored_data", group(mark, rows, **more))
        assert answer.status_code == 200, answer.text
        return answer.json()

    def batch(self) -> Any:
        answer = self.get("/batch")
        assert answer.status_code == 200, answer.text
        return answer.json()["batch"]

    def batch_marks(self) -> list[int] | None:
        batch = self.batch()
        return None if batch is None else marks(batch)

    def until_batch(self, timeout_s: float = 10.0) -> list[int]:
        """Polls as a trainer does."""
        deadline = time.monotonic() + timeout_s
        while (found := self.batch_marks()) is None:
            assert time.monotonic() < deadline, self.get("/stats").text
            time.sleep(0.02)
        return found

    def env_status(self, env_id: int) -> Any:
        return self.get("/status-env", {"env_id": env_id}).json()

    def stats(self) -> dict[str, float]:
        return self.get("/stats").json()

    def until(self, name: str, value: float, timeout_s: float = 10.0) -> None:
        """Waits until a counter has a value."""
        deadline = time.monotonic() + timeout_s
        while (found := self.stats().get(name, 0)) != value:
            assert time.monotonic() < deadline, f"{name} is {found}, not {value}: {self.stats()}"
            time.sleep(0.02)

    def until_at_least(self, name: str, value: float, timeout_s: float = 20.0) -> None:
        """Waits until a counter has reached a value."""
        deadline = time.monotonic() + timeout_s
        while self.stats().get(name, 0) < value:
            assert time.monotonic() < deadline, self.stats()
            time.sleep(0.02)


class ServerProcess(Api):
    """One of them as a child."""

    def __init__(self, start: Callable[[int], subprocess.Popen[bytes]], port: int = 0) -> None:
        self._start = start
        super().__init__("")
        self.start_process(port)

    def start_process(self, port: int = 0) -> None:
        self.process = self._start(port)

    @property
    def pid(self) -> int:
        return self.process.pid

    def end(self, how: signal.Signals = signal.SIGKILL) -> int:
        self.process.send_signal(how)
        return self.process.wait(20)


class GatewayProcess(ServerProcess):
    """`shmbridge gateway` as a child; `restart` on the same port."""

    def __init__(self, log: Path, *arguments: str, listener: socket.socket | None = None) -> None:
        self._log, self._arguments, self._listener = log, arguments, listener
        super().__init__(self._launch)

    def _launch(self, port: int) -> subprocess.Popen[bytes]:
        command = [
            sys.executable,
            "-m",
            "shmbridge.cli",
            "gateway",
            "--json",
            "--port",
            str(port),
            *self._arguments,
        ]
        handed: tuple[int, ...] = ()
        if self._listener is not None:
            handed = (self._listener.fileno(),)
            command = [
                "bash",
                "-c",
                f'exec 3<&{handed[0]}; LISTEN_PID=$$ LISTEN_FDS=1 exec "$@"',
                "-",
                *command,
            ]
        with self._log.open("ab") as errors:
            process = subprocess.Popen(
                command,
                stdout=subprocess.PIPE,
                stderr=errors,
                env=os.environ | {"PYTHONPATH": str(ROOT)},
                pass_fds=handed,
            )
        line = process.stdout.readline()
        assert line, self.output
        self.url = json.loads(line)["url"]
        return process

    @property
    def output(self) -> str:
        return self._log.read_text()

    def restart(self) -> None:
        """Kills it, and starts the next on the same port."""
        self.end()
        self.start_process(self.address[1])


class SharedGateway(GatewayProcess):
    """A gateway for the tests of a module: each begins with nothing registered, and counts from 0."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._before: dict[str, float] = {}

    def begin(self) -> None:
        """Forgets the test before."""
        if self.process.poll() is not None:
            self.start_process(self.address[1])
        assert self.get("/reset_data").status_code == 200
        self._before = {key: value for key, value in super().stats().items() if not key.startswith("bridge_")}

    def stats(self) -> dict[str, float]:
        """The counters since the test began."""
        return {
            key: value - self._before.get(key, 0) if "_total" in key else value
            for key, value in super().stats().items()
        }


class UpstreamProcess(ServerProcess):
    """The original as a child; it answers on a socket that was bound here."""

    def __init__(self) -> None:
        super().__init__(self._launch)

    def _launch(self, port: int) -> subprocess.Popen[bytes]:
        with socket.create_server(("127.0.0.1", port)) as listener:
            listener.set_inheritable(True)
            self.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
            command = [sys.executable, "-c", UPSTREAM, str(listener.fileno())]
            process = subprocess.Popen(command, pass_fds=[listener.fileno()])
        self.get("/info")
        return process

    def restart(self) -> None:
        self.end()
        self.start_process(self.address[1])


class RawClient:
    """A client that reads as much of an answer as a test wants, and closes in the way it wants."""

    def __init__(self, api: Api, receive_buffer: int | None = None) -> None:
        self.socket = socket.socket()
        self.socket.settimeout(20)
        if receive_buffer is not None:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        self.socket.connect(api.address)
        self.received = b""

    def ask(self, path: str, *headers: str, body: bytes = b"", method: str = "GET") -> None:
        lines = [
            f"{method} {path} HTTP/1.1",
            "host: here",
            *headers,
            *([f"content-length: {len(body)}"] if body else []),
            "",
            "",
        ]
        self.socket.sendall("\r\n".join(lines).encode() + body)

    def read_head(self) -> int:
        """Reads up to the head's end; how long the body is."""
        while b"\r\n\r\n" not in self.received:
            self._more()
        head, _, self.received = self.received.partition(b"\r\n\r\n")
        self.head = head.decode().lower()
        return int(self.head.partition("content-length: ")[2].partition("\r\n")[0])

    def read_answer(self) -> bytes:
        """Reads one whole answer; its body."""
        size = self.read_head()
        while len(self.received) < size:
            self._more()
        body, self.received = self.received[:size], self.received[size:]
        return body

    def _more(self) -> None:
        some = self.socket.recv(65536)
        assert some, "the server has closed"
        self.received += some

    def close(self) -> None:
        self.socket.close()

    def reset(self) -> None:
        """Closes with a reset, as the kernel does for a killed process with unread data."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.socket.close()
