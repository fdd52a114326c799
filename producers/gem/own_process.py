"""An Atropos environment in a process whose main thread is its own: `RemoteAtropos`."""

from __future__ import annotations

import inspect
import os
import sys
import threading
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from shmbridge.errors import BadArgument, Closed
from shmbridge.producers.atropos.check import wants_main_thread
from shmbridge.producers.env_process import Connection, EnvServerProcess
from shmbridge.producers.gem.runtime import file_of
from shmbridge.producers.gem.turns import Action, EnvFailed, GroupNotAlike, NotSuspendable

_ERRORS = {each.__name__: each for each in (BadArgument, Closed, EnvFailed, GroupNotAlike, NotSuspendable)}
_READY_S = 600.0  # an environment's imports may take long
_MORE_S = 60.0  # for a call, beyond what it may take there

_shared: dict[tuple[str, float | None], OwnProcess] = {}
_sharing = threading.Lock()

Answered = tuple[str, dict[str, Any]]


def why_own_process(environment: Any) -> str:
    """Returns why an environment wants a process of its own; "" if its script says nothing. Reads files."""
    path = file_of(environment)
    return "" if path is None else wants_main_thread(path)


class OwnProcess(EnvServerProcess):
    """The process of one environment class, shared by all that play it here. Any thread."""

    def __init__(self, name: str, timeout_s: float | None) -> None:
        path = os.pathsep.join(each for each in sys.path if each)
        super().__init__(
            [
                sys.executable,
                "-m",
                "shmbridge.producers.gem.env_server",
                "--environment",
                name,
                "--path",
                path,
            ],
            _failed,
            timeout_s=None if timeout_s is None else 2 * timeout_s + _MORE_S,
            ready_s=_READY_S,
        )
        self.users = 0


class RemoteAtropos:
    """One `AtroposGemEnv` in another process. For one thread at a time; each call blocks.

    Args:
        environment: as of `AtroposGemEnv`; its name is what the other process gets.
        arguments: the others, without functions: they go there as JSON.

    Raises:
        BadArgument: an argument cannot go there.
        EnvProcessEnded: of each call, where the process has ended; the next `reset` begins in another one.
    """

    def __init__(self, environment: Any, arguments: dict[str, Any]) -> None:
        self._arguments = _plain(arguments)
        self._key = (_name(environment), arguments["timeout_s"])
        with _sharing:
            process = _shared.get(self._key)
            if process is None:
                process = _shared[self._key] = OwnProcess(*self._key)
            process.users += 1
        self._process = process
        self._kept: list[Connection] = []  # one at most: it is closed with this
        self._number = -1
        self.close = weakref.finalize(self, _leave, self._key, process, self._kept)
        self._open()

    @property
    def pid(self) -> int:
        """Of the process."""
        return self._process.pid

    def reset(self, seed: int | None) -> Answered:
        """As of `AtroposGemEnv`."""
        if self._kept and self._kept[0].lost:
            self._open()
        said = self._call("reset", seed=seed)
        return said["observation"], said["info"]

    def step(self, action: str | Action) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """As of `AtroposGemEnv`."""
        observation, reward, terminated, truncated, info = self._call("step", action=_action(action))["said"]
        return observation, reward, terminated, truncated, info

    def begin_beside(self, other: RemoteAtropos) -> Answered:
        """As of `AtroposGemEnv`."""
        said = self._call("beside", other=other._number)
        return said["observation"], said["info"]

    def sample_random_action(self) -> str:
        """As of `AtroposGemEnv`."""
        return str(self._call("random")["action"])

    def _open(self) -> None:
        self._kept[:] = [self._process.connection()]
        self._number = self._kept[0].call("make", arguments=self._arguments)["episode"]

    def _call(self, name: str, **said: Any) -> dict[str, Any]:
        if not self.close.alive:
            raise Closed("the environment is closed", hint="make another")
        return self._kept[0].call(name, episode=self._number, **said)


def _leave(key: tuple[str, float | None], process: OwnProcess, kept: list[Connection]) -> None:
    """Closes a connection, and the process with the last one."""
    for connection in kept:
        connection.close()
    with _sharing:
        process.users -= 1
        if process.users:
            return
        if _shared.get(key) is process:
            del _shared[key]
    process.close()


def _name(environment: Any) -> str:
    if not isinstance(environment, str):
        return f"{Path(inspect.getfile(environment)).resolve()}:{environment.__qualname__}"
    place, _, name = environment.rpartition(":")
    return f"{Path(place).resolve()}:{name}" if place.endswith(".py") else environment


def _plain(arguments: dict[str, Any]) -> dict[str, Any]:
    given = dict(arguments)
    for name in ("reward_of", "reward_config"):
        if callable(given[name]):
            raise BadArgument(
                f"{name} is a function, and the environment runs in a process of its own",
                hint="process=False runs it here, if it can do without the main thread",
            )
    config = given["config"]
    if config is not None and not isinstance(config, Mapping):
        given["config"] = config.model_dump(mode="json")
    return {name: _whole(value) for name, value in given.items()}


def _whole(value: Any) -> Any:
    """The same in dicts and lists: ROLL's arguments are those of OmegaConf."""
    if isinstance(value, Mapping):
        return {str(name): _whole(each) for name, each in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_whole(each) for each in value]
    return value


def _action(action: str | Action) -> dict[str, Any]:
    if isinstance(action, str):
        return {"text": action}
    if not isinstance(action, Action):
        raise BadArgument(f"a {type(action).__name__} is no action", hint="give text, or an Action")
    return {
        "text": action.text,
        "token_ids": None if action.token_ids is None else [int(each) for each in action.token_ids],
        "logprobs": None if action.logprobs is None else [float(each) for each in action.logprobs],
        "finish_reason": action.finish_reason,
    }


def _failed(answer: Mapping[str, Any]) -> Exception:
    kind = _ERRORS.get(str(answer.get("kind")))
    if kind is not None:
        return kind(str(answer["message"]), hint=str(answer.get("hint", "")))
    return EnvFailed(f"the environment's process answered: {answer.get('error')}", hint="see its message")
