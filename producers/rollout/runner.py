"""Plays many groups at once and puts them into a lane, whatever plays their episodes: `Runner`.

`Rollout` samples them itself; `shmbridge.producers.verifiers` has verifiers play them.
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import logging
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Generic, Literal, Self, TypedDict, TypeVar, Unpack

from shmbridge import Producer, ShmBridgeError
from shmbridge.errors import BadArgument, BridgeDraining
from shmbridge.producers.rollout.episode import ChatFormat, Episode, group_of, known_versions
from shmbridge.producers.rollout.sampling import Message, SampleServer, Sampling
from shmbridge.producers.rollout.servers import ChatServer, HttpServer
from shmbridge.producers.rollout.survivors import (
    Late,
    Limits,
    Losses,
    Played,
    TooOld,
    is_cancelled,
    survivors,
)
from shmbridge.segments import committed_here, forget_producer

log = logging.getLogger(__name__)

_FORMAT = 1

T = TypeVar("T")
E = TypeVar("E", bound=Played)
Group = Mapping[str, Any]
Stage = Callable[[Group], Awaitable[Group]]
_LOOK_S = 0.25  # between two looks at the policy version and at the time
DEFAULT_LIMITS = Limits()
Play = Callable[[Episode, T], Awaitable[None]]


class Position:
    """The numbers of the tasks that are over. For one thread; make it before the producer, which removes
    lanes of earlier ones that are delivered.

    Args:
        file: written whole after each change, and locked until `close`; made if it is not there. None:
            nothing is kept.

    Raises:
        BadArgument: the file holds something else or cannot be written, or another process has it.
    """

    def __init__(self, file: str | Path | None) -> None:
        self._file = None if file is None else Path(file)
        self._lock: IO[str] | None = None
        self._next = 0  # all below are over
        self._beyond: set[int] = set()  # over, too
        self._note: tuple[int, int] | None = None  # number, sequence: about to be committed
        self._lane: tuple[str, str] | None = None  # bridge and id of the producer that commits
        if self._file is None:
            return
        try:
            self._lock = _locked(self._file)
            if self._file.exists():
                self._load(self._file)
            self._write()
        except OSError as error:
            raise BadArgument(f"{file} cannot be written: {error}", hint="give another file") from None

    def _load(self, file: Path) -> None:
        try:
            found = json.loads(file.read_bytes())
            if found["format"] != _FORMAT:
                raise ValueError
            self._next, self._beyond = int(found["next"]), set(map(int, found["beyond"]))
            if found["committing"] is not None:
                number, sequence = map(int, found["committing"])
                self._note = number, sequence
            if found["producer"] is not None:
                bridge, producer_id = map(str, found["producer"])
                self._lane = bridge, producer_id
        except (ValueError, KeyError, TypeError):
            raise BadArgument(
                f"{file} does not hold the position of a rollout in format {_FORMAT}",
                hint="give another file, or remove this one to begin with the first task",
            ) from None
        if self._lane is None:
            return
        records = committed_here(*self._lane)
        if records is None and self._note is not None and self._note[1] > 0:
            log.warning(
                "task %d is played again, and may be there already: its lane was removed", self._note[0]
            )
        self.settle(records or 0)

    def __contains__(self, number: int) -> bool:
        return number < self._next or number in self._beyond

    @property
    def tasks_over(self) -> int:
        """Tasks that are over."""
        return self._next + len(self._beyond)

    def begin(self, producer: Producer) -> None:
        """Notes which producer commits from now on. Blocks for the file."""
        if self._file is not None:
            producer.leave_receipt()
            self._lane = producer.bridge, producer.producer_id
            self._write()

    def committing(self, number: int, sequence: int) -> None:
        """Notes that the group of a task is about to be committed as a record. Blocks for the file."""
        self._note = number, sequence
        self._write()

    def settle(self, records: int) -> None:
        """Resolves a note that is left, by the records that its lane has in all, once the producer has ended.

        Blocks for the file.
        """
        if self._note is not None:
            number, sequence = self._note
            self._note = None
            if sequence < records:
                self.over(number)
        if self._lane is not None:
            forget_producer(*self._lane)

    def over(self, number: int) -> None:
        """Notes that a task is over. Blocks for the file."""
        if self._file is None:
            return
        if self._note is not None and self._note[0] == number:
            self._note = None
        self._beyond.add(number)
        while self._next in self._beyond:
            self._beyond.remove(self._next)
            self._next += 1
        self._write()

    def close(self) -> None:
        """Lets another process have the file."""
        if self._lock is not None:
            self._lock.close()

    def _write(self) -> None:
        if self._file is None:
            return
        new = self._file.with_name(self._file.name + ".new")
        words = {
            "next": self._next,
            "beyond": sorted(self._beyond),
            "committing": self._note,
            "producer": self._lane,
        }
        new.write_text(json.dumps({"format": _FORMAT, **words}))
        new.replace(self._file)


def _locked(file: Path) -> IO[str]:
    """The lock file beside the file, locked until it is closed or the process ends."""
    lock = file.with_name(file.name + ".lock").open("w")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.close()
        raise BadArgument(
            f"another process keeps its position in {file}", hint="give each environment a file of its own"
        ) from None
    return lock


class NothingCame(ShmBridgeError, TimeoutError):
    """No group was finished for as long as the run was to wait."""

    code = "SB520"


@dataclass(frozen=True)
class Task(Generic[T]):
    """One prompt to be answered a group's number of times.

    Attributes:
        messages: the beginning of each episode.
        data: whatever the episode's code needs, such as the right answer.
        instance_id: name of the prompt; None: its number in the run.
    """

    messages: Sequence[Message]
    data: T
    instance_id: str | None = None


class RunOptions(TypedDict, total=False):
    """What every `Runner` may be told; see there."""

    env_name: str
    group_size: int
    concurrency: int
    limits: Limits
    stop_after_failures: int
    stop_after_idle_s: float | None
    max_staleness: int | None
    resume: str | Path | None
    tickets: bool
    stages: Sequence[Stage]
    lane_bytes: int | str
    on_full: Literal["block", "raise", "drop"]


class Runner(ABC, Generic[E]):
    """Plays the tasks of one environment and puts their groups into one lane.

    For one event loop; an async context manager, which closes the lane. Only the constructor blocks, to
    reserve the lane's memory. A subclass says how an episode begins, and which columns episodes have.

    Args:
        bridge: name of the bridge.
        env_name: the environment's name in metrics.
        group_size: episodes of one task.
        concurrency: groups in the making at once.
        limits: deadlines, and what happens to a group that lost some of its episodes.
        stop_after_failures: so many failures of whole groups in a row, those that share a moment counted
            once, end the run with TooManyFailures; 0: never.
        stop_after_idle_s: seconds without a finished group, waits for the consumer left out, after which the
            run ends with NothingCame; None: never.
        max_staleness: a group in the making that is more versions behind than this is cancelled when a
            version is published, and its ticket comes back; None: none is.
        resume: file that keeps which tasks are over, for one `run`: a restarted run over the same tasks, in
            the same order, goes on behind them. None: no file.
        tickets: begin a group only once the consumer has room for it: see Consumer(max_off_policy_steps=).
        stages: change a group before it is put, one after the other, such as those of `producers.rewards`.
        lane_bytes, on_full, schema: of `shmbridge.Producer`.
    """

    def __init__(
        self,
        bridge: str,
        *,
        env_name: str = "",
        group_size: int = 8,
        concurrency: int = 8,
        limits: Limits = DEFAULT_LIMITS,
        stop_after_failures: int = 8,
        stop_after_idle_s: float | None = None,
        max_staleness: int | None = None,
        resume: str | Path | None = None,
        tickets: bool = False,
        stages: Sequence[Stage] = (),
        lane_bytes: int | str = "64M",
        on_full: Literal["block", "raise", "drop"] = "block",
        schema: Any = None,
    ) -> None:
        if group_size < 1 or concurrency < 1:
            raise ValueError(f"group_size={group_size} and concurrency={concurrency} must be at least 1")
        self._group_size, self._concurrency = group_size, concurrency
        self._limits, self._tickets, self._max_staleness = limits, tickets, max_staleness
        self._idle_s, self._last_group = stop_after_idle_s, 0.0
        self._stages = tuple(stages)
        self._playing: dict[asyncio.Future[Exception], tuple[int, list[E]]] = {}  # with its version
        self._newest = -1  # version that was looked at
        self._putting = asyncio.Lock()
        self._position = Position(resume)
        try:
            self.producer = Producer(
                bridge, env_name=env_name, lane_bytes=lane_bytes, on_full=on_full, schema=schema
            )
        except BaseException:
            self._position.close()
            raise
        self._position.begin(self.producer)
        self.losses = Losses(stop_after_failures, self.producer.count_lost)
        self.groups_put = self.groups_evaluated = 0  # and committed
        log.info("%s: %s", env_name or bridge, limits)
        if self._position.tasks_over:
            log.info("goes on behind %d tasks that are over: %s", self._position.tasks_over, resume)

    @abstractmethod
    def begin(self, task: Task[Any], instance_id: str, repetition_id: int) -> E:
        """Returns one episode of a task, before its first answer."""

    @abstractmethod
    def columns(self, episodes: Sequence[E]) -> Group:
        """Returns the columns of a group, as `Producer.put` takes them."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Leaves the bridge, with what is committed in the lane."""
        self.producer.close()
        self._position.settle(int(self.producer.stats()["records_total"]))
        self._position.close()

    async def run(
        self,
        tasks: Iterable[Task[T]] | AsyncIterable[Task[T]],
        play: Callable[[E, T], Awaitable[None]],
        max_groups: int | None = None,
    ) -> int:
        """Plays each task `group_size` times and puts its group; returns how many groups were put.

        Ends with the tasks, or when the bridge drains. An episode that fails costs its row, is counted in
        `losses` and logged; the others are put as a smaller group.

        Args:
            tasks: may be endless: the next is taken when a group is finished.
            play: samples, observes and rewards one episode, and sets `episode.score`.
            max_groups: tasks to play at most, those before a restart included.

        Raises:
            TooManyFailures: see `stop_after_failures`. NothingCame: see `stop_after_idle_s`.
        """
        # In a task of its own: Ctrl-C cancels the program's task from a signal handler, between any two lines
        # of asyncio, also between a look at a future and its result (InvalidStateError).
        running = asyncio.create_task(self._run(tasks, play, max_groups))
        try:
            return await asyncio.shield(running)
        except asyncio.CancelledError:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            raise

    async def _run(
        self,
        tasks: Iterable[Task[T]] | AsyncIterable[Task[T]],
        play: Callable[[E, T], Awaitable[None]],
        max_groups: int | None,
    ) -> int:
        before, more = self.groups_put, True
        self._last_group = asyncio.get_running_loop().time()
        making: set[asyncio.Task[None]] = set()
        upcoming: asyncio.Task[tuple[int, Task[T]] | None] | None = None
        source = _numbered(tasks, max_groups, self._position)
        try:
            while more or making:
                if more and upcoming is None and len(making) < self._concurrency:
                    upcoming = asyncio.create_task(_next(source))
                waits: set[asyncio.Task[Any]] = {*making, *(() if upcoming is None else (upcoming,))}
                await asyncio.wait(waits, timeout=_LOOK_S, return_when=asyncio.FIRST_COMPLETED)
                if upcoming is not None and upcoming.done():
                    numbered, upcoming = upcoming.result(), None
                    if numbered is None:
                        more = False
                    else:
                        making.add(asyncio.create_task(self._make(*numbered, play)))
                for each in [each for each in making if each.done()]:
                    making.remove(each)
                    each.result()
                self._look()
        except BridgeDraining:
            log.info("the bridge drains: %d groups were put", self.groups_put - before)
        finally:
            left: set[asyncio.Task[Any]] = {*making, *(() if upcoming is None else (upcoming,))}
            for task in left:
                task.cancel()
            await asyncio.gather(*left, return_exceptions=True)
        return self.groups_put - before

    def _look(self) -> None:
        """Ends groups that are too old, after a new version. Raises NothingCame."""
        version = self.producer.policy_version
        if self._max_staleness is not None and version > self._newest:
            self._newest = version
            for outdated, (began, begun) in self._playing.items():
                behind = version - _oldest(begun, began)
                if behind > self._max_staleness and not outdated.done():
                    why = f"a group is {behind} versions behind, more than {self._max_staleness}"
                    outdated.set_result(TooOld(why))
        now = asyncio.get_running_loop().time()
        if self._putting.locked() or (self._tickets and not self._playing):  # the consumer's turn
            self._last_group = now
        elif self._idle_s is not None and now - self._last_group > self._idle_s:
            raise NothingCame(
                f"no group was finished for {now - self._last_group:.0f} s; {len(self._playing)} are played",
                hint="see what was lost in the log, and the inference server's log",
            )

    @property
    def failed(self) -> Counter[str]:
        """Groups that were not put, by the kind of their error."""
        return self.losses.groups

    def stats(self) -> dict[str, float]:
        """Returns counters, flat: groups put, episodes and groups lost by reason. Never blocks."""
        return {"groups_put_total": float(self.groups_put), **self.losses.stats()}

    def summary(self) -> str:
        """Returns a line on what was put and what was lost, and why."""
        return f"{self.groups_put} groups were put; lost: {self.losses}"

    async def group(
        self, task: Task[T], play: Callable[[E, T], Awaitable[None]], number: int | None = 0
    ) -> list[E]:
        """Returns the episodes of one task that came to a good end, all played at once; nothing is put.

        Args:
            number: its place among the tasks; None: an evaluation, which is never too old.

        Raises EpisodesLost: see `limits`.
        """
        instance = str(number) if task.instance_id is None else task.instance_id
        begun: list[E] = []

        def begin(repetition: int) -> E:
            begun.append(self.begin(task, instance, repetition))
            return begun[-1]

        outdated: asyncio.Future[Exception] = asyncio.get_running_loop().create_future()
        if number is not None:
            self._playing[outdated] = self.producer.policy_version, begun
        try:
            return await survivors(
                begin,
                lambda episode: play(episode, task.data),
                self._group_size,
                self._limits,
                self.losses,
                outdated,
            )
        finally:
            self._playing.pop(outdated, None)
            self.losses.asked_again += sum(episode.asked_again for episode in begun)

    async def evaluate(self, tasks: Iterable[Task[T]], play: Callable[[E, T], Awaitable[None]]) -> int:
        """Plays each task once, a group at a time beside what else is played, and puts its group with
        `split="eval"`, which no learner trains; returns how many groups were put.

        It takes no tickets, has no position, and is never too old.

        Raises TooManyFailures, as `run` does.
        """
        before = self.groups_evaluated
        for number, task in enumerate(tasks):
            began = asyncio.get_running_loop().time()
            try:
                await self._make_now(None, replace(task, instance_id=task.instance_id or str(number)), play)
            except BridgeDraining:
                break
            except Exception as error:
                self.losses.group(error, began)
        return self.groups_evaluated - before

    async def _make(self, number: int, task: Task[T], play: Callable[[E, T], Awaitable[None]]) -> None:
        """One group, from its ticket to its lane."""
        began = asyncio.get_running_loop().time()
        try:
            with await self.producer.begin_group_async() if self._tickets else nullcontext():
                began = asyncio.get_running_loop().time()
                await self._make_now(number, task, play)
        except BridgeDraining:
            raise
        except Exception as error:
            self.losses.group(error, began)

    async def _make_now(
        self, number: int | None, task: Task[T], play: Callable[[E, T], Awaitable[None]]
    ) -> None:
        """One group, and its place among the tasks; None: an evaluation, which has none."""
        began, episodes = self.producer.policy_version, list[E]()
        try:
            episodes = await self.group(task, play, number)
            versions = known_versions(episodes, began, self.producer.policy_version)
            group = await self._staged(episodes)
            async with self._putting:
                if number is not None:
                    self._position.committing(number, int(self.producer.stats()["records_total"]))
                sequence = await self.producer.put_async(
                    group, policy_version=versions, split="eval" if number is None else "train"
                )
                if number is not None:
                    self._position.over(number)
        except BridgeDraining:
            raise
        except Exception as error:
            self.losses.episode(error, len(episodes))
            if number is not None:
                self._position.over(number)
            raise
        self._last_group = asyncio.get_running_loop().time()
        self.losses.put()
        if number is None:
            self.groups_evaluated += sequence is not None
        else:
            self.groups_put += sequence is not None

    async def _staged(self, episodes: Sequence[E]) -> Group:
        group, deadline = self.columns(episodes), asyncio.timeout(self._limits.group_s)
        try:
            async with deadline:
                for stage in self._stages:
                    group = await stage(group)
        except asyncio.CancelledError as error:
            if is_cancelled():
                raise
            raise RuntimeError(f"a stage ended with {error!r}") from error
        except TimeoutError:
            if not deadline.expired():  # the stage's own
                raise
            raise Late(f"the stages of a group did not end within {self._limits.group_s:g} s") from None
        return group


