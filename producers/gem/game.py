"""Episodes of a gem environment for a `Rollout`: `GemGame`."""

from __future__ import annotations

import asyncio
import itertools
import math
import random
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal, Self, TypeVar

import numpy as np

from shmbridge.errors import BadArgument
from shmbridge.producers.gem.turns import Action, EnvFailed, FinishReason, GroupNotAlike
from shmbridge.producers.rollout import CallThreads, ContextFull, Episode, Message, Task

NAME = "atropos"

Alike = Literal["auto", "spawn", "reset"]
T = TypeVar("T")
_HINT = "its row is left out; fix the environment"


def register(name: str = NAME) -> None:
    """Registers `AtroposGemEnv` with gem; again does nothing. Blocks while gem is imported."""
    import gem
    from gem.envs.registration import ENV_REGISTRY

    if name not in ENV_REGISTRY:
        gem.register(name, "shmbridge.producers.gem.atropos_env:AtroposGemEnv")


class ProcessRandom:
    """Lets environments draw side by side, or one alone that seeds. Any thread; calls wait for their turn."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        # Turns, each with its thread: those that wait and those that have begun.
        self._to_draw: dict[object, int] = {}
        self._to_seed: dict[object, int] = {}
        self._drawing: dict[object, int] = {}
        self._alone: dict[object, int] = {}  # one at most

    @contextmanager
    def shared(self) -> Iterator[None]:
        """Within the block others may draw, and none may seed."""
        turn = self._turn(self._to_draw, self._drawing, lambda: not self._alone and not self._to_seed)
        try:
            yield
        finally:
            with self._changed:
                self._drawing.pop(turn, None)
                self._changed.notify_all()

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Within the block no other environment draws; after it the random state is as before."""
        turn = self._turn(self._to_seed, self._alone, lambda: not self._alone and not self._drawing)
        before, before_numpy = random.getstate(), np.random.get_state()
        try:
            yield
        finally:
            with self._changed:
                if self._alone.pop(turn, None) is not None:
                    random.setstate(before)
                    np.random.set_state(before_numpy)
                self._changed.notify_all()

    def give_up(self, thread: int) -> None:
        """Ends the turns of a thread whose call takes too long; one that waits raises there."""
        with self._changed:
            for turns in (self._to_draw, self._to_seed, self._drawing, self._alone):
                for turn in [turn for turn, owner in turns.items() if owner == thread]:
                    del turns[turn]
            self._changed.notify_all()

    def _turn(self, waiting: dict[object, int], begun: dict[object, int], may: Callable[[], bool]) -> object:
        turn = object()
        with self._changed:
            waiting[turn] = threading.get_ident()
            try:
                self._changed.wait_for(lambda: turn not in waiting or may())
                if turn not in waiting:
                    raise TimeoutError("its episode ended before its turn to draw at random")
                begun[turn] = waiting[turn]
            finally:
                waiting.pop(turn, None)
        return turn


PROCESS_RANDOM = ProcessRandom()


@dataclass(frozen=True)
class Begun:
    """An environment at the beginning of an episode."""

    env: Any
    observation: Any
    info: dict[str, Any]


def begin_alike(
    make: Callable[[], Any],
    size: int,
    seed: int,
    how: Alike = "auto",
    allow_unequal: bool = False,
    like: Begun | None = None,
) -> list[Begun]:
    """Returns `size` environments that begin alike. Blocks while they are made and reset; any thread.

    Args:
        make: returns an environment that may be reset.
        seed: of `reset`.
        how: "spawn": the first is reset, the others are `spawn(same_state=True)` of it; "reset": each is
            reset with the seed; "auto": spawned if the environment can.
        allow_unequal: take environments whose first observations differ.
        like: one that began before, with the same seed; None: these are the first of the group.

    Raises:
        GroupNotAlike: the first observations differ.
        EnvFailed: `reset` returned something else.
        Exception: what the environment raises; those begun so far are closed.
    """
    begun: list[Begun] = []
    try:
        begun.append(_reset(make(), seed))
        while True:
            first, other = (like or begun[0]).observation, begun[-1].observation
            if first != other and not allow_unequal:
                raise GroupNotAlike(
                    f"seed {seed} begins with {first!r:.300}, and with {other!r:.300}",
                    hint="the environment must begin alike for the same seed, or have spawn(same_state=True)",
                )
            if len(begun) == size:
                return begun
            begun.append(_another(make, begun[0], seed, how))
    except BaseException:
        for each in begun:
            close(each.env)
        raise


