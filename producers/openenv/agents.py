"""Runs agents of any kind behind OpenEnv's capture proxy: `AgentRollout`; and Harbor's: `harbor_play`.

    async with AgentRollout("run1", "http://127.0.0.1:9004", env_name="repairs") as rollout:
        await rollout.run(tasks, play)

`play(episode, data)` starts the agent with `episode.environ`, waits for its end and sets `episode.score`.

Each chain of model calls that continue one another becomes a row. A call continues another if its prompt
begins with that one's prompt and answer, token by token. One that does not (after a compaction, of a
sub-agent, a second attempt) begins a row of its own. Every sampled token is trained in one row: what a row
shares with another is untrained there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeVar, Unpack

from openenv.core.harness.capture.contract import to_training_trace
from openenv.core.harness.capture.sessions import Session

from shmbridge import ShmBridgeError
from shmbridge.producers.openenv.capture import Capture
from shmbridge.producers.rollout import EpisodeUnfinished, Runner, RunOptions, Task, require_values
from shmbridge.schema import FINISH_REASONS

if TYPE_CHECKING:
    from openenv.core.harness.training import TrainingTrace
    from openenv.harbor.models import HarborRolloutResult

_UNKNOWN = -1

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class Call:
    """One model call, as the engine tokenised and sampled it.

    Attributes:
        node_id: OpenEnv's name of it.
        prompt, sampled: token ids.
        logprobs: of each sampled token, in nats.
        mask: 1 for each sampled token that is trained.
        finish_reason: as the engine says it.
        messages: the conversation, the answer included.
        temperature: of sampling.
    """

    node_id: str
    prompt: list[int]
    sampled: list[int]
    logprobs: list[float]
    mask: list[int]
    finish_reason: str | None
    messages: list[dict[str, Any]]
    temperature: float

    @property
    def end(self) -> int:
        """Tokens of prompt and answer."""
        return len(self.prompt) + len(self.sampled)

    def goes_on_from(self, other: Call) -> bool:
        """Whether the prompt begins with the other's prompt and answer."""
        begin, end = len(other.prompt), other.end
        return (
            end <= len(self.prompt)
            and self.prompt[begin:end] == other.sampled
            and self.prompt[:begin] == other.prompt
        )


def calls_of_trace(trace: TrainingTrace) -> list[Call]:
    """Returns the calls of OpenEnv's training trace, in their order. Never blocks."""
    calls = []
    for turn in trace.turns:
        choice = (turn.response.get("choices") or [{}])[0]
        message = choice.get("message")
        calls.append(
            Call(
                turn.node_id,
                turn.prompt_token_ids,
                turn.completion_token_ids,
                turn.per_token_logps,
                turn.loss_mask[len(turn.prompt_token_ids) :],
                choice.get("finish_reason"),
                [*(turn.request.get("messages") or ()), *(() if message is None else (message,))],
                _temperature(turn.metadata.get("sampling_params")),
            )
        )
    return calls


def calls_of_harbor(result: HarborRolloutResult) -> list[Call]:
    """Returns the agent's calls of one of Harbor's rollouts, in their order; masks are Harbor's, after it
    compared the calls with the agent's own trace. Never blocks.
    """
    calls = []
    for turn in result.turns:
        if turn.discarded or not turn.trainable:
            continue
        mask = turn.loss_mask
        answer: dict[str, Any] = {"role": "assistant", "content": turn.text}
        if turn.tool_calls:
            answer["tool_calls"] = turn.tool_calls
        calls.append(
            Call(
                turn.node_id,
                turn.prompt_token_ids,
                turn.completion_token_ids,
                turn.per_token_logps,
                [1] * len(turn.completion_token_ids) if mask is None else mask[len(turn.prompt_token_ids) :],
                turn.finish_reason,
                [*turn.request_messages, answer],
                _temperature(turn.sampling_params),
            )
        )
    return calls


def _temperature(sampling: Mapping[str, Any] | None) -> float:
    said = (sampling or {}).get("temperature")
    return 1.0 if said is None else float(said)


@dataclass(frozen=True, eq=False)
class Row:
    """One row of an episode; token columns are aligned with `tokens`, as in `rollout.Episode`."""

    tokens: list[int]
    mask: list[int]
    logprobs: list[float]
    versions: list[int]
    prompt_length: int
    turn_ends: list[int]
    finish_reason: str
    messages: list[dict[str, Any]]
    temperature: float


def rows_of(calls: Sequence[Call], versions: Mapping[str, list[int]]) -> list[Row]:
    """Returns the rows of an episode, that of its last call last. Never blocks.

    Args:
        calls: the agent's, in the order in which they were made.
        versions: of each sampled token, by `node_id`; a call that is not there is of unknown version.
    """
    chains: list[list[Call]] = []
    for call in sorted(calls, key=lambda each: len(each.prompt)):  # calls may overtake one another
        before = [chain for chain in chains if call.goes_on_from(chain[-1])]
        if before:
            max(before, key=lambda chain: chain[-1].end).append(call)
        else:
            chains.append([call])
    place = {id(call): at for at, call in enumerate(calls)}
    chains.sort(key=lambda chain: max(place[id(call)] for call in chain))
    return [_row(chain, versions) for chain in chains]


