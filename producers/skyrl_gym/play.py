"""Plays episodes of SkyRL-Gym environments: `SkyRLPlay`, which `Rollout.run` takes with `SkyRLTasks`."""

from __future__ import annotations

import asyncio
import copy
import random
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any
from weakref import WeakKeyDictionary

from shmbridge.producers.rollout import CallThreads, ContextFull, Episode, Task
from shmbridge.producers.skyrl_gym.env_server import rows_of
from shmbridge.producers.skyrl_gym.environments import (
    BadTask,
    EnvironmentFailed,
    HeldEnv,
    Step,
    made_here,
    plain,
)

_FORMAT = (
    'a row is {"prompt": [{"role": ..., "content": ...}], "env_class": ..., and what its environment needs}'
)

_LOOK_BACK = 16  # tokens before an answer in which a template may have opened a trace
Make = Callable[[str, dict[str, Any]], Any]  # env_class, extras -> environment


@dataclass(frozen=True)
class SkyRLTask:
    """What an environment is made of.

    Attributes:
        env_class: name under which `skyrl_gym` knows it.
        extras: all of the row but prompt and env_class: reward_spec, extra_info, max_turns ...
    """

    env_class: str
    extras: Mapping[str, Any]


class SkyRLTasks:
    """The tasks of one data set, in its order. Any thread; asking for one blocks only if its rows do.

    Args:
        rows: of SkyRL's format; those of a list are checked now, others when they are asked for.
        env_class: the environment of all rows; None: what each row says.

    Raises:
        BadTask: a row lacks a prompt or an environment.
    """

    def __init__(self, rows: Sequence[Mapping[str, Any]], *, env_class: str | None = None) -> None:
        self._rows, self._env_class = rows, env_class
        if isinstance(rows, list):
            for number in range(len(rows)):
                self[number]

    @classmethod
    def load(cls, source: str, *, split: str = "train", env_class: str | None = None) -> SkyRLTasks:
        """Returns the tasks of a file, a folder, or a data set's name; see `rows_of`. Blocks.

        Raises:
            BadTask: it cannot be read, or a row is not a task.
        """
        try:
            rows = rows_of(source, split)
        except (ValueError, OSError) as error:
            raise BadTask(
                str(error), hint="give a parquet, json or jsonl file, a folder, or a name"
            ) from error
        except ImportError as error:
            raise BadTask(
                f"{source} needs {error.name} to be read", hint=f"pip install {error.name}"
            ) from error
        return cls(rows, env_class=env_class)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, number: int) -> Task[SkyRLTask]:
        return task_of(self._rows[number], number, self._env_class)

    def repeated(self, *, epochs: int | None = None, seed: int | None = None) -> Iterator[Task[SkyRLTask]]:
        """Yields every task once in each epoch.

        Args:
            epochs: None: without end.
            seed: of a new order in each epoch; None: the order of the rows.
        """
        done = 0
        while epochs is None or done < epochs:
            numbers = list(range(len(self)))
            if seed is not None:
                random.Random(f"{seed} {done}").shuffle(numbers)
            for number in numbers:
                yield self[number]
            done += 1


def task_of(row: Mapping[str, Any], number: int, env_class: str | None = None) -> Task[SkyRLTask]:
    """Returns the task of one row; its instance_id is the row's number, as in SkyRL. Never blocks.

    Args:
        row: prompt, env_class, and what the environment needs.
        number: of the row in its data set.
        env_class: takes the place of the row's own.

    Raises:
        BadTask: a field is missing, or of another form; the message names row and field.
    """
    extras = {key: value for key, value in row.items() if key not in ("prompt", "env_class")}
    name = env_class or row.get("env_class")
    if "prompt" not in row:
        raise BadTask(
            f"row {number} has no prompt; it has {', '.join(map(str, row)) or 'nothing'}", hint=_FORMAT
        )
    if not _is_conversation(row["prompt"]):
        raise BadTask(
            f"row {number}: the prompt {str(row['prompt'])[:80]!r} is no list of messages", hint=_FORMAT
        )
    if not isinstance(name, str) or not name:
        raise BadTask(
            f"row {number} names no environment (env_class: {name!r})", hint="name one for all: --env"
        )
    return Task(row["prompt"], SkyRLTask(name, extras), str(number))