def contained(name: str, call: Callable[[], T]) -> T:
    """Returns what a call of an environment gives; makes an EnvFailed of what an event loop would not
    survive: SystemExit, StopIteration and the like.
    """
    try:
        return call()
    except BaseException as error:
        if isinstance(error, Exception) and not isinstance(error, StopIteration):
            raise
        raise EnvFailed(f"{name} of the environment ended with {error!r}", hint=_HINT) from error


@contextmanager
def turn_to_draw(env: Any, seeds: bool = False) -> Iterator[None]:
    """Within the block the environment may draw from the process's random numbers, or seed them."""
    if not getattr(type(env), "uses_process_random", True):
        turn: Any = nullcontext()
    else:
        turn = PROCESS_RANDOM.alone() if seeds else PROCESS_RANDOM.shared()
    with turn:
        yield


def close(env: Any) -> None:
    """Closes an environment that can be closed; what it raises then is lost."""
    with suppress(Exception):
        getattr(env, "close", lambda: None)()


def _reset(env: Any, seed: int) -> Begun:
    try:
        with turn_to_draw(env, seeds=True):
            said = env.reset(seed=seed)
        if not isinstance(said, (tuple, list)) or len(said) != 2:
            raise EnvFailed(f"reset returned {said!r:.120}, not an observation and a dict", hint=_HINT)
        return Begun(env, said[0], said[1] or {})
    except BaseException:
        close(env)
        raise


def _another(make: Callable[[], Any], first: Begun, seed: int, how: Alike) -> Begun:
    if how != "reset":
        try:
            with turn_to_draw(first.env, seeds=True):
                return Begun(first.env.spawn(same_state=True), first.observation, dict(first.info))
        except NotImplementedError:
            if how == "spawn":
                raise
    return _reset(make(), seed)


