"""Samples the episodes of plain Python environments from one inference server: `Rollout`."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, TypeVar, Unpack

from shmbridge.producers.rollout.chat_format import ChatFormat
from shmbridge.producers.rollout.chat_server import ChatServer
from shmbridge.producers.rollout.episode import Episode
from shmbridge.producers.rollout.group import group_of
from shmbridge.producers.rollout.http_server import HttpServer
from shmbridge.producers.rollout.runner import Runner, RunOptions, Task
from shmbridge.producers.rollout.sampling import SampleServer, Sampling

T = TypeVar("T")
Play = Callable[[Episode, T], Awaitable[None]]


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
