"""Stages make a new group of a group before it is put: `StepRewards`, `RewardBridge`.

`RewardedProducer` puts them before a `shmbridge.Producer`.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, Self

from shmbridge import Producer, ShmBridgeError
from shmbridge.errors import BadArgument, Closed
from shmbridge.producers.rewards.config import RewardConfig, read_config
from shmbridge.producers.rewards.scorers import StepScorer, in_thread
from shmbridge.producers.rewards.steps import (
    RewardsFailed,
    Span,
    StepRow,
    StepSplitter,
    new_group,
    score_column,
    token_rows,
    trained_spans,
)
from shmbridge.producers.rollout import TokenText

log = logging.getLogger(__name__)


class Stage(Protocol):
    """Makes a new group of a group. Tasks may await it at the same time; it never blocks the event loop."""

    async def __call__(self, group: Mapping[str, Any]) -> dict[str, Any]:
        """Returns a new mapping from column to rows; the given one is not changed."""
        ...


class Stages:
    """Stages one behind the other: `group = await Stages(first, second)(group)`.

    Args:
        stages: `StepRewards`, `RewardBridge`, or any other `Stage`.
    """

    def __init__(self, *stages: Stage) -> None:
        for each in stages:
            if not callable(each):
                raise BadArgument(
                    f"a {type(each).__name__} is no stage", hint="StepRewards(...) or RewardBridge(...)"
                )
        self._stages = stages

    async def __call__(self, group: Mapping[str, Any]) -> dict[str, Any]:
        """Returns a new group. Never blocks the event loop; may be cancelled. Raises what a stage raises."""
        new = new_group(group)
        for stage in self._stages:
            new = await stage(new)
        return new

    def now(self, group: Mapping[str, Any]) -> dict[str, Any]:
        """`await stages(group)` for code without an event loop. Blocks until the stages are done.

        Raises:
            BadArgument: a stage waits for something, and this thread runs an event loop, which would stop.
        """
        whole = [getattr(stage, "now", None) for stage in self._stages]
        if all(whole):
            new = new_group(group)
            for each in whole:
                new = each(new) if each else new
            return new
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            return asyncio.run(self(group))
        raise BadArgument(
            "rewards that are waited for would stop this thread's event loop", hint="await put_async(...)"
        )


def response_texts(
    group: Mapping[str, Any],
    tokens: Sequence[Sequence[int]],
    spans: Sequence[Sequence[Span]],
    text: TokenText | None,
) -> list[str]:
    """Returns the text of each row's response.

    With a tokenizer it is that of the trained tokens, special ones included, the turns one behind the other.
    Without, it is that of the assistant's `messages`, each on lines of its own.

    Raises:
        RewardsFailed: neither a tokenizer nor messages are at hand.
    """
    if text is not None:
        return [
            "".join(text.text(row[begin:end]) for begin, end in trained)
            for row, trained in zip(tokens, spans, strict=True)
        ]
    messages = group.get("messages")
    if not isinstance(messages, (list, tuple)) or len(messages) != len(tokens):
        raise RewardsFailed(
            "the text of the responses is not at hand: no tokenizer, and no messages, one list per row",
            hint="RewardBridge(config, tokenizer=the policy's), or put messages into the group",
        )
    return [_said(row, at) for at, row in enumerate(messages)]


def _said(messages: Any, row: int) -> str:
    if not isinstance(messages, (list, tuple)) or not all(isinstance(each, Mapping) for each in messages):
        raise RewardsFailed(
            f"row {row} has no messages, and there is no tokenizer: its text is not at hand",
            hint="RewardBridge(config, tokenizer=the policy's)",
        )
    return "\n".join(_content(each.get("content")) for each in messages if each.get("role") == "assistant")


def _content(content: Any) -> str:
    """The text of a message, whose content may be a list of parts."""
    if isinstance(content, (list, tuple)):
        return "".join(str(part.get("text") or "") for part in content if isinstance(part, Mapping))
    return "" if content is None else str(content)


class StepRewards:
    """A stage, `group = await stage(group)`: a reward for each step, in the columns of the learner.

    Any number of tasks may await it at the same time.

    Args:
        scorer: what scores.
        splitter: where steps end.
        tokenizer: the policy's, for scorers that read text; see `TokenText`.
    """

    def __init__(self, scorer: StepScorer, splitter: StepSplitter, *, tokenizer: Any = None) -> None:
        self._scorer, self._splitter = scorer, splitter
        self._text = None if tokenizer is None else TokenText(tokenizer)

    async def __call__(self, group: Mapping[str, Any]) -> dict[str, Any]:
        """Returns a new group with `step_rewards` (float32 per step) and `step_ends` (int32, exclusive).

        Never blocks the event loop; may be cancelled. Rows without trained tokens have no steps.

        Args:
            group: a mapping from column to rows, as `Producer.put` takes it, with `tokens` and one of
                `loss_mask`, `masks` and `prompt_length`. It is not changed; leave it so until this ends.

        Raises:
            RewardsFailed: the group has step rewards already, or lacks what is needed; the scorer failed, or
                gave something other than a finite number per step.
        """
        new = new_group(group)
        for name in ("step_rewards", "step_ends"):
            if new.get(name) is not None:
                raise RewardsFailed(
                    f"the group has {name} already", hint="leave the column out, or do not score it again"
                )
        rows = await in_thread(self._rows, new, "the splitter")
        scores = _checked(await self._scored(rows), rows)
        return {**new, "step_rewards": scores, "step_ends": [list(row.ends) for row in rows]}

    def _rows(self, group: Mapping[str, Any]) -> list[StepRow]:
        tokens = token_rows(group)
        messages = group.get("messages")
        said = messages if isinstance(messages, (list, tuple)) and len(messages) == len(tokens) else None
        return [
            StepRow.of(row, spans, self._splitter(row, spans), said and said[at], self._text)
            for at, (row, spans) in enumerate(zip(tokens, trained_spans(group, tokens), strict=True))
        ]

    async def _scored(self, rows: Sequence[StepRow]) -> Sequence[Sequence[float]]:
        try:
            return await self._scorer.score_steps(rows)
        except ShmBridgeError:
            raise
        except (Exception, asyncio.CancelledError) as error:
            if isinstance(error, asyncio.CancelledError) and _is_cancelled():
                raise
            raise RewardsFailed(f"{type(self._scorer).__name__} failed: {error!r}") from error


def _is_cancelled() -> bool:
    """Whether the running task is cancelled, and not only something that it awaited."""
    task = asyncio.current_task()
    return task is None or task.cancelling() > 0


def _checked(scores: Sequence[Sequence[float]], rows: Sequence[StepRow]) -> list[list[float]]:
    if len(scores) != len(rows):
        raise RewardsFailed(f"the scorer scored {len(scores)} rows of {len(rows)}")
    checked = []
    for at, (row, found) in enumerate(zip(rows, scores, strict=True)):
        try:
            values = [float(each) for each in found]
        except (TypeError, ValueError) as wrong:
            raise RewardsFailed(f"the scorer gave row {at} something other than numbers: {wrong}") from wrong
        if len(values) != len(row.ends):
            raise RewardsFailed(f"the scorer gave row {at} {len(values)} values for {len(row.ends)} steps")
        if not all(map(math.isfinite, values)):
            raise RewardsFailed(f"the scorer gave row {at} a value that is not finite: {values!r:.100}")
        checked.append(values)
    return checked


class RewardBridge:
    """A stage, `group = await stage(group)`: scores as a config says, their parts, and the environment's own.

    A config that is off leaves groups as they are. Any thread and any number of tasks may use it.

    Args:
        config: a `RewardConfig`, a mapping, or the path of a YAML file; see `read_config`.
        tokenizer: the policy's. Markers are looked for in the trained tokens it decodes; without one, in what
            the assistant says in the group's `messages`.

    Raises:
        BadConfig: of `read_config`.
    """

    def __init__(
        self, config: RewardConfig | Mapping[str, Any] | str | Path | None, *, tokenizer: Any = None
    ) -> None:
        self.config = read_config(config)
        self._text = None if tokenizer is None else TokenText(tokenizer)

    async def __call__(self, group: Mapping[str, Any]) -> dict[str, Any]:
        """`now`, for event loops: it decodes and searches, which takes milliseconds, and never waits."""
        return self.now(group)

    def now(self, group: Mapping[str, Any]) -> dict[str, Any]:
        """Returns a new group with other scores, `raw_score` and `reward_components`. Never waits.

        The scores have the name they had. `raw_score` (float64) is the environment's own score; one that is
        there already stays. `reward_components` (map<utf8, float32>) has the parts, whose sum is the score,
        and what was there already under other names.

        Args:
            group: a mapping from column to rows, as `Producer.put` takes it; it is not changed.

        Raises:
            RewardsFailed: no scores; or no text, or mask, where the config needs it.
        """
        new = new_group(group)
        if self.config.is_off:
            return new
        tokens = token_rows(group)
        name, scores = score_column(group, len(tokens))
        parts = [
            self.config.components(score, text, length)
            for score, text, length in zip(scores, *self._measured(group, tokens), strict=True)
        ]
        own = new.get("reward_components")
        new[name] = [self.config.total(each) for each in parts]
        new["reward_components"] = parts if own is None else _together(own, parts)
        if new.get("raw_score") is None:
            new["raw_score"] = scores
        return new

    def _measured(
        self, group: Mapping[str, Any], tokens: Sequence[Sequence[int]]
    ) -> tuple[list[str], list[int]]:
        """Text and trained tokens of each row, as far as the config needs them."""
        texts, lengths = [""] * len(tokens), [0] * len(tokens)
        config, decodes = self.config, self.config.needs_text and self._text is not None
        counts = config.length_bounty is not None and config.length_bounty.per == "token"
        spans = trained_spans(group, tokens) if counts or decodes else [[] for _ in tokens]
        if config.needs_text:
            texts = response_texts(group, tokens, spans, self._text)
        if counts:
            lengths = [sum(end - begin for begin, end in row) for row in spans]
        return texts, lengths


def _together(own: Any, parts: Sequence[Mapping[str, float]]) -> list[dict[str, float]]:
    """The environment's components and those made here, row by row."""
    rows = list(own)
    if len(rows) != len(parts):
        raise RewardsFailed(f"column 'reward_components' has {len(rows)} rows, tokens have {len(parts)}")
    both = []
    for there, made in zip(rows, parts, strict=True):
        if taken := set(there or {}) & set(made):
            raise RewardsFailed(
                f"the group has a reward component {min(taken)!r} already",
                hint="give the marker another name:",
            )
        both.append({**(there or {}), **made})
    return both


