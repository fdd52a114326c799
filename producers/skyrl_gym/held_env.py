"""One SkyRL-Gym environment, called from an event loop: in threads, one call at a time, closed once."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

from shmbridge import ShmBridgeError
from shmbridge.producers.rollout import CallThreads, Message
from shmbridge.producers.skyrl_gym.errors import EnvironmentFailed
from shmbridge.producers.skyrl_gym.step_output import Step, conversation_in, step_in

log = logging.getLogger(__name__)

T = TypeVar("T")

_HINT = "its row is left out; fix the environment"
_LOOK_S = 0.2  # between two looks at the environment's process


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
