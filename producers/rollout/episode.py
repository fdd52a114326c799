"""One trajectory on its way: `Episode` collects tokens, masks, log-probabilities, versions and rewards.

`group_of` makes the columns of a group. Used by `Rollout` and by the producers of environment frameworks.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

from shmbridge import ShmBridgeError
from shmbridge.errors import BadArgument
from shmbridge.producers.rollout.sampling import FinishReason, Message, Sampled, SampleServer, Sampling
from shmbridge.producers.rollout.survivors import Played
from shmbridge.schema import FINISH_REASONS

_INCOMPLETE = "\ufffd"  # what decoders write for a part of a character

_ANSWER = "shmbridge-answer"  # stands for the last answer where a template is asked what follows it
_A_MESSAGE = 'give [{"role": "user", "content": "..."}]'


class TokenText:
    """Decodes the ids of one tokenizer. Any thread; it remembers the text of each id it has met.

    Args:
        tokenizer: has `decode(ids, skip_special_tokens=, clean_up_tokenization_spaces=)`, as those of
            transformers do.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.special_ids = frozenset(getattr(tokenizer, "all_special_ids", ()))
        self._anchor: int | None = None
        self._after: dict[tuple[int, int, bool], str] = {}  # what a token adds after an anchor

    def text(self, tokens: Sequence[int], *, special: bool = True) -> str:
        """Returns the text of tokens, that of special ones included if `special`. Never blocks."""
        decoded: str = self._tokenizer.decode(
            list(tokens), skip_special_tokens=not special, clean_up_tokenization_spaces=False
        )
        return decoded

    def pieces(self, tokens: Sequence[int], *, special: bool = True) -> list[str]:
        """Returns what each token adds to `text` of the same arguments; joined, they are that text.

        The bytes of a character may be spread over tokens: the last of these adds it, the others add "".
        Never blocks.
        """
        if not tokens:
            return []
        whole, pieces = self.text(tokens, special=special), self._in_windows(tokens, special)
        # what a token adds may depend on more than the window: then by decoding from the start, which is slow
        return pieces if "".join(pieces) == whole else list(self._from_the_start(tokens, special, whole))

    def ends(self, tokens: Sequence[int], *, special: bool = True) -> list[int]:
        """Returns how many characters `text` of the same arguments has after each token. Never blocks."""
        return list(accumulate(map(len, self.pieces(tokens, special=special))))

    def _in_windows(self, tokens: Sequence[int], special: bool) -> list[str]:
        """Decodes as few tokens together as make whole characters, each time after an ordinary token: some
        tokenizers drop a space at the beginning.
        """
        pieces: list[str] = []
        begin, anchor = 0, self._anchor_in(tokens)
        for at in range(len(tokens)):
            window = tokens[begin : at + 1]
            added = self._added(anchor, window, special) if begin else self.text(window, special=special)
            if at + 1 == len(tokens) or (added and not added.endswith(_INCOMPLETE)):
                pieces.append(added)
                begin = at + 1
            else:
                pieces.append("")
        return pieces

    def _anchor_in(self, tokens: Sequence[int]) -> int:
        if self._anchor is None:
            self._anchor = next((each for each in tokens if self._is_ordinary(each)), None)
        return tokens[0] if self._anchor is None else self._anchor

    def _added(self, anchor: int, window: Sequence[int], special: bool) -> str:
        """What tokens add after the anchor."""
        key = anchor, window[0], special
        if len(window) == 1 and key in self._after:
            return self._after[key]
        added = self.text([anchor, *window], special=special)[len(self.text([anchor], special=special)) :]
        return self._after.setdefault(key, added) if len(window) == 1 else added

    def _is_ordinary(self, token: int) -> bool:
        text = self.text([token], special=False)
        return bool(text.strip()) and _INCOMPLETE not in text

    def _from_the_start(self, tokens: Sequence[int], special: bool, whole: str) -> Iterator[str]:
        reached = 0
        for count in range(1, len(tokens) + 1):
            text = self.text(tokens[:count], special=special)
            end = max(reached, len(text)) if whole.startswith(text) else reached
            yield whole[reached:end]
            reached = end


