"""Runs many episodes at once and puts their groups into a lane: `Rollout`."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from types import TracebackType
from typing import Any, Generic, Literal, Self, TypeVar

from shmbridge import Producer, ShmBridgeError
from shmbridge.errors import BridgeDraining
from shmbridge.producers.rollout.chat_format import ChatFormat
from shmbridge.producers.rollout.chat_server import ChatServer
from shmbridge.producers.rollout.episode import Episode, known_versions
from shmbridge.producers.rollout.group import group_of
from shmbridge.producers.rollout.http_server import HttpServer
from shmbridge.producers.rollout.sampling import Message, SampleServer, Sampling

log = logging.getLogger(__name__)

T = TypeVar("T")
Group = Mapping[str, Any]
Stage = Callable[[Group], Awaitable[Group]]


class TooManyFailures(ShmBridgeError):
    """Too many groups in a row failed; the last failure is the cause."""

    code = "SB511"


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


Play = Callable[[Episode, T], Awaitable[None]]


class Rollout:
    """Plays the tasks of one environment against one inference server and puts the groups into one lane.

    For one event loop; an async context manager, which closes the lane and the connections. Only the
    constructor blocks, to reserve the lane's memory.

    Args:
        bridge: name of the bridge.
        server: address of the inference server, or an object with `sample`.
        chat: the model's tokenizer: a folder, a name, a tokenizer, or a `ChatFormat`.
        env_name: the environment's name in metrics.
        sampling: how answers are sampled.
        group_size: episodes of one task.
        concurrency: groups in the making at once.
        context: most tokens of a row.
        api: what the server speaks; "auto" asks it.
        allow_retokenise: use a chat server that gives no token ids: rows are marked `retokenised`, and have
            no log-probabilities.
        stop_after_failures: so many groups that failed in a row end the run with TooManyFailures; 0: never.
        tickets: begin a group only once the consumer has room for it: see Consumer(max_off_policy_steps=).
        env_metrics: makes JSON of a group's episodes, which goes with it: see `group_of`.
        stages: change a group before it is put, one after the other, such as those of `producers.rewards`.
        lane_bytes, on_full: of `shmbridge.Producer`.
    """

    def __init__(
        self,
        bridge: str,
        server: str | SampleServer,
        chat: Any,
        *,
        env_name: str = "",
        sampling: Sampling | None = None,
        group_size: int = 8,
        concurrency: int = 8,
        context: int | None = None,
        api: str = "auto",
        model: str | None = None,
        allow_retokenise: bool = False,
        stop_after_failures: int = 8,
        tickets: bool = False,
        env_metrics: Callable[[Sequence[Episode]], dict[str, Any]] | None = None,
        stages: Sequence[Stage] = (),
        lane_bytes: int | str = "64M",
        on_full: Literal["block", "raise", "drop"] = "block",
    ) -> None:
        if group_size < 1 or concurrency < 1:
            raise ValueError(f"group_size={group_size} and concurrency={concurrency} must be at least 1")
        self.chat = chat if isinstance(chat, ChatFormat) else ChatFormat(chat)
        if not isinstance(server, str):
            self.server = server
        elif allow_retokenise:
            self.server = ChatServer(server, self.chat, model=model)
        else:
            self.server = HttpServer(server, api=api, model=model)
        self.sampling = sampling or Sampling()
        self._group_size, self._concurrency, self._context = group_size, concurrency, context
        self._stop_after_failures, self._tickets = stop_after_failures, tickets
        self._env_metrics, self._stages = env_metrics, tuple(stages)
        self.producer = Producer(bridge, env_name=env_name, lane_bytes=lane_bytes, on_full=on_full)
        self.groups_put = 0  # and committed
        self.failed: Counter[str] = Counter()  # groups that were not put, by kind of error
        self._in_a_row = 0

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Leaves the bridge, with what is committed in the lane, and closes the connections."""
        self.producer.close()
        if isinstance(self.server, (HttpServer, ChatServer)):
            await self.server.close()

    async def run(
        self, tasks: Iterable[Task[T]] | AsyncIterable[Task[T]], play: Play[T], max_groups: int | None = None
    ) -> int:
        """Plays each task `group_size` times and puts its group; returns how many groups were put.

        Ends with the tasks, or when the bridge drains. An error in `play` costs its group, is counted in
        `failed` and logged; it never becomes a row.

        Args:
            tasks: may be endless: the next is taken when a group is finished.
            play: samples, observes and rewards one episode, and sets `episode.score`.
            max_groups: tasks to play at most.

        Raises:
            TooManyFailures: see `stop_after_failures`.
        """
        before, more = self.groups_put, True
        making: set[asyncio.Task[None]] = set()
        source = _numbered(tasks, max_groups)
        try:
            while more or making:
                while more and len(making) < self._concurrency:
                    if (next_one := await anext(source, None)) is None:
                        more = False
                    else:
                        making.add(asyncio.create_task(self._make(*next_one, play)))
                if making:
                    done, making = await asyncio.wait(making, return_when=asyncio.FIRST_COMPLETED)
                    for each in done:
                        each.result()
        except BridgeDraining:
            log.info("the bridge drains: %d groups were put", self.groups_put - before)
        finally:
            for each in making:
                each.cancel()
            for each in making:
                with suppress(asyncio.CancelledError, ShmBridgeError):
                    await each
        return self.groups_put - before

    async def group(self, task: Task[T], play: Play[T], number: int = 0) -> list[Episode]:
        """Returns the finished episodes of one task, all played at once; nothing is put.

        Raises what `play` raises; the other episodes of the task are cancelled then.
        """
        instance = str(number) if task.instance_id is None else task.instance_id
        episodes = [
            Episode(
                self.server,
                self.chat,
                task.messages,
                self.sampling,
                context=self._context,
                instance_id=instance,
                repetition_id=repetition,
            )
            for repetition in range(self._group_size)
        ]
        try:
            async with asyncio.TaskGroup() as together:
                for episode in episodes:
                    together.create_task(_played(play, episode, task.data))
        except ExceptionGroup as failed:
            raise failed.exceptions[0] from None
        return episodes

    async def _make(self, number: int, task: Task[T], play: Play[T]) -> None:
        """One group, from its ticket to its lane."""
        try:
            if self._tickets:
                with await self.producer.begin_group_async():
                    await self._make_now(task, number, play)
            else:
                await self._make_now(task, number, play)
        except BridgeDraining:
            raise
        except Exception as error:
            self._count(error)
        except asyncio.CancelledError as error:
            if _is_cancelled():
                raise
            self._count(RuntimeError(f"a stage ended with {error!r}"))

    async def _make_now(self, task: Task[T], number: int, play: Play[T]) -> None:
        began = self.producer.policy_version
        episodes = await self.group(task, play, number)
        versions = known_versions(episodes, began, self.producer.policy_version)
        group = group_of(episodes, self._env_metrics(episodes) if self._env_metrics else None)
        sequence = await self._put(group, policy_version=versions)
        self._in_a_row = 0
        self.groups_put += sequence is not None

    async def _put(self, group: Group, policy_version: tuple[int, int]) -> int | None:
        for stage in self._stages:
            group = await stage(group)
        return await self.producer.put_async(group, policy_version=policy_version)

    def _count(self, error: Exception) -> None:
        kind = type(error).__name__
        self.failed[kind] += 1
        self._in_a_row += 1
        if self.failed[kind] == 1:
            trace = None if isinstance(error, ShmBridgeError) else error
            log.error("a group failed, further ones like it are only counted: %s", error, exc_info=trace)
        if self._in_a_row == self._stop_after_failures:
            raise TooManyFailures(
                f"{self._in_a_row} groups in a row failed, the last with {error!r}",
                hint="mend the environment or the server; stop_after_failures=0 goes on",
            ) from error


async def _played(play: Play[T], episode: Episode, data: T) -> None:
    """Plays an episode. An error that asyncio would take for a word to the task is one of the episode."""
    try:
        await play(episode, data)
    except (Exception, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # of a library that cancelled something of its own, or timed it out
        if isinstance(error, asyncio.CancelledError) and _is_cancelled():
            raise
        raise RuntimeError(f"the episode ended with {error!r}") from error


def _is_cancelled() -> bool:
    task = asyncio.current_task()
    return task is None or task.cancelling() > 0


async def _numbered(tasks: Iterable[T] | AsyncIterable[T], most: int | None) -> AsyncIterator[tuple[int, T]]:
    """The first `most` of the tasks, with their numbers."""
    number = 0
    if isinstance(tasks, AsyncIterable):
        async for task in tasks:
            if number == most:
                return
            yield number, task
            number += 1
    else:
        for task in islice(tasks, most):
            yield number, task
            number += 1
