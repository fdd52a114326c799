"""One episode of an Atropos environment as turns: what it asks for, and the policy's answer.

`SuspendedGroup` runs the environment once and holds it at each completion; `ReplayedEpisode` runs it again
for every turn, for environments that cannot be held.
"""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Literal, NoReturn, Protocol, TypeAlias

from shmbridge import ShmBridgeError
from shmbridge.errors import BadArgument, Closed
from shmbridge.producers.rollout import Message

FinishReason = Literal["stop", "length"]
Body = Callable[[], Coroutine[Any, Any, Any]]
REPLAY = "replay=True runs the environment again for every turn instead"
# Whose completions are asked for: tasks that an environment makes inherit it.
EPISODE: contextvars.ContextVar[Asked] = contextvars.ContextVar("shmbridge_gem_episode")


class NotSuspendable(ShmBridgeError, RuntimeError):
    """An Atropos environment cannot be played turn by turn, because of how it asks for completions."""

    code = "SB515"


class EnvFailed(ShmBridgeError, RuntimeError):
    """An environment failed, or gave no trajectory; its own exception is the cause. There is no reward."""

    code = "SB516"


class GroupNotAlike(ShmBridgeError, ValueError):
    """The episodes of a group would begin differently, so that their scores could not be compared."""

    code = "SB517"


@dataclass(frozen=True)
class Request:
    """What an environment asks for.

    Attributes:
        messages: the conversation, where it asks with messages.
        prompt: the text to be continued, where it asks with text, or its managed server made it of messages.
        token_ids: the same as token ids, where it has them.
        wants_tokens: it is given the token ids of the answer.
        wants_logprobs: it asks for the log-probability of each token.
        options: all else that it asks, such as max_tokens and temperature.
    """

    messages: Sequence[Message] | None = None
    prompt: str | None = None
    token_ids: Sequence[int] | None = None
    wants_tokens: bool = False
    wants_logprobs: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Turn:
    """What a request says after the answer before it.

    Attributes:
        new_messages: the messages since then; those of the answer itself are left out.
        rewritten: the request does not continue that conversation: all its messages are new.
    """

    new_messages: list[Message]
    rewritten: bool = False

    @property
    def observation(self) -> str:
        """The text of the new messages."""
        return "\n\n".join(text_of(message) for message in self.new_messages)


def turn_of(request: Request, before: Request | None, answer: str) -> Turn:
    """Returns what is new in `request`, after `answer` to the request `before`; None: it is the first one."""
    if request.messages is not None:
        asked = before.messages if before is not None else ()
        return _chat_turn(request.messages, asked, answer)
    prompt = request.prompt or ""
    if before is None:
        return Turn(_as_user(prompt))
    said = (before.prompt or "") + answer
    if before.prompt is None or not prompt.startswith(said):
        return Turn(_as_user(prompt), rewritten=True)
    return Turn(_as_user(prompt[len(said) :]))


def _chat_turn(messages: Sequence[Message], asked: Sequence[Message] | None, answer: str) -> Turn:
    if not asked:
        return Turn(list(messages), rewritten=asked is None)
    new = list(messages[len(asked) :])
    said = bool(new) and new[0].get("role") == "assistant"
    if list(messages[: len(asked)]) != list(asked) or len(new) <= said:
        return Turn(list(messages), rewritten=True)
    return Turn(new[1:], rewritten=new[0].get("content") != answer) if said else Turn(new)


def continues(request: Request, before: Request | None, said: Sequence[str]) -> bool:
    """Returns whether a request goes on with the conversation `before`, with all that was said in it.

    An environment may trim an answer, add to it, or leave its thoughts out.
    """
    if before is None:
        return False
    text, asked = _whole(request), _whole(before)
    if request.messages is not None and before.messages:
        if list(request.messages[:1]) != list(before.messages[:1]):
            return False
    elif before.prompt and text[:32] != asked[:32]:
        return False
    at = 0
    for answer in said:
        answer = without_thoughts(answer)
        found = text.find(answer, at)
        if found < 0:
            return False
        at = found + len(answer)
    return True


def goes_on_exactly(request: Request, before: Request | None, said: str, thoughts: bool = True) -> bool:
    """Returns whether a request is the one `before`, the answer to it, and what is new.

    Args:
        request: the newer one.
        before: the older one.
        said: the answer.
        thoughts: False: the answer may be there without its thoughts.
    """
    if before is None:
        return False
    if request.messages is None or before.messages is None:
        return before.prompt is not None and (request.prompt or "").startswith(before.prompt + said)
    asked = len(before.messages)
    if len(request.messages) <= asked or list(request.messages[:asked]) != list(before.messages):
        return False
    answer = request.messages[asked]
    if answer.get("role") != "assistant":
        return False
    there = text_of(answer)
    return there.strip() == said.strip() if thoughts else without_thoughts(there) == without_thoughts(said)


def without_thoughts(answer: str) -> str:
    """Returns an answer as templates keep it in a later conversation, stripped."""
    return answer.rpartition("</think>")[2].strip() or answer.strip()


def quotes(request: Request, before: Request | None, answer: str) -> bool:
    """Returns whether another conversation quotes an answer, under a role other than the assistant's.

    So a judge is asked, and a model that gets a summary.
    """
    answer = answer.strip()
    if not answer or before is None or before.messages is None or request.messages is None:
        return False
    if list(request.messages[: len(before.messages)]) == list(before.messages):
        return False
    return any(each.get("role") != "assistant" and answer in text_of(each) for each in request.messages)


def _whole(request: Request) -> str:
    if request.messages is not None:
        return "\n".join(text_of(message) for message in request.messages)
    return request.prompt or ""


def _as_user(text: str) -> list[Message]:
    return [{"role": "user", "content": text}]