def _oldest(begun: Sequence[Played], began: int) -> int:
    """The oldest version that samples one of the episodes, as far as it is known; else that of the start."""
    first = (next(iter(each.sampled_versions()), -1) for each in begun)
    return min((began if version < 0 else version for version in first), default=began)


async def _next(source: AsyncIterator[T]) -> T | None:
    return await anext(source, None)


async def _numbered(
    tasks: Iterable[T] | AsyncIterable[T], most: int | None, over: Position
) -> AsyncIterator[tuple[int, T]]:
    """The first `most` of the tasks, with their numbers, without those that are over."""
    number = 0
    if isinstance(tasks, AsyncIterable):
        async for task in tasks:
            if number == most:
                return
            if number not in over:
                yield number, task
            number += 1
    else:
        for task in islice(tasks, most):
            if number not in over:
                yield number, task
            number += 1


class Rollout(Runner[Episode]):
    """Plays the tasks of one environment against one inference server and puts the groups into one lane.

    For one event loop; an async context manager, which closes the lane and the connections. Only the
    constructor blocks, to reserve the lane's memory.

    Args:
        bridge: name of the bridge.
        server: address of the inference server, or an object with `sample`.
        chat: the model's tokenizer: a folder, a name, a tokenizer, or a `ChatFormat`.
        sampling: how answers are sampled.
        context: most tokens of a row.
        api: what the server speaks; "auto" asks it.
        allow_retokenise: use a chat server that gives no token ids: rows are marked `retokenised`, and have
            no log-probabilities.
        env_metrics: makes JSON of a group's episodes, which goes with it: see `group_of`.
        how: env_name, group_size, concurrency, limits and all else that a `Runner` takes.
    """

    def __init__(
        self,
        bridge: str,
        server: str | SampleServer,
        chat: Any,
        *,
        sampling: Sampling | None = None,
        context: int | None = None,
        api: str = "auto",
        model: str | None = None,
        allow_retokenise: bool = False,
        env_metrics: Callable[[Sequence[Episode]], dict[str, Any]] | None = None,
        **how: Unpack[RunOptions],
    ) -> None:
        self.chat = chat if isinstance(chat, ChatFormat) else ChatFormat(chat)
        if not isinstance(server, str):
            self.server = server
        elif allow_retokenise:
            self.server = ChatServer(server, self.chat, model=model)
        else:
            self.server = HttpServer(server, api=api, model=model)
        self.sampling = sampling or Sampling()
        self._context, self._env_metrics = context, env_metrics
        super().__init__(bridge, **how)

    async def close(self) -> None:
        """Leaves the bridge, with what is committed in the lane, and closes the connections."""
        await super().close()
        if isinstance(self.server, (HttpServer, ChatServer)):
            await self.server.close()

    def begin(self, task: Task[Any], instance_id: str, repetition_id: int) -> Episode:
        """Returns an episode that begins with the task's messages. Never blocks."""
        return Episode(
            self.server,
            self.chat,
            task.messages,
            self.sampling,
            context=self._context,
            instance_id=instance_id,
            repetition_id=repetition_id,
        )

    def columns(self, episodes: Sequence[Episode]) -> Mapping[str, Any]:
        """Returns the columns of a group, a row for each episode. Never blocks."""
        return group_of(episodes, self._env_metrics(episodes) if self._env_metrics else None)