def _row(chain: Sequence[Call], versions: Mapping[str, list[int]]) -> Row:
    last = chain[-1]
    row = Row(
        tokens=last.prompt + last.sampled,
        mask=[0] * last.end,
        logprobs=[0.0] * last.end,
        versions=[_UNKNOWN] * last.end,
        prompt_length=len(chain[0].prompt),
        turn_ends=[call.end for call in chain],
        finish_reason=last.finish_reason if last.finish_reason in FINISH_REASONS else "stop",
        messages=last.messages,
        temperature=chain[0].temperature,
    )
    for call in chain:
        sampled = slice(len(call.prompt), call.end)
        row.mask[sampled] = call.mask
        row.logprobs[sampled] = [
            value if trained else 0.0 for value, trained in zip(call.logprobs, call.mask, strict=True)
        ]
        row.versions[sampled] = versions.get(call.node_id, [_UNKNOWN] * len(call.sampled))
    return row


class AgentEpisode:
    """One session of an agent: the agent asks `url` with `key` as its API key, the caller sets the score.

    For one task at a time.

    Attributes:
        url: base URL of the proxy, without `/v1`; OpenAI's clients want it with.
        key: API key of this session, and its id.
        model: name of the model; the proxy puts it into every request.
        messages: of the task.
        instance_id, repetition_id: name the episode (SkyRL's TrajectoryID).
        rows: once it has ended.
        score: outcome reward, of each row; to be set before the group is put.
        components: named parts of the score.
        extra: JSON that goes with each of its rows: `Record.json("extra")["rows"]`.
        asked_again: 0, the proxy asks for no answer again.
    """

    def __init__(
        self,
        url: str,
        key: str,
        model: str,
        messages: Sequence[Mapping[str, Any]],
        instance_id: str = "",
        repetition_id: int = 0,
    ) -> None:
        self.instance_id, self.repetition_id = instance_id, repetition_id
        self.url, self.key, self.model, self.messages = url, key, model, messages
        self.rows: list[Row] = []
        self.score: float | None = None
        self.components: dict[str, float] = {}
        self.extra: dict[str, Any] = {}
        self.asked_again = 0
        self.is_cut = False  # by the proxy, at its limit of calls or of the context

    @property
    def environ(self) -> dict[str, str]:
        """Environment variables by which most agents and SDKs find the proxy."""
        return {
            "OPENAI_BASE_URL": f"{self.url}/v1",
            "OPENAI_API_BASE": f"{self.url}/v1",
            "OPENAI_API_KEY": self.key,
            "ANTHROPIC_BASE_URL": self.url,
            "ANTHROPIC_API_KEY": self.key,
        }

    def end(self, rows: Sequence[Row]) -> None:
        """Takes the rows that were made of its calls."""
        self.rows = list(rows)

    def sampled_versions(self) -> list[int]:
        """Returns the policy version of each sampled token, -1 where it is not known. Never blocks."""
        return [
            version
            for row in self.rows
            for version, trained in zip(row.versions, row.mask, strict=True)
            if trained
        ]

    def require_finished(self) -> None:
        """Raises EpisodeUnfinished if the episode cannot be rows. Never blocks."""
        name = f"episode {self.repetition_id} of task {self.instance_id!r}"
        if not any(row.turn_ends for row in self.rows):
            raise EpisodeUnfinished(f"{name} has no answer", hint="did the agent ask the proxy?")
        require_values(name, self.score, self.components, self.extra)


def group_of_agents(episodes: Iterable[AgentEpisode]) -> dict[str, Any]:
    """Returns the columns of a group, as `Producer.put` takes them: the rows of each episode, one after the
    other, each with the episode's score. Never blocks.
    """
    rows = [(episode, number, row) for episode in episodes for number, row in enumerate(episode.rows)]
    last = [number == len(episode.rows) - 1 for episode, number, _ in rows]
    reasons = [
        "length" if episode.is_cut and ends else row.finish_reason
        for (episode, _, row), ends in zip(rows, last, strict=True)
    ]
    group: dict[str, Any] = {
        "tokens": [row.tokens for _, _, row in rows],
        "loss_mask": [row.mask for _, _, row in rows],
        "inference_logprobs": [row.logprobs for _, _, row in rows],
        "token_versions": [row.versions for _, _, row in rows],
        "prompt_length": [row.prompt_length for _, _, row in rows],
        "score": [episode.score for episode, _, _ in rows],
        "temperature": [row.temperature for _, _, row in rows],
        "finish_reason": [FINISH_REASONS.index(reason) for reason in reasons],
        "turn_ends": [row.turn_ends for _, _, row in rows],
        "messages": [row.messages for _, _, row in rows],
        "instance_id": [episode.instance_id for episode, _, _ in rows],
        "repetition_id": [episode.repetition_id for episode, _, _ in rows],
        "row_index": [number for _, number, _ in rows],
        "is_last": last,
    }
    if any(episode.components for episode, _, _ in rows):
        group["reward_components"] = [episode.components for episode, _, _ in rows]
    if any(episode.extra for episode, _, _ in rows):
        group["extra"] = {"rows": [episode.extra for episode, _, _ in rows]}
    return group


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