def text_of(message: Message) -> str:
    """Returns a message's text, also of content that is a list of parts; parts without text are left out."""
    content = message.get("content")
    if isinstance(content, (list, tuple)):
        return "".join(str(part.get("text", "")) for part in content if isinstance(part, Mapping))
    return "" if content is None else str(content)


@dataclass(frozen=True)
class Action:
    """An answer with the tokens that were sampled, for `AtroposGemEnv.step`. Plain text is an action, too.

    Attributes:
        text: what was said; None: decoded from the tokens.
        token_ids: what was sampled, end token included.
        logprobs: the log-probability of each token, in nats.
        finish_reason: "length" if the answer was cut.
    """

    text: str | None = None
    token_ids: Sequence[int] | None = None
    logprobs: Sequence[float] | None = None
    finish_reason: FinishReason = "stop"

    def __post_init__(self) -> None:
        if self.text is None and self.token_ids is None:
            raise BadArgument(
                "an action has neither text nor token ids", hint="Action(text, token_ids, logprobs)"
            )
        if self.logprobs is not None and len(self.logprobs) != len(self.token_ids or ()):
            raise BadArgument(
                f"{len(self.logprobs)} log-probabilities for {len(self.token_ids or ())} tokens",
                hint="give one for each token, end token included",
            )


@dataclass(frozen=True)
class Answer:
    """An action with all that the environment asked for.

    Attributes:
        text: what was said.
        token_ids: None where neither the action has them nor the environment wants them.
        logprobs: None: not known.
        finish_reason: as the action's.
        retokenised: whether the tokens were made from the text.
    """

    text: str
    token_ids: list[int] | None
    logprobs: list[float] | None
    finish_reason: FinishReason
    retokenised: bool


@dataclass(frozen=True)
class Spoken:
    """What one sibling was asked last, and all that it has answered."""

    request: Request | None
    answers: Sequence[Answer]

    @property
    def conversation(self) -> tuple[Any, ...]:
        """What is equal where two siblings said the same in the same conversation."""
        asked = self.request
        texts = [each.text for each in self.answers]
        return (None, None, texts) if asked is None else (asked.messages, asked.prompt, texts)


def answer_of(action: str | Action, request: Request, tokenizer: Any) -> Answer:
    """Returns the answer to a request. Never blocks.

    An environment that wants tokens of an action that is only text gets that text tokenised, end token
    included unless the answer was cut. Plain text may end with the text of the end token.

    Raises:
        BadArgument: no action, or the environment asks for log-probabilities and the action has none.
    """
    if isinstance(action, str):
        action = Action(action.removesuffix(tokenizer.eos_token or ""))
    if not isinstance(action, Action):
        raise BadArgument(f"a {type(action).__name__} is no action", hint="give text, or an Action")
    if request.wants_logprobs and action.logprobs is None:
        raise BadArgument(
            "the environment asks for the log-probabilities of its completion, and the action has none",
            hint="step(Action(text, token_ids, logprobs))",
        )
    text = action.text
    if text is None:
        text = str(tokenizer.decode(list(action.token_ids or ()), skip_special_tokens=True))
    tokens = None if action.token_ids is None else [int(each) for each in action.token_ids]
    retokenised = tokens is None and request.wants_tokens
    if retokenised:
        tokens = list(tokenizer.encode(text, add_special_tokens=False))
        if action.finish_reason == "stop" and tokenizer.eos_token_id is not None:
            tokens.append(tokenizer.eos_token_id)
    logprobs = None if action.logprobs is None else [float(each) for each in action.logprobs]
    return Answer(text, tokens, logprobs, action.finish_reason, retokenised)


@dataclass(frozen=True)
class Ended:
    """An episode is over; this is what it gave."""

    result: Any


Outcome: TypeAlias = Request | Ended


class Mailbox:
    """Outcomes of an episode, for one waiting thread at a time. For the event loop's thread only."""

    def __init__(self) -> None:
        self._reader: Future[Outcome] | None = None
        self._unread: Outcome | BaseException | None = None

    def expect(self, reader: Future[Outcome]) -> None:
        """Sets the reader of the next outcome."""
        self._reader = reader

    def take_unread(self) -> Outcome | BaseException | None:
        """Returns the outcome that arrived without a reader, or None."""
        unread, self._unread = self._unread, None
        return unread

    def put(self, outcome: Outcome | BaseException) -> None:
        """Hands an outcome to the reader, or keeps the last one until there is a reader."""
        reader, self._reader = self._reader, None
        if reader is None or not reader.set_running_or_notify_cancel():
            self._unread = outcome
        elif isinstance(outcome, BaseException):
            reader.set_exception(outcome)
        else:
            reader.set_result(outcome)


Said = Callable[[], list[Spoken]]
GroupBody = Callable[[Any, Said], Coroutine[Any, Any, Any]]
MakeAnswer = Callable[[str | Action, Request], Answer]


class Asked(Protocol):
    """Where a completion that an environment asks for comes from."""

    async def ask(self, request: Request, count: int) -> list[Answer]:
        """Returns `count` answers. Awaited by the environment."""
        ...

    def fail(self, error: BaseException) -> None:
        """Ends the episode with an error. Event loop's thread only."""
        ...


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
        joined: it is played.
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
        """Forgets a completion that the environment no longer awaits."""
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
        """Returns an episode in the same place, for another player."""
        other = SuspendedEpisode(self.group)
        other.request, other._waiting = self.request, self._waiting
        if self.request is not None:
            other.tell(self.request)
        return other

    def _gone(self, unread: Outcome | BaseException | None) -> None:
        """Reports that the environment stopped waiting for the answer."""
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
        """Returns "": it has no siblings."""
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
