"""Plays episodes of SkyRL-Gym environments: `SkyRLPlay`, which `Rollout.run` takes with `SkyRLTasks`."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any
from weakref import WeakKeyDictionary

from shmbridge.producers.rollout import CallThreads, ContextFull, Episode
from shmbridge.producers.skyrl_gym.errors import EnvironmentFailed
from shmbridge.producers.skyrl_gym.held_env import HeldEnv
from shmbridge.producers.skyrl_gym.local_env import made_here
from shmbridge.producers.skyrl_gym.step_output import Step, plain
from shmbridge.producers.skyrl_gym.tasks import SkyRLTask
from shmbridge.producers.skyrl_gym.traces import THINK, TagPair, Trace, traces_of

Make = Callable[[str, dict[str, Any]], Any]  # env_class, extras -> environment


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

    def close(self) -> None:
        """Does nothing: a thread ends with its calls. For programs that were written before that."""

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
