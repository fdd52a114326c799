"""An unedited Atropos environment as a `gem.Env`, turn by turn: `AtroposGemEnv`."""

from __future__ import annotations

import asyncio
import copy
import random
import weakref
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, ClassVar

import gem
from gem.utils.constants import TERMINAL_STATE

from shmbridge.errors import BadArgument, Closed
from shmbridge.producers import rewards
from shmbridge.producers.gem.own_process import RemoteAtropos, why_own_process
from shmbridge.producers.gem.runtime import BLOCKS, Runtime, environment_class, leave, runtime_of
from shmbridge.producers.gem.scores import RewardBridge, RewardOf, Rules, Score, collect
from shmbridge.producers.gem.turns import (
    Action,
    Answer,
    Ended,
    EnvFailed,
    GroupNotAlike,
    NotSuspendable,
    Outcome,
    ReplayedEpisode,
    Request,
    Said,
    SuspendedEpisode,
    SuspendedGroup,
    answer_of,
    quotes,
    turn_of,
)

_ENDS_S = 5.0  # for the thread of an environment to end in close()

Episode = SuspendedEpisode | ReplayedEpisode


class AtroposGemEnv(gem.Env):
    """Plays an Atropos environment turn by turn: what it asks the policy is the observation, `step` answers.

    The environment's `collect_trajectory` (or `collect_trajectories`, once for all siblings of a group) runs
    once per episode, in an event loop of a thread of its own, and stands still between the turns.
    Environments of an equal class and config share that loop and the environment object, which is set up once
    per process.

    For one thread at a time, any thread: `reset` and `step` block until the environment asks again or ends;
    with siblings, until those have answered, too, so that each needs a thread of its own. A context manager.

    Args:
        environment: a subclass of atroposlib's `BaseEnv`, "package.module:Class", or "path/to/file.py:Class".
        config: fields of its config, or a whole one; its `group_size` is this one's.
        tokenizer: name or folder of the policy's tokenizer, in place of the config's.
        reward_config: changes the reward: what `shmbridge.producers.rewards.RewardBridge` takes, such as a
            mapping, or an object that is awaited with each group and returns it with other scores. None: the
            environment's own score.
        reward_of: what an episode is worth that gave more than one row, or none: a function of its groups.
        group_size: so many environments that are reset with one seed in this process are siblings, whose
            answers the environment scores as one group; 1: each episode is a group.
        left_out: what an answer is worth that the environment leaves out of its group; None: EnvFailed.
        judge: who answers a judge's completions, fields of atroposlib's `APIServerConfig`; None: they
            are NotSuspendable.
        judge_calls: coroutine methods whose completions are a judge's; None: `score`, and those with "judge"
            in their name, and an answer that is quoted in another conversation is NotSuspendable; (): all are
            turns.
        replay: run an environment that cannot stand still again for every turn; `info["replays"]` counts it.
        process: run the environment in a process of its own, whose main thread it has, as signals need; None:
            if its script, or a module beside it, imports `math_verify` or uses signals itself.
        timeout_s: longest time in seconds between an action and the next request; None: any.
        items: take the environment's first so many items only, and item `seed % items` for a seed: in every
            process the same one, if the environment draws its items in the same order in each. None: all.
        seed: of the first `reset` without one.

    Raises:
        BadArgument: no such environment, or field of its config, or arguments that exclude each other.
    """

    takes_actions: ClassVar[bool] = True  # `step` takes an `Action`
    uses_process_random: ClassVar[bool] = False  # a seed names an item; `random` and NumPy are not seeded

    def __init__(
        self,
        environment: Any,
        *,
        config: Any = None,
        tokenizer: str | None = None,
        reward_config: Any = None,
        reward_of: RewardOf | None = None,
        group_size: int = 1,
        left_out: float | None = None,
        judge: Mapping[str, Any] | None = None,
        judge_calls: Sequence[str] | None = None,
        replay: bool = False,
        process: bool | None = None,
        timeout_s: float | None = 600.0,
        items: int | None = None,
        seed: int | None = None,
    ) -> None:
        super().__init__()
        self._arguments = {
            "environment": environment,
            "config": config,
            "tokenizer": tokenizer,
            "reward_config": reward_config,
            "reward_of": reward_of,
            "group_size": group_size,
            "left_out": left_out,
            "judge": judge,
            "judge_calls": judge_calls,
            "replay": replay,
            "timeout_s": timeout_s,
            "items": items,
            "process": process,
        }
        if group_size < 1 or (group_size > 1 and (replay or reward_of is not None)):
            raise BadArgument(
                f"group_size={group_size} with replay={replay}, reward_of={reward_of}",
                hint="siblings are played without replay and reward_of; group_size=1 plays each alone",
            )
        self._timeout_s, self._seed, self._replay = timeout_s, seed, replay
        self.observation = ""
        self._remote: RemoteAtropos | None = None
        if process or (process is None and why_own_process(environment)):
            there = {**self._arguments}
            del there["environment"], there["process"]
            self._remote = RemoteAtropos(environment, there)
            return
        self._tells_judges = judge_calls is None
        self._runtime: Runtime | None = None
        self._share()

    def _share(self) -> None:
        """Takes the runtime of its class and config, which is made if there is none."""
        given = self._arguments
        names = ("config", "tokenizer", "items", "group_size", "judge", "judge_calls")
        shared, kind = {name: given[name] for name in names}, environment_class(given["environment"])
        runtime = self._runtime = runtime_of(kind, **shared, user=self)
        bridge = _reward_bridge(given["reward_config"], runtime.tokenizer)
        self._rules = Rules(given["reward_of"], bridge, given["left_out"])
        self._running = _Running(runtime.loop)
        self._request: Request | None = None
        weakref.finalize(self, _Running.end, self._running)

    def reset(self, seed: int | None = None) -> tuple[str, dict[str, Any]]:
        """Begins an episode; returns the first observation, and what was asked. Blocks; ends the one before.

        Siblings of a group have one seed. One that is reset again before the group's end has answered nothing
        for the others: an empty answer, cut.

        Args:
            seed: the same seed gives the same item as long as an environment of this class and config lives
                in this process, or in any with `items`; None: the environment's next item.

        Returns:
            The text of all messages (joined by blank lines), or the prompt, and a dict: the whole
            `conversation`, `prompt` and `prompt_token_ids` where there are any, `new_messages`, `options`
            (max_tokens and the like), `rewritten` (the messages do not continue those before), `replays`.

        Raises:
            EnvFailed: the environment failed; its exception is the cause.
            NotSuspendable: it asks for completions in a way that has no turns, or for none.
            Closed: the environment was closed.
        """
        seed, self._seed = (self._seed if seed is None else seed), None
        if self._remote is not None:
            self.observation, info = self._remote.reset(seed)
            return self.observation, info
        self._running.end()
        if self._open().stuck:
            leave(self._open(), self, 0.0)
            self._share()
        return self._begin(seed)

    def step(self, action: str | Action) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Answers what the environment asked. Blocks until it asks again or ends.

        Args:
            action: text, or an `Action` with the tokens that were sampled and their log-probabilities.

        Returns:
            Observation, reward, terminated, truncated (always False), info. The reward is 0.0 until the
            environment ends. Then it is the score, and info has its `groups` (each an Atropos
            ScoredDataGroup, of siblings the one's own row), the last as `group` (None of an answer left out),
            `raw_score`, `sibling_scores`, `filtered`, whether the environment dropped its group after it was
            scored, and `retokenised`, whether tokens were made from text. If an action of the episode had no
            log-probabilities, groups have no `inference_logprobs`.

        Raises:
            BadArgument: no episode was begun, or the environment asks for log-probabilities and the action
                has none: nothing has changed.
            EnvFailed, NotSuspendable, Closed: as in `reset`; the episode is over, and has no reward.
        """
        if self._remote is not None:
            said = self._remote.step(action)
            self.observation = said[0]
            return said
        runtime, episode = self._open(), self._running.episode
        if episode is None:
            raise BadArgument("there is no episode", hint="call reset() first, and after an error or the end")
        reader: Future[Outcome] = Future()
        runtime.loop.call_soon_threadsafe(episode.resume, action, reader)
        outcome = self._outcome(reader)
        if isinstance(outcome, Ended):
            return self._last(episode, outcome.result)
        observation, info = self._turn(outcome, episode.answers[-1].text)
        return observation, 0.0, False, False, info

    def spawn(self, same_state: bool = False, **kwargs: Any) -> AtroposGemEnv:
        """Returns another environment; blocks while it is made.

        Args:
            same_state: begin an episode with the same item in it; this one must not have been answered yet.
            kwargs: arguments that differ.

        Raises:
            BadArgument: `same_state` in the middle of an episode, which cannot be copied.
            GroupNotAlike: the same item made another first observation.
        """
        other = AtroposGemEnv(**{**self._arguments, **kwargs})
        if same_state:
            try:
                other.begin_beside(self)
            except BaseException:
                other.close()
                raise
        return other

    def begin_beside(self, first: AtroposGemEnv) -> tuple[str, dict[str, Any]]:
        """Begins an episode, as `reset`, with the item of another one that was not answered yet.

        Raises:
            BadArgument: that one is in the middle of an episode.
            GroupNotAlike: the same item made another first observation.
        """
        if self._remote is not None and first._remote is not None:
            self.observation, info = self._remote.begin_beside(first._remote)
            return self.observation, info
        episode = first._running.episode
        if episode is None or episode.answers:
            raise BadArgument(
                "an episode is copied before its first answer, not later", hint="spawn right after reset()"
            )
        self._running.end()
        seed = episode.group.seed if isinstance(episode, SuspendedEpisode) else None
        observation, info = self._begin(seed, episode.item)
        if observation != first.observation:
            raise GroupNotAlike(
                f"one item began as {first.observation!r:.200} and {observation!r:.200}",
                hint="the environment must begin alike for the same item",
            )
        return observation, info

    def sample_random_action(self) -> str:
        """Returns the text of eight random tokens."""
        if self._remote is not None:
            return self._remote.sample_random_action()
        tokenizer = self._open().tokenizer
        return str(
            tokenizer.decode([random.randrange(len(tokenizer)) for _ in range(8)], skip_special_tokens=True)
        )

    def close(self) -> None:
        """Ends the episode, and the thread or process if no other uses it. Blocks for seconds at most."""
        if self._remote is not None:
            self._remote.close()
            return
        self._running.end()
        if self._runtime is not None:
            leave(self._runtime, self, _ENDS_S)
            self._runtime = None

    def __enter__(self) -> AtroposGemEnv:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def _open(self) -> Runtime:
        if self._runtime is None:
            raise Closed("the environment is closed", hint="make another")
        return self._runtime

    def _begin(self, seed: int | None, item: Any = None) -> tuple[str, dict[str, Any]]:
        runtime = self._open()
        episode = self._running.episode = self._waited(runtime.loop, self._episode(runtime, seed, item))
        self._request, reader = None, Future[Outcome]()
        runtime.loop.call_soon_threadsafe(episode.begin, reader)
        outcome = self._outcome(reader)
        if isinstance(outcome, Ended):
            self._running.end()
            raise NotSuspendable("the environment ended without asking for a completion")
        return self._turn(outcome, "")

    async def _episode(self, runtime: Runtime, seed: int | None, item: Any) -> Episode:
        env, rules, tokenizer, loop = runtime.env, self._rules, runtime.tokenizer, runtime.loop

        def body(item: Any, said: Said) -> Any:
            return collect(env, copy.deepcopy(item), rules, said)

        def answer(action: str | Action, request: Request) -> Answer:
            return answer_of(action, request, tokenizer)

        if self._replay:
            episode = ReplayedEpisode(loop, item or await runtime.item(seed), body, answer)
            runtime.episodes.add(episode)
            return episode
        return await runtime.join(
            seed, lambda item, size: SuspendedGroup(loop, item, body, answer, size), item
        )

    def _turn(self, request: Request, answer: str) -> tuple[str, dict[str, Any]]:
        turn = turn_of(request, self._request, answer)
        if self._tells_judges and turn.rewritten and quotes(request, self._request, answer):
            self._running.end()
            raise NotSuspendable(
                "the environment quotes the answer in another conversation: a judge's, or the policy's own",
                hint="judge_calls=(method names) are a judge's; judge_calls=() makes all turns",
            )
        self._request, self.observation = request, turn.observation
        said = {
            "conversation": request.messages,
            "prompt": request.prompt,
            "prompt_token_ids": request.token_ids,
        }
        info = {
            **{name: value for name, value in said.items() if value is not None},
            "new_messages": turn.new_messages,
            "options": dict(request.options),
            "rewritten": turn.rewritten,
            "replays": self._replays,
        }
        return self.observation, info

    def _last(self, episode: Episode, score: Score) -> tuple[str, float, bool, bool, dict[str, Any]]:
        self._running.end()
        groups = score.groups
        if any(answer.logprobs is None for answer in episode.answers):
            groups = [{k: v for k, v in group.items() if k != "inference_logprobs"} for group in groups]
        info = {
            "groups": groups,
            "group": groups[-1] if groups else None,
            "raw_score": score.raw,
            "sibling_scores": list(score.siblings),
            "filtered": score.filtered,
            "retokenised": any(answer.retokenised for answer in episode.answers),
            "replays": episode.replays,
        }
        self.observation = TERMINAL_STATE
        return TERMINAL_STATE, score.reward, True, False, info

    @property
    def _replays(self) -> int:
        return 0 if self._running.episode is None else self._running.episode.replays

    def _outcome(self, reader: Future[Outcome]) -> Outcome:
        """Waits for what the episode does next; after an error there is none, except for an unfit action."""
        try:
            return reader.result(self._timeout_s)
        except BadArgument:
            raise
        except TimeoutError as late:
            lacking = "" if self._running.episode is None else self._running.episode.lacking()
            self._running.end()
            raise self._late(f"did nothing for {self._timeout_s:g} s{lacking}") from late
        except BaseException:
            self._running.end()
            raise

    def _waited(self, loop: asyncio.AbstractEventLoop, work: Any) -> Any:
        future = asyncio.run_coroutine_threadsafe(work, loop)
        try:
            return future.result(self._timeout_s)
        except BaseException as wrong:
            future.cancel()
            if isinstance(wrong, TimeoutError):
                raise self._late(f"gave no item within {self._timeout_s:g} s") from wrong
            raise

    def _late(self, what: str) -> EnvFailed:
        stuck = self._open().is_stuck()
        what += ", and blocks its thread" if stuck else ""
        return EnvFailed(f"the environment {what}", hint=BLOCKS if stuck else "timeout_s=None waits")


class _Running:
    """The episode of one environment; it does not refer to the environment, which can be collected."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self.episode: Episode | None = None

    def end(self) -> None:
        """Ends the episode, if there is one. Never blocks."""
        episode, self.episode = self.episode, None
        if episode is not None:
            with suppress(RuntimeError):  # the loop is closed, and the episode with it
                self._loop.call_soon_threadsafe(episode.cancel)


def _reward_bridge(reward_config: Any, tokenizer: Any) -> RewardBridge | None:
    if reward_config is None or callable(reward_config):
        given: RewardBridge | None = reward_config
        return given
    return rewards.RewardBridge(reward_config, tokenizer=tokenizer)
