"""SkyRL-Gym environments for an event loop: in this process (`made_here`), or in another (`EnvProcess`)."""

from __future__ import annotations

import asyncio
import importlib
import logging
import math
import sys
import threading
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from shmbridge import ShmBridgeError
from shmbridge.producers.env_process import Connection, EnvProcessEnded, EnvServerProcess
from shmbridge.producers.rollout import CallThreads, Message

log = logging.getLogger(__name__)
T = TypeVar("T")
_HINT = "its row is left out; fix the environment"
_LOOK_S = 0.2  # between two looks at the environment's process


class BadTask(ShmBridgeError, ValueError):
    """A data set cannot be read, or one of its rows is not a task in SkyRL's format."""

    code = "SB512"


class EnvironmentFailed(ShmBridgeError, RuntimeError):
    """A SkyRL-Gym environment raised, or returned what no environment returns; its episode is no row."""

    code = "SB513"


@dataclass(frozen=True)
class Step:
    """What an environment says to one answer.

    Attributes:
        observations: messages that follow the answer.
        reward: of this step.
        done: the episode has ended.
        answer: what the environment took of the answer (its postprocessed_action); None: all of it.
    """

    observations: list[Message]
    reward: float
    done: bool
    answer: str | None


def step_in(output: Any) -> Step:
    """Returns the step in what `step` returned. Raises ValueError if it is not a step."""
    if not isinstance(output, Mapping) or not {"observations", "reward", "done"} <= set(output):
        raise ValueError(f"step returned {_short(output)}, not observations, reward and done")
    try:
        reward = float(output["reward"])
    except (TypeError, ValueError):
        raise ValueError(f"the reward {_short(output['reward'])} is no number") from None
    if not math.isfinite(reward):
        raise ValueError(f"the reward is {reward}")
    answer = output.get("postprocessed_action")
    if answer is not None and not isinstance(answer, str):
        raise ValueError(f"the postprocessed_action {_short(answer)} is no text")
    return Step(_messages(output["observations"] or []), reward, bool(output["done"]), answer)


def conversation_in(output: Any) -> list[Message]:
    """Returns the conversation in what `init` returned. Raises ValueError if there is none."""
    if not isinstance(output, (tuple, list)) or len(output) != 2:
        raise ValueError(f"init returned {_short(output)}, not a conversation and a dict")
    conversation = _messages(output[0])
    if not conversation:
        raise ValueError("init returned an empty conversation")
    return conversation


def plain(value: Any) -> Any:
    """Returns a value as JSON has it: numbers of numpy as Python's, what has no JSON as text."""
    if isinstance(value, Mapping):
        return {str(key): plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(each) for each in value]
    if hasattr(value, "tolist"):  # numpy's and torch's, scalars too
        return plain(value.tolist())
    if (
        value is None
        or isinstance(value, (bool, int, str))
        or (isinstance(value, float) and math.isfinite(value))
    ):
        return value
    return str(value)


def _messages(value: Any) -> list[Message]:
    if not isinstance(value, (list, tuple)) or not all(
        isinstance(each, Mapping) and isinstance(each.get("role"), str) and "content" in each
        for each in value
    ):
        raise ValueError(f"{_short(value)} is no list of messages")
    return [dict(each) for each in value]


def _short(value: Any) -> str:
    return repr(value)[:120]


