"""An end-to-end run: an environment's process, a trainer's process and a server between them, each on its
core, measured in windows.

Knows processes, cores and windows; environment.py and trainer.py know the groups. Called by
the suites.
"""

import contextlib
import json
import os
import secrets
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, Self

import shmbridge
from shmbridge.bench.atropos_http import Server, tokenizer_folder
from shmbridge.bench.groups import Form
from shmbridge.bench.machine import CORES, LANE_BYTES

How = Literal["http", "base_env", "put", "put_async"]
ROOT = Path(shmbridge.__file__).parents[1]


def cores() -> dict[str, int]:
    """Returns a core for each; with only two, the server shares the trainer's, which is the less busy one
    over HTTP.
    """
    others = CORES.producers[1:]
    return {
        "environment": CORES.of_producer(0),
        "trainer": CORES.consumer,
        "server": others[0] if others else CORES.consumer,
    }


class Flow:
    """One environment sending to one trainer for as long as the `with` block; a context manager.

    Args:
        how: what hands groups over: "http" (upstream's environment as it is), "base_env" (attached to a
            bridge), "put", "put_async".
        length: tokens of a trajectory; groups are of 8.
        form: in which groups are put; upstream's environment has lists.
        window: most groups handed over and not yet taken; 0: what the transport takes.
        lane_bytes: of the lane.
    """

    def __init__(
        self, how: How, length: int, form: Form = "lists", window: int = 0, lane_bytes: int = LANE_BYTES
    ) -> None:
        self.how, self.length, self.form, self.window, self.lane_bytes = how, length, form, window, lane_bytes
        self.bridge = f"bench-{os.getpid()}-{secrets.token_hex(3)}"  # unused over HTTP
        self.stalls: dict[str, float] = {}

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as stack:
            where = cores()
            order: dict[str, Any] = {
                name: getattr(self, name) for name in ("how", "length", "form", "window", "lane_bytes")
            }
            self._pids: dict[str, int] = {}
            ends = {"bridge": self.bridge}
            if self.how == "http":
                server = stack.enter_context(Server(where["server"]))
                ends, order["how"] = {"url": server.url}, "base_env"
                self._pids["server"] = server.pid
            else:
                stack.callback(shmbridge.clean, self.bridge, dry_run=False)
            if order["how"] == "base_env":
                order["tokenizer"] = tokenizer_folder(
                    Path(stack.enter_context(tempfile.TemporaryDirectory()))
                )
            credit, give = os.pipe()
            try:
                trainer = ends | {"length": self.length, "credits_fd": give if self.window else -1}
                environment = order | ends | {"credits_fd": credit}
                self._trainer = stack.enter_context(_child("trainer", trainer, where["trainer"], give))
                self._environment = stack.enter_context(
                    _child("environment", environment, where["environment"], credit)
                )
            finally:
                os.close(credit)
                os.close(give)
            self._pids["environment"] = self._environment.pid
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *raised: object) -> None:
        """Ends the environment first, while its groups are still being taken."""
        with self._stack:
            if raised[0] is None:
                self._stop_environment()

    def _stop_environment(self) -> None:
        assert self._environment.stdin
        assert self._environment.stdout
        self._write(self._trainer, json.dumps({"seconds": 3600}))  # groups on their way find room
        self._environment.stdin.close()
        self.stalls = json.loads(self._environment.stdout.read())

    def warm(self, groups: int, seconds: float) -> int:
        """Lets `groups` through unmeasured, and returns how many take about `seconds`. Blocks."""
        half = max(groups // 2, 1)
        self.go(groups=half)
        return max(int(seconds * half / self.go(groups=half)["seconds"]), 4)

    def go(self, **amount: float) -> dict[str, Any]:
        """Lets `groups=` or `seconds=` of groups through, and returns the measured window. Blocks."""
        self._write(self._environment, "from now on")
        self._write(self._trainer, json.dumps({**amount, "pids": self._pids}))
        assert self._trainer.stdout
        answer = self._trainer.stdout.readline()
        if not answer:
            raise self._has_ended(self._trainer)
        return figures(json.loads(answer), self.length)

    def _write(self, child: "subprocess.Popen[str]", line: str) -> None:
        assert child.stdin
        try:
            print(line, file=child.stdin, flush=True)
        except BrokenPipeError:
            raise self._has_ended(child) from None

    def _has_ended(self, child: "subprocess.Popen[str]") -> RuntimeError:
        who = "trainer" if child is self._trainer else "environment"
        return RuntimeError(f"the {who} of {self.how!r} has ended (pid {child.pid}): its messages say why")


def figures(window: dict[str, Any], length: int) -> dict[str, Any]:
    """Returns a window's figures per second and per million tokens."""
    millions = window["tokens"] / 1e6
    return {
        "tokens_per_s": window["tokens"] / window["seconds"],
        "trajectories_per_s": window["tokens"] / length / window["seconds"],
        "cpu_s_per_million_tokens": {who: spent / millions for who, spent in window["cpu_s"].items()},
        "cpu_s_per_million_tokens_in_all": sum(window["cpu_s"].values()) / millions,
        **{name: window[name] for name in ("groups", "seconds", "latency_ms", "polls", "empty_polls")},
    }


@contextlib.contextmanager
def _child(module: str, order: dict[str, Any], core: int, fd: int) -> Iterator["subprocess.Popen[str]"]:
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environment = os.environ | {"PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    process = subprocess.Popen(
        [sys.executable, "-m", f"shmbridge.bench.{module}", json.dumps(order)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        pass_fds=[fd],
        env=environment,
    )
    os.sched_setaffinity(process.pid, {core})  # before it has threads
    try:
        yield process
    finally:
        end(process)


def end(process: "subprocess.Popen[Any]") -> None:
    """Ends a child by its pid, at the latest by SIGKILL."""
    for stream in (process.stdin, process.stdout):
        if stream:
            with contextlib.suppress(OSError):
                stream.close()
    process.terminate()
    try:
        process.wait(5)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
