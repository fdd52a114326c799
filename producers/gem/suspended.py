"""One episode of an Atropos environment as a coroutine that stands still while the policy thinks."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, NoReturn, Protocol

from shmbridge.errors import BadArgument, Closed
from shmbridge.producers.gem.action import Action, Answer
from shmbridge.producers.gem.errors import EnvFailed, NotSuspendable
from shmbridge.producers.gem.mailbox import Ended, Mailbox, Outcome
from shmbridge.producers.gem.request import Request

Body = Callable[[], Coroutine[Any, Any, Any]]
MakeAnswer = Callable[[str | Action, Request], Answer]
REPLAY = "replay=True runs the environment again for every turn instead"


class Asked(Protocol):
    """Where a completion that an environment asks for comes from."""

    async def ask(self, request: Request, count: int) -> list[Answer]:
        """Returns `count` answers. Awaited by the environment."""
        ...

    def fail(self, error: BaseException) -> None:
        """Ends the episode with an error. Event loop's thread only."""
        ...


# Whose completions are asked for: tasks that an environment makes inherit it.
EPISODE: contextvars.ContextVar[Asked] = contextvars.ContextVar("shmbridge_gem_episode")


class SuspendedEpisode:
    """Runs the body of an environment once; each completion that it asks for is a turn.

    All methods are for the thread of the event loop. What happens is handed to the reader that the caller
    gave last: a `Request`, `Ended`, or an exception.

    Args:
        loop: where the body runs.
        body: makes the coroutine of the episode.
        answer: makes the answer of an action; raises BadArgument for one that cannot be used.
    """

    replays = 0

    def __init__(self, loop: asyncio.AbstractEventLoop, body: Body, answer: MakeAnswer) -> None:
        self.loop, self._body, self._make_answer = loop, body, answer
        self._mailbox = Mailbox()
        self._task: asyncio.Task[Any] | None = None
        self._waiting: asyncio.Future[Answer] | None = None
        self._request: Request | None = None  # the one that was handed out
        self._error: BaseException | None = None  # why it is over
        self.answers: list[Answer] = []

    def begin(self, reader: Future[Outcome]) -> None:
        """Starts the body."""
        self._mailbox.expect(reader)
        self._task = start(self.loop, self._body, self)
        self._task.add_done_callback(self._ended)

    def resume(self, action: str | Action, reader: Future[Outcome]) -> None:
        """Answers the request that was handed out. An action that cannot be used changes nothing."""
        request, unread = self._request, self._mailbox.take_unread()
        self._mailbox.expect(reader)
        is_over = self._waiting is None or self._waiting.done()  # done: cancelled, and not woken yet
        if request is None or is_over or unread not in (None, request):
            self._gone(unread)
            return
        try:
            answer = self._make_answer(action, request)
        except BadArgument as wrong:
            self._mailbox.put(wrong)
            return
        waiting, self._waiting = self._waiting, None
        assert waiting is not None
        self.answers.append(answer)
        waiting.set_result(answer)

    def cancel(self) -> None:
        """Ends the body where it stands; who waits gets Closed."""
        self.fail(Closed("the episode was ended", hint="reset() begins another"))

    def fail(self, error: BaseException) -> None:
        """Ends the episode with an error, which the caller gets even if the environment swallows it."""
        if self._error is None:
            self._error = error
            self._mailbox.put(error)
            if self._task is not None:
                self._task.cancel()

    async def ask(self, request: Request, count: int) -> list[Answer]:
        """Hands a request out and stands still until it is answered. Awaited by the environment."""
        if asyncio.get_running_loop() is not self.loop:
            error = NotSuspendable(
                "the environment asks for completions from threads of its own", hint=REPLAY
            )
            self.loop.call_soon_threadsafe(self.fail, error)
            raise error
        if self._error is not None:
            raise self._error
        if count != 1:
            self._refuse(f"the environment asks for {count} completions of one prompt at once")
        if self._waiting is not None:
            self._refuse("the environment asks for a completion while it waits for another")
        self._request, self._waiting = request, self.loop.create_future()
        waiting = self._waiting
        # Not at once: what was begun together with this may ask, too.
        self.loop.call_soon(self._hand_out, request)
        try:
            return [await waiting]
        finally:
            if self._waiting is waiting:
                self._waiting = None

    def _hand_out(self, request: Request) -> None:
        if self._error is None:
            self._mailbox.put(request)

    def _gone(self, unread: Outcome | BaseException | None) -> None:
        """Says that nobody waits for the answer any more."""
        error: BaseException = NotSuspendable(
            "the environment stopped waiting for this answer: it bounds the time of a completion",
            hint="answer faster, or give the environment more time",
        )
        if isinstance(unread, BaseException):
            error = unread
        if self._error is None:
            self.fail(error)
        else:
            self._mailbox.put(error)

    def _refuse(self, what: str) -> NoReturn:
        error = NotSuspendable(what, hint=REPLAY)
        self.fail(error)
        raise error

    def _ended(self, task: asyncio.Task[Any]) -> None:
        outcome = outcome_of(task)
        if self._error is None:
            self._error = Closed("the episode is over", hint="reset() begins another")
            self._mailbox.put(outcome)


def start(loop: asyncio.AbstractEventLoop, body: Body, episode: Asked) -> asyncio.Task[Any]:
    """Returns the task of a body whose completions `episode` answers."""
    context = contextvars.copy_context()
    context.run(EPISODE.set, episode)
    return loop.create_task(_without_exit(body), context=context)


async def _without_exit(body: Body) -> Any:
    """An environment that exits ends its episode, not the event loop."""
    try:
        return await body()
    except (SystemExit, KeyboardInterrupt) as left:
        raise EnvFailed(f"the environment ended with {left!r}") from left


def outcome_of(task: asyncio.Task[Any]) -> Ended | BaseException:
    """Returns what a finished body gave; an exception of the environment is the cause of an EnvFailed."""
    if task.cancelled():
        return EnvFailed("the environment cancelled its own trajectory")
    error = task.exception()
    if error is None:
        return Ended(task.result())
    if isinstance(error, (EnvFailed, NotSuspendable)):
        return error
    failed = EnvFailed(f"the environment raised {error!r}", hint="its own traceback is the cause")
    failed.__cause__ = error
    return failed