class ChatFormat:
    """Messages as the token ids that a model expects, by its tokenizer's chat template.

    Without a template, the texts of messages follow each other as they are. For one thread at a time.

    Args:
        tokenizer: a Hugging Face tokenizer, or the name or folder of one.
        template: another chat template than the tokenizer's.
        options: arguments of the template, such as `{"enable_thinking": False}`.
    """

    def __init__(
        self, tokenizer: Any, *, template: str | None = None, options: dict[str, Any] | None = None
    ) -> None:
        if isinstance(tokenizer, str):
            from transformers import AutoTokenizer

            tokenizer = AutoTokenizer.from_pretrained(tokenizer)
        self.tokenizer, self.token_text = tokenizer, TokenText(tokenizer)
        self._template = template or getattr(tokenizer, "chat_template", None)
        self._options = options or {}

    def prompt(self, messages: Sequence[Message]) -> list[int]:
        """Returns the token ids of a conversation up to where the model is to answer. Never blocks."""
        if self._template is None:
            return list(self.tokenizer.encode(_joined(messages)))
        return self._encoded(self._rendered(messages))

    def following(self, sampled: Sequence[int], messages: Sequence[Message]) -> list[int]:
        """Returns the token ids between a sampled answer and the next one: the end of the answer's turn where
        it was not sampled, then `messages`, then the beginning of the next turn. Never blocks.

        The template renders a stand-in for the answer, so that it cannot change what was sampled: some
        templates cut the reasoning out of earlier answers.
        """
        if self._template is None:
            return self._encoded(_joined(messages))
        mark = _ANSWER
        while any(mark in str(message.get("content")) for message in messages):
            mark += "-"
        stand_in = [{"role": "user", "content": "-"}, {"role": "assistant", "content": mark}]
        tail = self._encoded(self._rendered([*stand_in, *messages]).split(mark)[-1])
        return tail[1:] if tail and sampled and tail[0] == sampled[-1] else tail

    def text(self, token_ids: Sequence[int]) -> str:
        """Returns the text of sampled tokens, without special ones. Never blocks."""
        return self.token_text.text(token_ids, special=False)

    def answer(self, text: str, *, ends: bool = True) -> list[int]:
        """Returns token ids for an answer that is known as text only: a guess. With the end token, unless the
        answer was cut: `ends=False`.
        """
        end = self.tokenizer.eos_token_id if ends else None
        return [*self._encoded(text), *([] if end is None else [end])]

    def _rendered(self, messages: Sequence[Message]) -> str:
        return str(
            self.tokenizer.apply_chat_template(
                [dict(message) for message in messages],
                tokenize=False,
                add_generation_prompt=True,
                chat_template=self._template,
                **self._options,
            )
        )

    def _encoded(self, text: str) -> list[int]:
        # A template writes the special tokens itself.
        return list(self.tokenizer.encode(text, add_special_tokens=False))


def _joined(messages: Sequence[Message]) -> str:
    return "".join(str(message.get("content") or "") for message in messages)


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


def group_of(episodes: Sequence[Episode], env_metrics: dict[str, Any] | None = None) -> dict[str, Any]:
    """Returns the columns of a group, a row for each episode, as `Producer.put` takes them. Never blocks.

    Log-probabilities are a column only if every row has them. Optional columns are left out where no row has
    a value. `env_metrics`, any JSON, arrives at the consumer in `record.json("extra")` and in
    `to_scored_data()`.

    Raises:
        EpisodeUnfinished: an episode without an answer or without a finite score.
    """
    for episode in episodes:
        episode.require_finished()
    group: dict[str, Any] = {
        "tokens": [episode.tokens for episode in episodes],
        "loss_mask": [episode.mask for episode in episodes],
        "prompt_length": [episode.prompt_length for episode in episodes],
        "score": [episode.score for episode in episodes],
        "token_versions": [episode.versions for episode in episodes],
        "temperature": [episode.sampling.temperature for episode in episodes],
        "finish_reason": [FINISH_REASONS.index(episode.finish_reason) for episode in episodes],
        "turn_ends": [episode.turn_ends for episode in episodes],
        "messages": [list(episode.messages) for episode in episodes],
        "instance_id": [episode.instance_id for episode in episodes],
        "repetition_id": [episode.repetition_id for episode in episodes],
    }
    if all(episode.logprobs is not None for episode in episodes):
        group["inference_logprobs"] = [episode.logprobs for episode in episodes]
    if any(episode.step_rewards for episode in episodes):
        group["step_rewards"] = [episode.step_rewards for episode in episodes]
        group["step_ends"] = [episode.step_ends for episode in episodes]
    if any(episode.trace_spans for episode in episodes):
        group["trace_spans"] = [episode.trace_spans for episode in episodes]
    if any(episode.components for episode in episodes):
        group["reward_components"] = [episode.components for episode in episodes]
    if extra := _extra(episodes, env_metrics):
        group["extra"] = extra
    return group


def _extra(episodes: Sequence[Episode], env_metrics: dict[str, Any] | None) -> dict[str, Any]:
    extra: dict[str, Any] = {}
    if env_metrics:
        extra["env_metrics"] = env_metrics
    if not all(episode.exact for episode in episodes):
        extra["retokenised"] = [row for row, episode in enumerate(episodes) if not episode.exact]
    if any(episode.extra for episode in episodes):
        extra["rows"] = [episode.extra for episode in episodes]
    return extra
