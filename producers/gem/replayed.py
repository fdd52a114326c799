"""One episode of an Atropos environment that is run again for every turn, with the answers so far."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import Future
from typing import Any

from shmbridge.errors import BadArgument, Closed
from shmbridge.producers.gem.action import Action, Answer, Spoken
from shmbridge.producers.gem.errors import NotSuspendable
from shmbridge.producers.gem.mailbox import Ended, Mailbox, Outcome
from shmbridge.producers.gem.request import Request
from shmbridge.producers.gem.suspended import Body, GroupBody, MakeAnswer, outcome_of, start


class ReplayedEpisode:
    """For environments that cannot stand still: as `SuspendedEpisode`, except that the body begins again in
    every turn and is left at the first completion that has no answer yet.

    A body that asks for n completions of a prompt gets n turns; one that asks for several at the same time, a
    turn for each, in the order in which it asks. It must do the same each time that it is run.

    All methods are for the thread of the event loop.

    Attributes:
        replays: how often the body was run again.
    """

    def __init__(
        self, loop: asyncio.AbstractEventLoop, item: Any, body: GroupBody, answer: MakeAnswer
    ) -> None:
        self.loop, self.item, self._make_answer = loop, item, answer
        self._body: Body = lambda: body(item, lambda: [Spoken(self._request, self.answers)])
        self._mailbox = Mailbox()
        self._run: _Run | None = None
        self._error: BaseException | None = None
        self.answers: list[Answer] = []
        self.requests: list[Request] = []  # of each answer
        self._request: Request | None = None
        self.replays = 0

    def lacking(self) -> str:
        """Nobody: it is played alone."""
        return ""

    def begin(self, reader: Future[Outcome]) -> None:
        """Starts the body."""
        self._mailbox.expect(reader)
        self._run = _Run(self, self._body)

    def resume(self, action: str | Action, reader: Future[Outcome]) -> None:
        """Answers the request that was handed out, and runs the body again."""
        self._mailbox.expect(reader)
        request = self._request
        if request is None or self._error is not None:
            self._mailbox.put(self._error or Closed("the episode is over", hint="reset() begins another"))
            return
        try:
            answer = self._make_answer(action, request)
        except BadArgument as wrong:
            self._mailbox.put(wrong)
            return
        self.answers.append(answer)
        self.requests.append(request)
        self.replays += 1
        self._leave()
        self._run = _Run(self, self._body)

    def cancel(self) -> None:
        """Ends the body where it stands; who waits gets Closed."""
        self.fail(Closed("the episode was ended", hint="reset() begins another"))

    def fail(self, error: BaseException) -> None:
        """Ends the episode with an error."""
        if self._error is None:
            self._error = error
            self._leave()
            self._mailbox.put(error)

    def reached(self, run: _Run, request: Request) -> None:
        """A run has come to a completion without an answer: the turn's request."""
        if run is self._run and self._error is None:
            self._request = request
            self._mailbox.put(request)

    def ended(self, run: _Run, task: asyncio.Task[Any]) -> None:
        """A run has ended; one that was left before does not count."""
        outcome = _alone(outcome_of(task))
        if run is self._run and self._error is None:
            self._error = Closed("the episode is over", hint="reset() begins another")
            self._mailbox.put(outcome)

    def _leave(self) -> None:
        run, self._run = self._run, None
        if run is not None:
            run.task.cancel()


class _Run:
    """The body once; asked from any thread of the environment."""

    def __init__(self, episode: ReplayedEpisode, body: Body) -> None:
        self._episode = episode
        self._lock = threading.Lock()
        self._used, self._stands = 0, False
        self.task = start(episode.loop, body, self)
        self.task.add_done_callback(self._ended)

    async def ask(self, request: Request, count: int) -> list[Answer]:
        """Returns the next answers, or never: the run is left then."""
        episode = self._episode
        with self._lock:
            end = self._used + count
            known = [] if self._stands else episode.answers[self._used : end]
            before = episode.requests[self._used : self._used + len(known)]
            if len(known) == count:
                self._used = end
            first, self._stands = len(known) < count and not self._stands, len(known) < count or self._stands
        if any(each != request for each in before):
            error = NotSuspendable("the environment asks for something else when it is run again")
            episode.loop.call_soon_threadsafe(self.fail, error)
            raise error
        if len(known) == count:
            return known
        if first:
            episode.loop.call_soon_threadsafe(episode.reached, self, request)
        if asyncio.get_running_loop() is not episode.loop:
            raise asyncio.CancelledError  # a thread of the environment cannot be left standing
        return await episode.loop.create_future()  # type: ignore[no-any-return]

    def fail(self, error: BaseException) -> None:
        """Ends the episode with an error."""
        self._episode.fail(error)

    def _ended(self, task: asyncio.Task[Any]) -> None:
        if self._stands:
            task.cancelled() or task.exception()  # left, however it ends
        else:
            self._episode.ended(self, task)


def _alone(outcome: Outcome | BaseException) -> Outcome | BaseException:
    """What the only sibling gets."""
    if not isinstance(outcome, Ended):
        return outcome
    (result,) = outcome.result
    return result if isinstance(result, BaseException) else Ended(result)