class GemGame:
    """Plays one kind of gem environment: `rollout.run(game.tasks(), game.play)`.

    The environments of a group begin in the same state. The observation's text becomes a user message, the
    answer is the action. The reward of each step is a step reward that ends with its answer; the score is the
    sum of the rewards. Environments run in threads, and are used again after an episode.

    For one event loop; an async context manager, which closes the environments.

    Args:
        env: gem's name of the environment, or a function that makes one, called from any thread.
        env_args: of `gem.make`.
        group_size: the rollout's.
        seed: of the first group; each group's is one more.
        alike: how a group begins alike: see `begin_alike`.
        allow_unequal: play groups whose first observations differ.
        suffix: append `info["suffix"]`, where an environment has one, to its observations.
        max_turns: end an episode after so many answers; None: when the environment does.
        threads: environments that run at once.

    Raises:
        ImportError: gem-llm is missing.
        BadArgument: gem has no such environment.
    """

    def __init__(
        self,
        env: str | Callable[[], Any],
        *,
        env_args: Mapping[str, Any] | None = None,
        group_size: int = 8,
        seed: int = 0,
        alike: Alike = "auto",
        allow_unequal: bool = False,
        suffix: bool = False,
        max_turns: int | None = None,
        threads: int = 32,
    ) -> None:
        self.name = env if isinstance(env, str) else getattr(env, "__name__", type(env).__name__)
        self._make = _maker(env, dict(env_args or {})) if isinstance(env, str) else env
        self.group_size, self._seed = group_size, seed
        self._alike, self._allow_unequal = alike, allow_unequal
        self._suffix, self._max_turns = suffix, max_turns
        self._threads = CallThreads(threads, "shmbridge-gem")
        self._idle: list[Any] = []
        self._idle_lock = threading.Lock()
        self._closed = False

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Closes the environments that are idle now; others when their calls return. Blocks for the first."""
        with self._idle_lock:
            idle, self._idle, self._closed = self._idle, [], True
        for env in idle:
            close(env)
        self._threads.cancel_waiting()

    def try_one(self) -> None:
        """Makes one environment, so that a mistake shows before the rollout begins. Blocks."""
        self._leave(self._make(), usable=True)

    def tasks(self) -> Iterator[Task[GroupStart]]:
        """Yields a task for each seed, without end. Nothing is begun yet."""
        for seed in itertools.count(self._seed):
            # The prompt is only known once an environment is reset: `play` replaces this one.
            yield Task([{"role": "user", "content": ""}], GroupStart(self, seed), f"{self.name}:{seed}")

    async def play(self, episode: Episode, start: GroupStart) -> None:
        """Plays one episode. Never blocks the event loop.

        `finish_reason` is "length" only if an answer was cut. The row's extra says `seed`, whether the
        environment `terminated` or `truncated` it, and else why it was ended: `context_full`, `max_turns`.

        Raises:
            GroupNotAlike: the group would begin differently.
            EnvFailed: the environment returned something else than environments do, or would have ended the
                process.
            Exception: what the environment raises.
        """
        begun = await start.of(episode.repetition_id)
        usable = False
        calls: list[Future[Any]] = []
        try:
            episode.begin(_messages(begun.observation, begun.info, self._suffix))
            episode.extra = {"seed": start.seed, "terminated": False, "truncated": False}
            await self._turns(episode, begun.env, calls)
            episode.score = math.fsum(episode.step_rewards)
            usable = True
        finally:
            if calls and not calls[-1].done():  # cancelled in the middle of a step
                self.stop_waiting(calls[-1])
                calls[-1].add_done_callback(lambda _: close(begun.env))
            else:
                self._leave(begun.env, usable)

    def begin(self, seed: int, like: Begun | None = None) -> Future[list[Begun]]:
        """Returns the environments of a group, begun in a thread; with `like`, one more that begins alike."""
        return self._threads.submit(self._begin, seed, like)

    def give_up(self, begun: Begun) -> None:
        """Takes back an environment that was begun in vain."""
        self._leave(begun.env, usable=False)

    def stop_waiting(self, call: Future[Any]) -> None:
        """Lets other calls have the thread, and the turn to draw at random, of one that takes too long."""
        if (thread := self._threads.give_up(call)) is not None:
            PROCESS_RANDOM.give_up(thread)

    async def _turns(self, episode: Episode, env: Any, calls: list[Future[Any]]) -> None:
        while True:
            try:
                text = await episode.sample()
            except ContextFull:
                if not episode.turn_ends:
                    raise
                episode.extra["context_full"] = True
                return
            calls.append(self._threads.submit(_step, env, _action(env, episode, text)))
            observation, reward, terminated, truncated, info = await asyncio.wrap_future(calls[-1])
            episode.step_reward(_reward(reward))
            if terminated or truncated:
                episode.extra.update(terminated=bool(terminated), truncated=bool(truncated))
                return
            if len(episode.turn_ends) == self._max_turns:
                episode.extra["max_turns"] = True
                return
            episode.observe(_messages(observation, info, self._suffix))

    def _begin(self, seed: int, like: Begun | None) -> list[Begun]:
        size = self.group_size if like is None else 1
        return contained(
            "reset", lambda: begin_alike(self._take, size, seed, self._alike, self._allow_unequal, like)
        )

    def _take(self) -> Any:
        with self._idle_lock:
            if self._idle:
                return self._idle.pop()
        return self._make()

    def _leave(self, env: Any, usable: bool) -> None:
        """At most a group's number of environments stay; one that failed does not."""
        with self._idle_lock:
            kept = usable and not self._closed and len(self._idle) < self.group_size
            if kept:
                self._idle.append(env)
        if not kept:
            self._threads.submit(close, env)  # it may block