def _is_conversation(prompt: Any) -> bool:
    return (
        isinstance(prompt, (list, tuple))
        and len(prompt) > 0
        and all(
            isinstance(each, Mapping) and isinstance(each.get("role"), str) and "content" in each
            for each in prompt
        )
    )


@dataclass(frozen=True)
class TagPair:
    """The tags around a trace, as text."""

    start: str
    end: str

    def __post_init__(self) -> None:
        if not self.start or not self.end or self.start == self.end:
            raise ValueError(f"a trace needs two different tags, not {self.start!r} and {self.end!r}")


THINK = TagPair("<think>", "</think>")


@dataclass(frozen=True)
class Trace:
    """One reasoning trace.

    Attributes:
        text: what it says, without tags, special tokens and white space around it.
        turn: number of the answer that it is in.
        begin, end: the tokens of the row that hold it, end exclusive.
        closed: False where the end tag is missing: it runs to the end of its answer.
    """

    text: str
    turn: int
    begin: int
    end: int
    closed: bool


@dataclass(frozen=True)
class Place:
    """Where in a text a trace is: characters between its tags."""

    begin: int
    end: int
    closed: bool


def traces_of(episode: Episode, tags: Sequence[TagPair] = (THINK,)) -> list[Trace]:
    """Returns the traces of all answers of an episode, in order. Never blocks; any thread.

    A tag within a trace of its own pair is nested and belongs to it. Where the prompt ends with a start tag,
    as some chat templates have it, the answer begins within a trace. Traces of white space are left out.
    """
    token_text = episode.chat.token_text  # special tokens included: tags are special tokens of some models
    found = []
    for turn, (begin, end) in enumerate(episode.turns()):
        ids = episode.tokens[begin:end]
        text = token_text.text(ids)
        before = token_text.text(episode.tokens[max(0, begin - _LOOK_BACK) : begin]).rstrip()
        opened = next((pair for pair in tags if before.endswith(pair.start)), None)
        places = [each for each in places_in(text, tags, opened) if text[each.begin : each.end].strip()]
        ends = token_text.ends(ids) if places else []
        for place in places:
            first, last = _tokens(ends, place)
            said = _without_special(text[place.begin : place.end], episode.chat.tokenizer, tags)
            found.append(Trace(said.strip(), turn, begin + first, begin + last, place.closed))
    return [trace for trace in found if trace.text]


def places_in(text: str, tags: Sequence[TagPair], opened: TagPair | None = None) -> list[Place]:
    """Returns where traces are in a text; `opened` is the pair whose start tag stands before it."""
    places: list[Place] = []
    at, inside = 0, opened
    while True:
        if inside is None:
            starts = [
                (text.find(pair.start, at), -len(pair.start), number) for number, pair in enumerate(tags)
            ]
            starts = [each for each in starts if each[0] >= 0]
            if not starts:
                return places
            where, _, number = min(starts)
            inside = tags[number]
            at = where + len(inside.start)
        end = _closing(text, at, inside)
        if end is None:
            return [*places, Place(at, len(text), False)]
        places.append(Place(at, end, True))
        at, inside = end + len(inside.end), None


def _closing(text: str, at: int, pair: TagPair) -> int | None:
    """Where the end tag stands that closes the trace which begins at `at`."""
    depth = 1
    while True:
        end, start = text.find(pair.end, at), text.find(pair.start, at)
        if end < 0:
            return None
        if 0 <= start < end:
            depth, at = depth + 1, start + len(pair.start)
            continue
        depth, at = depth - 1, end + len(pair.end)
        if depth == 0:
            return end


def _tokens(ends: Sequence[int], place: Place) -> tuple[int, int]:
    """The tokens that hold a place, given how many characters there are after each token."""
    first = bisect_left(ends, place.begin) if place.begin else 0
    if place.begin and first < len(ends) and ends[first] == place.begin:
        first += 1
    return first, bisect_left(ends, place.end) + 1 if place.closed else len(ends)


def _without_special(text: str, tokenizer: Any, tags: Sequence[TagPair]) -> str:
    kept = {tag for pair in tags for tag in (pair.start, pair.end)}
    for special in getattr(tokenizer, "all_special_tokens", ()):
        if special not in kept:
            text = text.replace(str(special), "")
    return text


