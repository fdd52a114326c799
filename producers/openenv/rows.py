"""Makes rows of an agent's model calls: a row of each chain of calls that go on from one another.

A call goes on from another if its prompt begins with that one's prompt and answer, token by token. One that
does not (after a compaction, of a sub-agent, a second attempt) begins a row of its own. Every sampled token
is trained in one row: what a row shares with another is untrained there.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from shmbridge.producers.rollout import EpisodeUnfinished, require_values
from shmbridge.schema import FINISH_REASONS

if TYPE_CHECKING:
    from openenv.core.harness.training import TrainingTrace
    from openenv.harbor.models import HarborRolloutResult

_UNKNOWN = -1


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