class HeldEnv:
    """The environment of one episode. For one task of one event loop; nothing here blocks it.

    Args:
        make: makes the environment; called in a thread, too.
        name: of the environment and its task, for errors.
        threads: where calls run.
    """

    def __init__(self, make: Callable[[], Any], name: str, threads: CallThreads) -> None:
        self._make, self._name, self._threads = make, name, threads
        self._env: Any = None
        self._last: Future[Any] | None = None  # call

    async def init(self, prompt: Sequence[Message]) -> list[Message]:
        """Makes the environment; returns the conversation that it begins with.

        Raises:
            EnvironmentFailed: it raised, or returned no conversation.
        """

        def made() -> list[Message]:
            self._env = self._make()
            return conversation_in(self._env.init(list(prompt)))

        return await self._in_thread("init", made)

    async def step(self, action: str) -> Step:
        """Returns what the environment says to an answer. Raises EnvironmentFailed."""
        return await self._in_thread("step", lambda: step_in(self._env.step(action)))

    async def while_it_lives(self, answer: Coroutine[Any, Any, T]) -> T:
        """Returns the policy's answer. Raises EnvironmentFailed soon after the environment's process ends."""
        check = getattr(self._env, "check", None)  # of an environment in another process
        if check is None:
            return await answer
        asked = asyncio.ensure_future(answer)
        try:
            while not (await asyncio.wait({asked}, timeout=_LOOK_S))[0]:
                self._called("the answer to", check)
            return asked.result()
        finally:
            if not asked.done():
                asked.cancel()
                await asyncio.gather(asked, return_exceptions=True)

    async def metrics(self) -> Mapping[str, Any]:
        """Returns the environment's own metrics of the episode, if it has any. Raises EnvironmentFailed."""

        def asked() -> dict[str, Any]:
            get_metrics = getattr(self._env, "get_metrics", None)  # of text environments, not of all
            return dict(get_metrics() or {}) if get_metrics is not None else {}

        return await self._in_thread("get_metrics", asked)

    async def close(self) -> None:
        """Closes the environment, even if the caller is cancelled. Raises EnvironmentFailed."""
        closing = self._threads.submit(self._called, "close", self._close)
        await asyncio.shield(asyncio.wrap_future(closing))  # done even if the waiting task is cancelled

    def close_later(self) -> None:
        """Closes the environment once the call that runs has ended; an error is logged. Never blocks."""
        if self._last is None or self._last.done():
            self._threads.submit(self._close_after_a_failure)
        else:
            self._threads.give_up(self._last)
            self._last.add_done_callback(lambda _: self._threads.submit(self._close_after_a_failure))

    async def _in_thread(self, what: str, call: Callable[[], T]) -> T:
        calling = self._threads.submit(self._called, what, call)
        self._last = calling
        return await asyncio.wrap_future(calling)

    def _called(self, what: str, call: Callable[[], T]) -> T:
        try:
            return call()
        except EnvironmentFailed as error:  # in another process
            raise EnvironmentFailed(f"{what} of {self._name} failed: {error.message}", hint=_HINT) from error
        except ShmBridgeError:
            raise
        except BaseException as error:  # func_timeout's is no Exception, SystemExit would end the loop
            said = f"{type(error).__name__}: {error}"
            raise EnvironmentFailed(f"{what} of {self._name} failed: {said}", hint=_HINT) from error

    def _close(self) -> None:
        if self._env is not None:
            self._env.close()

    def _close_after_a_failure(self) -> None:
        try:
            self._called("close", self._close)
        except ShmBridgeError as error:
            log.warning("%s", error)


def made_here(env_class: str, extras: dict[str, Any], env_config: Mapping[str, Any] | None = None) -> Any:
    """Returns an environment that `skyrl_gym` knows. Blocks as long as it takes to be made.

    Args:
        env_class: name that it is registered under.
        extras: of its task.
        env_config: settings of the environment class, which reads them as attributes.
    """
    import skyrl_gym

    config: Any = {}
    if env_config:
        from omegaconf import OmegaConf

        config = OmegaConf.create(dict(env_config))
    return skyrl_gym.make(env_class, env_config=config, extras=extras)


def check_registered(env_classes: Iterable[str], modules: Iterable[str] = ()) -> None:
    """Imports modules that register environments, and checks that all of `env_classes` are known then.

    Raises:
        BadTask: a module cannot be imported, or an environment is not registered.
    """
    wanted = [*modules, "skyrl_gym"]
    for name in wanted:
        try:
            importlib.import_module(name)
        except ImportError as error:
            raise BadTask(f"{name} cannot be imported: {error}", hint=_hint(error)) from error
    from skyrl_gym.envs.registration import registry

    for name in sorted(set(env_classes) - set(registry)):
        raise BadTask(
            f"no environment {name!r} is registered; there are {', '.join(sorted(registry))}",
            hint="import the module that registers it: --import",
        )


def _hint(error: ImportError) -> str:
    return "pip install 'shmbridge[skyrl-gym]'" if error.name == "skyrl_gym" else "is it on PYTHONPATH?"


