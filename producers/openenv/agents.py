"""Runs agents of any kind behind OpenEnv's capture proxy: `AgentRollout`; and Harbor's: `harbor_play`.

    async with AgentRollout("run1", "http://127.0.0.1:9004", env_name="repairs") as rollout:
        await rollout.run(tasks, play)

`play(episode, data)` starts the agent with `episode.environ`, waits for its end and sets `episode.score`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, Self, TypeVar, Unpack

from openenv.core.harness.capture.contract import to_training_trace
from openenv.core.harness.capture.sessions import Session

from shmbridge import ShmBridgeError
from shmbridge.producers.openenv.capture import Capture
from shmbridge.producers.openenv.rows import (
    AgentEpisode,
    calls_of_harbor,
    calls_of_trace,
    group_of_agents,
    rows_of,
)
from shmbridge.producers.rollout import Runner, RunOptions, Task

T = TypeVar("T")


class SessionUnusable(ShmBridgeError, ValueError):
    """A session of an agent cannot be trained: OpenEnv's checks refuse it, or Harbor's rollout failed."""

    code = "SB526"


class AgentRollout(Runner[AgentEpisode]):
    """Plays tasks with agents against one inference server, through OpenEnv's capture proxy, and puts the
    groups into one lane.

    For one event loop; an async context manager, which serves the proxy meanwhile. An agent that blocks runs
    in a process, or in a thread (`asyncio.to_thread`).

    Args:
        bridge: name of the bridge.
        server: address of the inference server; or a `Capture` that is not started, for its options.
        temperature: of every answer; what an agent asks for instead is overridden, and the rest of its
            sampling too: rows are of the policy's own distribution.
        options: those of `Runner`: group_size, concurrency, limits, tickets, max_staleness, resume, ...

    Attributes:
        capture: the proxy.
        left_out: model calls of sessions that were put which OpenEnv takes for no work of the agent, by why:
            "discarded", attempts that led nowhere; "auxiliary", such as a title, asked without tools where
            others have tools. They are in `extra` of their episode's rows, too: `calls_left_out`.
    """

    def __init__(
        self, bridge: str, server: str | Capture, *, temperature: float = 1.0, **options: Unpack[RunOptions]
    ) -> None:
        self.capture = server if isinstance(server, Capture) else Capture(server)
        self.temperature = temperature
        self.left_out: Counter[str] = Counter()
        super().__init__(bridge, **options)

    async def __aenter__(self) -> Self:
        try:
            await self.capture.start()
        except BaseException:
            await self.close()
            raise
        return self

    async def close(self) -> None:
        """Leaves the bridge, with what is committed in the lane, and ends the proxy."""
        await super().close()
        await self.capture.close()

    async def group(
        self, task: Task[T], play: Callable[[AgentEpisode, T], Awaitable[None]], number: int | None = 0
    ) -> list[AgentEpisode]:
        """Returns the episodes of one task that came to a good end, as `Runner.group` does."""

        async def played(episode: AgentEpisode, data: T) -> None:
            try:
                await play(episode, data)
                if not episode.rows:
                    self._end(episode)
            finally:
                self.capture.registry.delete(episode.key)

        return await super().group(task, played, number)

    def begin(self, task: Task[Any], instance_id: str, repetition_id: int) -> AgentEpisode:
        """Returns an episode with a session of its own in the proxy. Never blocks."""
        sampling = {"temperature": self.temperature}
        session = self.capture.registry.create(capture_level="tokens", purpose="train", sampling=sampling)
        return AgentEpisode(
            self.capture.url,
            session.session_id,
            self.capture.model,
            task.messages,
            instance_id,
            repetition_id,
        )

    def stats(self) -> dict[str, float]:
        """Returns counters, flat: those of `Runner`, and calls that were left out, by why. Never blocks."""
        left_out = {f"calls_left_out_total{{{why}}}": float(n) for why, n in self.left_out.items()}
        return {**super().stats(), **left_out}

    def columns(self, episodes: Sequence[AgentEpisode]) -> dict[str, Any]:
        """Returns the columns of a group, the rows of each episode one after the other. Never blocks."""
        return group_of_agents(episodes)

    def _end(self, episode: AgentEpisode) -> None:
        session = self.capture.registry.get(episode.key)
        assert session is not None
        document = self.capture.document(session)
        try:
            trace = to_training_trace(session.graph, document)
        except ValueError as error:
            raise SessionUnusable(
                f"a session of {len(session.graph.nodes())} calls: {error}; it found "
                f"{'; '.join(session.findings[:3]) or 'nothing more'}",
                hint="see the agent's log, and whether it asked the proxy",
            ) from error
        trained = {turn.node_id for turn in trace.turns}
        left_out = Counter(
            "discarded" if turn["discarded"] else "auxiliary"
            for turn in document["turns"]
            if turn["node_id"] not in trained
        )
        if left_out:
            self.left_out += left_out
            episode.extra = {"calls_left_out": dict(left_out), **episode.extra}
        episode.is_cut = session.budget_stop_count > 0
        episode.end(rows_of(calls_of_trace(trace), session.graph.versions))


def harbor_play(
    rollout: AgentRollout, harness: str, sandbox: str, trials_dir: str | Path, **options: Any
) -> Callable[[AgentEpisode, str | Path], Awaitable[None]]:
    """Returns what plays one of Harbor's tasks, by its folder: `Task(messages=[], data=folder)`.

    The reward is Harbor's own, its named parts go along. Needs `openenv[harbor]`, which needs Python 3.12.

    Args:
        rollout: whose proxy the harness asks; the sandbox must reach its address.
        harness, sandbox, options: of `openenv.harbor.rollout.run_rollout`.
        trials_dir: where Harbor leaves its files.
    """
    from openenv.harbor.rollout import run_rollout

    capture = rollout.capture

    async def play(episode: AgentEpisode, folder: str | Path) -> None:
        sessions: list[Session] = []  # Harbor makes its own, and removes it from the registry
        result = await run_rollout(
            task_dir=folder,
            harness=harness,
            sandbox=sandbox,
            registry=capture.registry,
            intercept_url=capture.url,
            model=capture.model,
            trials_dir=trials_dir,
            inference=capture.inference,
            sampling={"temperature": rollout.temperature},
            purpose="train",
            on_session_created=lambda name: sessions.append(capture.registry.get(name)),
            **options,
        )
        if not result.ok or result.reward is None:
            raise SessionUnusable(
                f"Harbor's rollout of {result.task_name}: {result.error or 'no reward'}; it found "
                f"{'; '.join(result.findings[:3]) or 'nothing more'}",
                hint="see the trial's files",
            )
        versions = {key: value for each in sessions for key, value in each.graph.versions.items()}
        episode.is_cut = any(each.budget_stop_count for each in sessions)
        episode.end(rows_of(calls_of_harbor(result), versions))
        episode.score, episode.components = result.reward, dict(result.rewards)

    return play