@dataclass(frozen=True)
class _Played:
    metrics: Mapping[str, Any]
    traces: list[Trace]


class SkyRLPlay:
    """Plays one episode per call, as SkyRL's generator does: init, then answer and step until it is done.

    For one event loop, which nothing here blocks: environments run in threads, any number of episodes at
    once. Every step's reward is a step reward that ends with its answer; the score is the sum of them.

    Args:
        make: makes an environment of its class and its extras; None: `skyrl_gym.make` in this process.
        tags: between which reasoning traces are looked for; none: they are not.
        process_rewards: keep the reward of each step, beside the score.
        max_turns: takes the place of the task's own, for environments that use it.
        threads: calls of environments that can run at once.
    """

    def __init__(
        self,
        make: Make | None = None,
        *,
        tags: Sequence[TagPair] = (THINK,),
        process_rewards: bool = True,
        max_turns: int | None = None,
        threads: int = 256,
    ) -> None:
        self._make = make or made_here
        self._tags, self._process_rewards, self._max_turns = tuple(tags), process_rewards, max_turns
        self._threads = CallThreads(threads, "skyrl-gym")
        self._played: WeakKeyDictionary[Episode, _Played] = WeakKeyDictionary()

    async def __call__(self, episode: Episode, task: SkyRLTask) -> None:
        """Plays an episode to its end and gives it its score; its environment is closed, however it ends.

        Where the context is full, it ends there, with the finish reason "length" and the rewards so far.

        Raises:
            EnvironmentFailed: the environment raised, or answered in another form than environments do.
            ContextFull: the prompt alone fills the context.
            ServerFailed, NoTokens: the episode cannot be sampled.
        """
        extras = copy.deepcopy(dict(task.extras))
        if self._max_turns is not None:
            extras["max_turns"] = self._max_turns
        name = f"{task.env_class}, task {episode.instance_id}, repetition {episode.repetition_id}"
        env = HeldEnv(lambda: self._make(task.env_class, extras), name, self._threads)
        try:
            episode.begin(await env.init(copy.deepcopy(episode.messages)))
            episode.score = await self._turns(env, episode, name)
            metrics = await env.metrics()
        except BaseException:
            env.close_later()
            raise
        await env.close()
        traces = await asyncio.wrap_future(self._threads.submit(traces_of, episode, self._tags))
        episode.trace_spans = [at for trace in traces for at in (trace.begin, trace.end)]
        self._played[episode] = _Played(plain(metrics), traces)

    def env_metrics(self, episodes: Sequence[Episode]) -> dict[str, Any]:
        """Returns what goes with a group, an entry per trajectory in each list; for `Rollout(env_metrics=)`.

        `reasoning_traces`: the traces of a trajectory as text, an empty line between two; None: it has none.
        `traces`: each of them, with its turn, its tokens of the row, and whether its end tag is there.
        `metrics`: what the environment's `get_metrics` returned.
        `prm_supported`: whether the group carries the reward of each step. Never blocks.
        """
        played = [self._played[episode] for episode in episodes]
        return {
            "reasoning_traces": ["\n\n".join(t.text for t in each.traces) or None for each in played],
            "traces": [[asdict(trace) for trace in each.traces] for each in played],
            "metrics": [each.metrics for each in played],
            "prm_supported": self._process_rewards and any(episode.step_rewards for episode in episodes),
        }

    async def _turns(self, env: HeldEnv, episode: Episode, name: str) -> float:
        """Answers and steps until the episode is done; the sum of the rewards."""
        score = 0.0
        while True:
            try:
                action = await env.while_it_lives(episode.sample())
            except ContextFull:
                if not episode.turn_ends:
                    raise
                return score
            step = await env.step(action)
            _take_answer(episode, action, step, name)
            score += step.reward
            if self._process_rewards:
                episode.step_reward(step.reward)
            if step.done:
                return score
            episode.observe(step.observations)


def _take_answer(episode: Episode, action: str, step: Step, name: str) -> None:
    """Cuts the answer where the environment did; another text than was sampled cannot be trained on."""
    if step.answer is None or step.answer == action:
        return
    try:
        episode.shorten(step.answer)
    except ValueError as error:
        raise EnvironmentFailed(
            f"the postprocessed_action of {name} was never sampled: {error}",
            hint="an environment may cut an answer's end off; it may not write another",
        ) from error