class RemoteEnv:
    """One episode's environment in another process. For one thread at a time; each call blocks.

    Args:
        connection: its own; closed with the environment.
        env_class: name under which `skyrl_gym` knows it there.
        extras: of its task; JSON, as all that goes through the connection.
        env_config: settings of its class.

    Raises:
        EnvironmentFailed: of each call, where the environment raised there.
        EnvProcessEnded: of each call, where its process is gone.
    """

    def __init__(
        self, connection: Connection, env_class: str, extras: Mapping[str, Any], env_config: Mapping[str, Any]
    ) -> None:
        self._connection = connection
        self._made_of = {"env_class": env_class, "extras": extras, "env_config": env_config}
        self._episode: int | None = None

    def init(self, prompt: Sequence[Mapping[str, Any]]) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        """Makes the environment; returns the conversation that it begins with, and nothing about it."""
        answer = self._connection.call("init", prompt=list(prompt), **self._made_of)
        self._episode = answer["episode"]
        return answer["messages"], {}

    def check(self) -> None:
        """Raises EnvProcessEnded if its process has ended. Never blocks."""
        self._connection.check()

    def step(self, action: str) -> dict[str, Any]:
        """Returns observations, reward, done, and whatever else the environment says."""
        return self._connection.call("step", episode=self._episode, action=action)

    def get_metrics(self) -> dict[str, Any]:
        """Returns the environment's metrics of the episode."""
        metrics: dict[str, Any] = self._connection.call("metrics", episode=self._episode)["metrics"]
        return metrics

    def close(self) -> None:
        """Closes the environment there, and the connection."""
        try:
            if self._episode is not None and not self._connection.lost:
                self._connection.call("close", episode=self._episode)
                self._episode = None
        finally:
            self._connection.close()


def server_command(repo_id: str, *, python: str | None = None, split: str = "train") -> list[str]:
    """Returns the command that serves a data set's environments. Never blocks.

    Args:
        repo_id: the data set, a path or a name.
        python: the interpreter that has skyrl_gym; None: this one.
        split: part of the data set.
    """
    script = Path(__file__).with_name("env_server.py")
    return [python or sys.executable, str(script), "--repo_id", repo_id, "--split", split]


class EnvProcess(EnvServerProcess):
    """A process that serves SkyRL-Gym's environments, as of `EnvServerProcess`. Any thread.

    Args:
        command: see `server_command`.
        modules: imported there first, to register environments.
        env_config: settings of the environment class.
        timeout_s: longest time for one call of an environment.
        restarts: so many ends in a row, each within a minute of the start, are followed by another start.

    Raises:
        EnvProcessEnded: the command cannot be run.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        modules: Sequence[str] = (),
        env_config: Mapping[str, Any] | None = None,
        timeout_s: float = 600.0,
        restarts: int = 5,
    ) -> None:
        self._env_config = dict(env_config or {})
        super().__init__(command, _failed, modules=modules, timeout_s=timeout_s, restarts=restarts)

    def make(self, env_class: str, extras: dict[str, Any]) -> RemoteEnv:
        """Returns an environment of that process; `SkyRLPlay(process.make)`. Raises EnvProcessEnded."""
        return RemoteEnv(self.connection(), env_class, extras, self._env_config)

    def rows(self) -> RemoteRows:
        """Returns the rows of its data set, each fetched when it is asked for. Blocks until it has read them.

        Raises:
            EnvironmentFailed: it cannot read them.
            EnvProcessEnded: it has ended.
        """
        return RemoteRows(self)


def _failed(answer: Mapping[str, Any]) -> EnvironmentFailed:
    return EnvironmentFailed(str(answer.get("error")))


class RemoteRows:
    """The rows of the data set that a process serves. Any thread; one asks at a time."""

    def __init__(self, process: EnvProcess) -> None:
        self._process, self._asking = process, threading.Lock()
        self._connection = process.connection()
        self._count = int(self._connection.call("rows")["count"])

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, number: int) -> Mapping[str, Any]:
        with self._asking:
            try:
                return self._row(number)
            except EnvProcessEnded:
                self._connection = self._process.connection()  # of the next one
                return self._row(number)

    def _row(self, number: int) -> Mapping[str, Any]:
        row: Mapping[str, Any] = self._connection.call("row", row=number)["row"]
        return row