class GroupStart:
    """The environments of one group, begun together when the first episode wants one."""

    def __init__(self, game: GemGame, seed: int) -> None:
        self._game, self.seed = game, seed
        self._begun: Future[list[Begun]] | None = None

    async def of(self, repetition: int) -> Begun:
        """Returns the environment of one episode; it is this episode's from now on."""
        if self._begun is None:
            self._begun = self._game.begin(self.seed)
        begun = self._begun
        if repetition >= self._game.group_size:  # played in place of one that was lost
            first = (await asyncio.wrap_future(_unbroken(begun)))[0]
            begun, repetition = self._game.begin(self.seed, like=first), 0
        try:
            return (await asyncio.wrap_future(_unbroken(begun)))[repetition]
        except asyncio.CancelledError:
            self._game.stop_waiting(begun)
            begun.add_done_callback(lambda done: self._give_up(done, repetition))
            raise

    def _give_up(self, done: Future[list[Begun]], repetition: int) -> None:
        if not done.cancelled() and done.exception() is None and repetition < len(done.result()):
            self._game.give_up(done.result()[repetition])


def _unbroken(future: Future[list[Begun]]) -> Future[list[Begun]]:
    """The same result for one who waits, whose cancellation is not the others'."""
    mine: Future[list[Begun]] = Future()

    def hand_over(done: Future[list[Begun]]) -> None:
        if not mine.set_running_or_notify_cancel():
            return
        if done.cancelled():
            mine.set_exception(asyncio.CancelledError())
        elif (error := done.exception()) is not None:
            mine.set_exception(error)
        else:
            mine.set_result(done.result())

    future.add_done_callback(hand_over)
    return mine


def _step(env: Any, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
    def step() -> Any:
        with turn_to_draw(env):
            return env.step(action)

    said = contained("step", step)
    if not isinstance(said, (tuple, list)) or len(said) != 5:
        raise EnvFailed(
            f"step returned {said!r:.120}, not observation, reward, terminated, truncated, info",
            hint="its row is left out; fix the environment",
        )
    observation, reward, terminated, truncated, info = said
    return observation, reward, terminated, truncated, info or {}


def _action(env: Any, episode: Episode, text: str) -> Any:
    """Text, or for an environment that takes them the tokens, too."""
    if not getattr(type(env), "takes_actions", False):
        return text
    reason: FinishReason = "length" if episode.finish_reason == "length" else "stop"
    if not episode.exact:
        return Action(text, finish_reason=reason)
    begin, end = episode.turns()[-1]
    logprobs = None if episode.logprobs is None else episode.logprobs[begin:end]
    return Action(text, episode.tokens[begin:end], logprobs, reason)


def _messages(observation: Any, info: Mapping[str, Any], suffix: bool) -> list[Message]:
    """The user message of an observation, or the messages that an Atropos environment asked with."""
    if new := info.get("new_messages"):
        return list(new)
    if not isinstance(observation, str):
        raise BadArgument(
            f"the observation is a {type(observation).__name__}, not text", hint="wrap the environment"
        )
    end = str(info.get("suffix") or "") if suffix else ""
    joint = "\n" if end and observation and not observation.endswith("\n") else ""
    return [{"role": "user", "content": observation + joint + end}]


def _reward(reward: Any) -> float:
    try:
        value = float(reward)
    except (TypeError, ValueError):
        value = math.nan
    if not math.isfinite(value):
        raise BadArgument(f"the environment's reward is {reward!r:.80}", hint="it must be a finite number")
    return value


def _maker(name: str, arguments: dict[str, Any]) -> Callable[[], Any]:
    import gem
    from gem.envs.registration import ENV_REGISTRY

    if name not in ENV_REGISTRY:
        raise BadArgument(f"gem has no environment {name!r}", hint="gem.print_envs() lists them")
    return lambda: gem.make(name, **arguments)
