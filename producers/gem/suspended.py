"""Siblings of one group, played by one body of an environment that stands still while the policy thinks.

A `SuspendedGroup` of one is the usual case. In a larger one a completion of n answers is a turn of all
siblings, and a completion of one answer is a turn of the sibling whose conversation it continues.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from typing import Any, NoReturn, Protocol

from shmbridge.errors import BadArgument, Closed
from shmbridge.producers.gem.action import Action, Answer, Spoken
from shmbridge.producers.gem.errors import EnvFailed, NotSuspendable
from shmbridge.producers.gem.mailbox import Ended, Mailbox, Outcome
from shmbridge.producers.gem.request import Request, continues, goes_on_exactly

Body = Callable[[], Coroutine[Any, Any, Any]]
Said = Callable[[], list[Spoken]]
GroupBody = Callable[[Any, Said], Coroutine[Any, Any, Any]]
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


class SuspendedGroup:
    """Runs the body of an environment once for all siblings; each completion that it asks for is a turn.

    All methods are for the thread of the event loop.

    Args:
        loop: where the body runs.
        item: what is played.
        body: makes the coroutine, which returns what each sibling gets, a value or an exception.
        answer: makes the answer of an action; raises BadArgument for one that cannot be used.
        size: so many siblings.
    """

    def __init__(
        self, loop: asyncio.AbstractEventLoop, item: Any, body: GroupBody, answer: MakeAnswer, size: int
    ) -> None:
        self.loop, self.item, self.make_answer = loop, item, answer
        self._body: Body = lambda: body(item, lambda: [each.spoken for each in self.members])
        self.members = [SuspendedEpisode(self) for _ in range(size)]
        self.error: BaseException | None = None  # why it is over
        self.seed: int | None = None  # by which siblings find it
        self.when_over: Callable[[], None] | None = None
        self._task: asyncio.Task[Any] | None = None

    @property
    def is_full(self) -> bool:
        """Whether each place is taken."""
        return all(each.joined for each in self.members)

    def join(self) -> SuspendedEpisode:
        """Returns the next free place, which is taken now; the body begins with the first."""
        member = next(each for each in self.members if not each.joined)
        member.joined = True
        if self._task is None:
            self._task = start(self.loop, self._body, self)
            self._task.add_done_callback(self._ended)
        return member

    def leave(self, member: SuspendedEpisode) -> None:
        """A sibling ends its episode early: the others go on, and it has answered nothing from now on.

        Its place is free again if the group is not full and it has not answered. The last one ends the body.
        """
        if member not in self.members or self.error is not None:
            return
        if not self.is_full and not member.answers:
            self.members[self.members.index(member)] = member.successor()
        else:
            member.leave()
        if not any(each.joined and not each.left for each in self.members):
            self.fail(Closed("the episode was ended", hint="reset() begins another"))

    def fail(self, error: BaseException) -> None:
        """Ends the episodes with an error, which each caller gets even if the environment swallows it."""
        if self.error is None:
            self._over(error)
            for each in self.members:
                each.tell(error)
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
        if self.error is not None:
            raise self.error
        asked = self._asked(request, count)
        waiting = [each.ask(request) for each in asked]
        # Not at once: what was begun together with this may ask, too.
        self.loop.call_soon(self._hand_out, asked, request)
        try:
            return list(await asyncio.gather(*waiting))
        finally:
            for member, future in zip(asked, waiting, strict=True):
                member.stop_waiting(future)

    def lacking(self) -> str:
        """Returns how many siblings others wait for, as a part of a sentence; "" in a group of one."""
        if len(self.members) == 1:
            return ""
        absent = sum(not each.joined for each in self.members)
        thinking = sum(each.joined and each.waits for each in self.members)
        return f"; of its {len(self.members)} siblings {absent} have not begun, {thinking} have not answered"

    def _asked(self, request: Request, count: int) -> list[SuspendedEpisode]:
        """Returns whose turn it is."""
        if count == len(self.members):
            asked = self.members if count > 1 else self.members[:1]
        elif count == 1:
            asked = [self._whose(request)]
        else:
            self._refuse(
                f"the environment asks for {count} completions of one prompt at once"
                + (f", and {len(self.members)} siblings play" if len(self.members) > 1 else "")
            )
        if any(each.waits for each in asked):
            self._refuse("the environment asks for a completion while it waits for another")
        return list(asked)

    def _whose(self, request: Request) -> SuspendedEpisode:
        """The sibling whose conversation goes on in a request, else one that was not asked before."""
        idle = [each for each in self.members if not each.waits]
        for thoughts in (True, False):
            for each in idle:
                if each.said and goes_on_exactly(request, each.request, each.said[-1].text, thoughts):
                    return each  # another one that fits was shown the same, too
        fits = [each for each in idle if each.answers and _goes_on(request, each)]
        if fits:
            if any(each.spoken.conversation != fits[0].spoken.conversation for each in fits):
                self._refuse(
                    f"the environment rewrote a conversation that may be each of {len(fits)} siblings'",
                    "play it with group_size=1",
                )
            return fits[0]
        for each in idle:
            if each.request is None:
                return each
        return self._refuse(
            "the environment asks for a completion that continues no sibling's conversation",
            "play it with group_size=1",
        )

    def _hand_out(self, asked: Sequence[SuspendedEpisode], request: Request) -> None:
        if self.error is None:
            for each in asked:
                each.tell(request)

    def _refuse(self, what: str, hint: str = REPLAY) -> NoReturn:
        error = NotSuspendable(what, hint=hint)
        self.fail(error)
        raise error

    def _over(self, error: BaseException) -> None:
        self.error = error
        if self.when_over is not None:
            self.when_over()

    def _ended(self, task: asyncio.Task[Any]) -> None:
        outcome = outcome_of(task)
        if self.error is not None:
            return
        self._over(Closed("the episode is over", hint="reset() begins another"))
        results = outcome.result if isinstance(outcome, Ended) else [outcome] * len(self.members)
        for member, result in zip(self.members, results, strict=True):
            member.tell(result if isinstance(result, BaseException) else Ended(result))


class SuspendedEpisode:
    """One sibling's part: its turns, and its answers. Made by its group, in the event loop's thread.

    What happens is handed to the reader that the caller gave last: a `Request`, `Ended`, or an exception.

    Attributes:
        joined: somebody plays it.
        left: it was ended before the others.
        request: the one that was asked last.
        answers: all so far.
    """

    replays = 0

    def __init__(self, group: SuspendedGroup) -> None:
        self.group, self.loop, self.item = group, group.loop, group.item
        self._mailbox = Mailbox()
        self._waiting: asyncio.Future[Answer] | None = None
        self.joined = self.left = False
        self.request: Request | None = None
        self.answers: list[Answer] = []
        self._nothing: list[Answer] = []  # what was answered in its place since it left

    @property
    def said(self) -> list[Answer]:
        """What the environment got as its answers, those after it has left included."""
        return [*self.answers, *self._nothing]

    @property
    def spoken(self) -> Spoken:
        """The same, with what was asked last."""
        return Spoken(self.request, self.said)

    @property
    def waits(self) -> bool:
        """Whether the environment waits for its answer."""
        return self._waiting is not None and not self._waiting.done()  # done: it gave up

    def lacking(self) -> str:
        """As of its group."""
        return self.group.lacking()

    def begin(self, reader: Future[Outcome]) -> None:
        """Gives the first request to `reader`, also one that was asked before."""
        unread = self._mailbox.take_unread()
        self._mailbox.expect(reader)
        if unread is not None:
            self._mailbox.put(unread)

    def resume(self, action: str | Action, reader: Future[Outcome]) -> None:
        """Answers the request that was handed out. An action that cannot be used changes nothing."""
        request, unread = self.request, self._mailbox.take_unread()
        self._mailbox.expect(reader)
        is_over = self._waiting is None or self._waiting.done()  # done: cancelled, and not woken yet
        if request is None or is_over or unread not in (None, request):
            self._gone(unread)
            return
        try:
            answer = self.group.make_answer(action, request)
        except BadArgument as wrong:
            self._mailbox.put(wrong)
            return
        waiting, self._waiting = self._waiting, None
        assert waiting is not None
        self.answers.append(answer)
        waiting.set_result(answer)

    def cancel(self) -> None:
        """Ends it where it stands; who waits gets Closed."""
        self.tell(Closed("the episode was ended", hint="reset() begins another"))
        self.group.leave(self)

    def fail(self, error: BaseException) -> None:
        """Ends the whole group with an error."""
        self.group.fail(error)

    def tell(self, outcome: Outcome | BaseException) -> None:
        """Hands out what happened."""
        self._mailbox.put(outcome)

    def ask(self, request: Request) -> asyncio.Future[Answer]:
        """Returns the future of the answer; one that has left gives an empty, cut one."""
        self.request = request
        self._waiting = waiting = self.loop.create_future()
        if self.left:
            self.leave()
        return waiting

    def stop_waiting(self, waiting: asyncio.Future[Answer]) -> None:
        """Nobody waits for this answer any more."""
        if self._waiting is waiting:
            self._waiting = None

    def leave(self) -> None:
        """Answers what is asked and what will be as a server does that was cut before the first token."""
        self.left = True
        waiting, self._waiting = self._waiting, None
        if waiting is not None and self.request is not None and not waiting.done():
            nothing = Action("", [0], [0.0], finish_reason="length")
            self._nothing.append(self.group.make_answer(nothing, self.request))
            waiting.set_result(self._nothing[-1])

    def successor(self) -> SuspendedEpisode:
        """Returns the same place for somebody else."""
        other = SuspendedEpisode(self.group)
        other.request, other._waiting = self.request, self._waiting
        if self.request is not None:
            other.tell(self.request)
        return other

    def _gone(self, unread: Outcome | BaseException | None) -> None:
        """Says that nobody waits for the answer any more."""
        error: BaseException = NotSuspendable(
            "the environment stopped waiting for this answer: it bounds the time of a completion",
            hint="answer faster, or give the environment more time",
        )
        if isinstance(unread, BaseException):
            error = unread
        if self.group.error is None:
            self.fail(error)
        else:
            self._mailbox.put(error)


def _goes_on(request: Request, member: SuspendedEpisode) -> bool:
    """Whether a request continues what a sibling was asked, with all that it has said."""
    return continues(request, member.request, [each.text for each in member.answers])


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