class RewardedProducer:
    """A `shmbridge.Producer` with stages before `put`, `put_many`, `put_async`; all else is the producer's.

    `claim` is the producer's, too: what is written in place passes no stage. Threads as for the producer.

    Args:
        producer: where groups go; closed by `close`, or the `with` block.
        stages: what happens to a group before, the first first.
    """

    def __init__(self, producer: Producer, *stages: Stage) -> None:
        self.producer, self._stages = producer, Stages(*stages)
        self._tasks: set[asyncio.Task[int | None]] = set()
        self._not_put = 0

    def put(self, group: Mapping[str, Any], **options: Any) -> int | None:
        """`Producer.put` of what the stages make of a group; `timeout_s` is for the lane alone.

        Blocks while the stages work, and as `Producer.put`. The group is not changed.

        Raises:
            RewardsFailed, or what else a stage raises: nothing was committed, counted in `not_put_total`.
            BadArgument: a stage waits, and this thread runs an event loop.
        """
        try:
            new = self._stages.now(group)
        except BaseException:
            self._not_put += 1
            raise
        return self.producer.put(new, **options)

    def put_many(self, groups: Iterable[Mapping[str, Any]], **options: Any) -> list[int | None]:
        """Calls `put` for each of the groups, in order. Records committed before an error stay committed."""
        return [self.put(group, **options) for group in groups]

    async def put_async(self, group: Mapping[str, Any], **options: Any) -> int | None:
        """`put` that never blocks the event loop. Groups go in the order in which their rewards are there.

        A group that was handed over is committed or counted, also if the awaiting task is cancelled: do not
        change it until then.
        """
        task = asyncio.get_running_loop().create_task(self._rewarded(group, options))
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return await asyncio.shield(task)

    async def _rewarded(self, group: Mapping[str, Any], options: dict[str, Any]) -> int | None:
        try:
            new = await self._stages(group)
        except BaseException:
            self._not_put += 1
            raise
        try:
            return await self.producer.put_async(new, **options)
        except Closed:
            self._not_put += 1
            raise

    def _done(self, task: asyncio.Task[int | None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.debug("a group was not put: %s", error)  # its caller has the error, unless it was cancelled

    def stats(self) -> dict[str, float]:
        """The producer's counters, and `not_put_total`: groups that never came as far as those.

        A stage failed, the event loop ended first, or the producer was closed meanwhile.
        """
        return {**self.producer.stats(), "not_put_total": self._not_put}

    def __getattr__(self, name: str) -> Any:
        if name == "producer":  # not there yet, as in a copy that is being made
            raise AttributeError(name)
        return getattr(self.producer, name)

    def __enter__(self) -> Self:
        self.producer.__enter__()
        return self

    def __exit__(self, *raised: object) -> None:
        self.producer.__exit__(*raised)

    def __repr__(self) -> str:
        return f"<RewardedProducer of {self.producer!r}>"
