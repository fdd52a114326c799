"""One trajectory on its way: `Episode` collects tokens, masks, log-probabilities, versions and rewards.

Used by `rollout.py` and by the producers of environment frameworks; `group.py` makes columns of it.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from shmbridge import ShmBridgeError
from shmbridge.errors import BadArgument
from shmbridge.producers.rollout.chat_format import ChatFormat
from shmbridge.producers.rollout.sampling import FinishReason, Message, Sampled, SampleServer, Sampling
from shmbridge.producers.rollout.survivors import Played

_A_MESSAGE = 'give [{"role": "user", "content": "..."}]'


class ContextFull(ShmBridgeError, ValueError):
    """An episode has no room for another token: it ends here, and its row says "length"."""

    code = "SB509"


class EpisodeUnfinished(ShmBridgeError, ValueError):
    """An episode cannot be a row: it has no answer, or no score."""

    code = "SB510"


class Episode:
    """A conversation of one model, token by token: what was sampled is never tokenised again.

    For one task at a time. Token columns are aligned with `tokens`: value i belongs to token i.

    Args:
        server: what it samples from.
        chat: makes token ids of messages.
        messages: the beginning, up to where the model is to answer.
        sampling: how it is sampled, unless a call of `sample` says otherwise.
        context: most tokens of the whole row; None: as many as the server takes.
        instance_id: names the prompt; with `repetition_id` it names the trajectory (SkyRL's TrajectoryID).

    Attributes:
        tokens: token ids of prompt and response.
        mask: 1 where a token was sampled.
        logprobs: in nats, 0.0 where nothing was sampled; None if a server gave none.
        versions: the policy version that sampled each token, -1 elsewhere or where it is not known.
        messages: the conversation whose tokens are in the row, answers included.
        score: outcome reward of the trajectory; to be set before it is put.
        components: named parts of the score.
        extra: JSON that goes with the row: `Record.json("extra")["rows"]`.
        exact: False if tokens were made from text.
        asked_again: answers that were aborted before their first token.
    """

    def __init__(
        self,
        server: SampleServer,
        chat: ChatFormat,
        messages: Sequence[Message],
        sampling: Sampling | None = None,
        *,
        context: int | None = None,
        instance_id: str = "",
        repetition_id: int = 0,
    ) -> None:
        self._server, self.chat, self.sampling = server, chat, sampling or Sampling()
        self._context = context
        self.instance_id, self.repetition_id = instance_id, repetition_id
        self._turn_begins: list[int] = []
        self.turn_ends: list[int] = []
        self.begin(messages)
        self.step_rewards: list[float] = []
        self.step_ends: list[int] = []
        self.trace_spans: list[int] = []
        self.finish_reason: FinishReason = "stop"
        self.score: float | None = None
        self.components: dict[str, float] = {}
        self.extra: dict[str, Any] = {}
        self.exact, self.asked_again = True, 0
        self._unread: list[Message] = []  # observed since the last answer; in the row once one follows

    def begin(self, messages: Sequence[Message]) -> None:
        """Replaces the beginning, for an environment that writes its prompt only when it is reset."""
        if self.turn_ends:
            raise ValueError(f"{len(self.turn_ends)} answers follow the beginning: it stays as it is")
        self.messages: list[Message] = _checked(messages)
        self.tokens = self.chat.prompt(self.messages)
        self.prompt_length = len(self.tokens)
        self.mask = [0] * self.prompt_length
        self.logprobs: list[float] | None = [0.0] * self.prompt_length
        self.versions = [-1] * self.prompt_length

    @property
    def room(self) -> int | None:
        """Tokens that still fit into the context, before observations not yet in the row; None: no limit."""
        return None if self._context is None else self._context - len(self.tokens)

    async def sample(self, **changes: Any) -> str:
        """Returns the text of the next answer, sampled after everything so far; it ends a turn.

        A request that the server aborts before its first token is asked again, as long as the episode may
        take.

        Args:
            changes: fields of `Sampling` for this answer alone.

        Raises:
            ContextFull: not one token fits; the episode's `finish_reason` is "length" then.
            ServerFailed, NoTokens: the episode is as before.
        """
        sampling = replace(self.sampling, **changes) if changes else self.sampling
        between = self.chat.following(self.tokens[-1:], self._unread) if self.turn_ends else []
        prompt = self.tokens + between
        if self._context is not None:
            room = self._context - len(prompt)
            if room < 1:
                self.finish_reason = "length"
                raise ContextFull(
                    f"{len(prompt)} tokens leave no room in a context of {self._context}",
                    hint="end the episode here, or raise the context",
                )
            sampling = replace(sampling, max_tokens=min(room, sampling.max_tokens or room))
        try:
            sampled = await self._server.sample(prompt, sampling, [*self.messages, *self._unread])
            waits_s = abort_waits_s()
            while not sampled.token_ids and sampled.finish_reason == "abort":  # by an update of its weights
                self.asked_again += 1
                await asyncio.sleep(next(waits_s))
                sampled = await self._server.sample(prompt, sampling, [*self.messages, *self._unread])
        except ContextFull:  # of the server's own
            self.finish_reason = "length"
            raise
        return self._append(between, sampled)

    def observe(self, messages: Sequence[Message]) -> None:
        """Adds what the environment said; tokens and messages are in the row, untrained, once an answer
        follows. Never blocks.

        Raises BadArgument for anything but messages, ValueError before the first answer.
        """
        if not self.turn_ends:
            raise ValueError("an observation comes after an answer: give the first messages to the episode")
        self._unread += _checked(messages)

    def shorten(self, text: str) -> None:
        """Cuts the last answer to the tokens that hold `text`, with which it begins; the rest was never said.

        A token that holds the end of `text` and more stays whole. Raises ValueError if the answer does not
        begin with it or was rewarded already, if there is none, or if an observation follows it.
        """
        if not self.turn_ends or self._unread:
            raise ValueError("only an answer that nothing follows can be shortened")
        begin, end = self.turns()[-1]
        said = str(self.messages[-1]["content"])
        if not said.startswith(text):
            raise ValueError(f"the answer {said[:60]!r} does not begin with {text[:60]!r}")
        if self.step_ends and self.step_ends[-1] == end:
            raise ValueError("the answer has its reward already: shorten it before")
        ends = self.chat.token_text.ends(self.tokens[begin:end], special=False)
        keep = begin + next((at + 1 for at, reached in enumerate(ends) if reached >= len(text)), len(ends))
        for column in (self.tokens, self.mask, self.versions, self.logprobs):
            if column is not None:
                del column[keep:end]
        self.turn_ends[-1] = keep
        self.messages[-1] = {"role": "assistant", "content": text}

    def step_reward(self, reward: float) -> None:
        """Gives the last answer a reward, whose step ends where that answer ends. Several add up."""
        if not self.turn_ends:
            raise ValueError("a step reward comes after an answer")
        if self.step_ends and self.step_ends[-1] == self.turn_ends[-1]:
            self.step_rewards[-1] += float(reward)
        else:
            self.step_rewards.append(float(reward))
            self.step_ends.append(self.turn_ends[-1])

    def _append(self, between: Sequence[int], sampled: Sampled) -> str:
        text = self.chat.text(sampled.token_ids) if sampled.text is None else sampled.text
        count = len(sampled.token_ids)
        self._turn_begins.append(len(self.tokens) + len(between))
        self.tokens += [*between, *sampled.token_ids]
        self.mask += [0] * len(between) + [1] * count
        self.versions += [-1] * len(between) + sampled.versions
        if self.logprobs is not None and sampled.logprobs is not None:
            self.logprobs += [0.0] * len(between) + sampled.logprobs
        else:
            self.logprobs = None
        self.exact = self.exact and sampled.text is None
        self.turn_ends.append(len(self.tokens))
        self.finish_reason = sampled.finish_reason
        self.messages += [*self._unread, {"role": "assistant", "content": text}]
        self._unread = []
        return text

    def require_finished(self) -> None:
        """Raises EpisodeUnfinished if the episode cannot be a row. Never blocks."""
        name = f"episode {self.repetition_id} of task {self.instance_id!r}"
        if not self.turn_ends:
            raise EpisodeUnfinished(f"{name} has no answer", hint="sample at least once, or leave it out")
        require_values(name, self.score, self.components, self.extra)

    def sampled_versions(self) -> list[int]:
        """Returns the policy version of each sampled token, -1 where it is not known. Never blocks."""
        return [version for version, sampled in zip(self.versions, self.mask, strict=True) if sampled]

    def turns(self) -> list[tuple[int, int]]:
        """Returns begin and end token index of each answer."""
        return list(zip(self._turn_begins, self.turn_ends, strict=True))


def abort_waits_s() -> Iterator[float]:
    """Yields the seconds to wait before an aborted answer is asked for again: 0.05, doubled up to 2."""
    wait_s = 0.05
    while True:
        yield wait_s
        wait_s = min(2 * wait_s, 2.0)


def require_values(
    name: str, score: float | None, components: Mapping[str, float], extra: Mapping[str, Any]
) -> None:
    """Checks what an environment says of an episode: a value that no lane takes costs its row, not its group.

    Raises EpisodeUnfinished.
    """
    if score is None or not math.isfinite(score):
        raise EpisodeUnfinished(f"{name} has the score {score}", hint="set episode.score")
    for part, value in components.items():
        if not math.isfinite(value):
            raise EpisodeUnfinished(f"{name} has the component {part!r} {value}", hint="give a number")
    try:
        json.dumps(extra, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise EpisodeUnfinished(
            f"{name} has an extra that is not JSON: {error}", hint="give plain JSON"
        ) from None


def _checked(messages: Sequence[Message]) -> list[Message]:
    """The messages in a list. Raises BadArgument if they are none."""
    if isinstance(messages, (str, Mapping)):
        raise BadArgument(f"{messages!r:.80} is no list of messages", hint=_A_MESSAGE)
    said = list(messages)
    for each in said:
        if not isinstance(each, Mapping) or not isinstance(each.get("role"), str):
            raise BadArgument(f"{each!r:.80} is no message with a role", hint=_A_MESSAGE)
    return said


def known_versions(played: Iterable[Played], began: int, now: int) -> tuple[int, int]:
    """Returns the oldest and the newest policy version that sampled any of the episodes.

    Args:
        began: the version when their generation began; with `now`, a bound for tokens of unknown version.
        now: the version at the end.
    """
    sampled = [version for each in played for version in each.sampled_versions()]
    known = [version for version in sampled if version >= 0]
    if not known:
        return min(began, now), max(began, now)
    if len(known) < len(sampled):
        known += [began, now]
    return min(known), max(known)
