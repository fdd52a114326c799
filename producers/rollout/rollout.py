"""Runs many episodes at once and puts their groups into a lane: `Rollout`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Unpack

from shmbridge.producers.rollout.chat_format import ChatFormat
from shmbridge.producers.rollout.chat_server import ChatServer
from shmbridge.producers.rollout.episode import Episode
from shmbridge.producers.rollout.group import group_of
from shmbridge.producers.rollout.group_run import Group, GroupRun, RunOptions, Task
from shmbridge.producers.rollout.http_server import HttpServer
from shmbridge.producers.rollout.sampling import SampleServer, Sampling


class Rollout(GroupRun[Episode]):
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
        sampling: Sampling | None = None,
        context: int | None = None,
        api: str = "auto",
        model: str | None = None,
        allow_retokenise: bool = False,
        env_metrics: Callable[[Sequence[Episode]], dict[str, Any]] | None = None,
        **options: Unpack[RunOptions],
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
        super().__init__(bridge, **options)

    async def close(self) -> None:
        """Leaves the bridge, with what is committed in the lane, and closes the connections."""
        await super().close()
        if isinstance(self.server, (HttpServer, ChatServer)):
            await self.server.close()

    def _begin(self, task: Task[Any], instance_id: str, repetition_id: int) -> Episode:
        return Episode(
            self.server,
            self.chat,
            task.messages,
            self.sampling,
            context=self._context,
            instance_id=instance_id,
            repetition_id=repetition_id,
        )

    def _columns(self, episodes: Sequence[Episode]) -> Group:
        return group_of(episodes, self._env_metrics(episodes) if self._env_metrics else None)
