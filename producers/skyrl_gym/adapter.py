"""SkyRL-Gym as an Atropos environment: `SkyRLAdapter`, for runs whose environments are all of Atropos.


    if __name__ == "__main__":
        SkyRLAdapter.cli()

Such a script runs as any other: `python -m shmbridge.producers.atropos --step-rewards --bridge run1 script.py
serve --env.skyrl_repo_id DATA_SET`. A run without Atropos takes `python -m shmbridge.producers.skyrl_gym`.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any

from atroposlib.envs.base import APIServerConfig, BaseEnv, BaseEnvConfig
from pydantic import Field

from shmbridge.producers.atropos.lane import OWN_COLUMNS
from shmbridge.producers.rollout import (
    ChatFormat,
    Episode,
    Incomplete,
    Limits,
    Losses,
    Message,
    NoTokens,
    Sampled,
    Sampling,
    ServerFailed,
    Task,
    TooManyFailures,
    group_of,
    survivors,
)
from shmbridge.producers.skyrl_gym.environments import EnvProcess, check_registered, made_here, server_command
from shmbridge.producers.skyrl_gym.play import SkyRLPlay, SkyRLTask, SkyRLTasks, TagPair
from shmbridge.schema import ATROPOS_NO_LOGPROB

_MASKED = -100  # of `masks`

# What Atropos has no field for: its own rollout server drops them. On a bridge they are columns, rewards of
# steps with --step-rewards, as those of every environment.
_STEPS = ("step_rewards", "step_ends")
_BESIDE = ("trace_spans", "instance_id", "repetition_id", "turn_ends", "finish_reason")

log = logging.getLogger(__name__)


def scored_group(episodes: Sequence[Episode], env_metrics: dict[str, Any]) -> dict[str, Any]:
    """Returns a ScoredDataGroup of finished episodes, with `env_metrics` and rewards of steps. Never blocks.

    Raises:
        EpisodeUnfinished: an episode has no answer, or no score.
    """
    columns = group_of(episodes)
    group: dict[str, Any] = {
        "tokens": columns["tokens"],
        "masks": [
            [token if sampled else _MASKED for token, sampled in zip(each.tokens, each.mask, strict=True)]
            for each in episodes
        ],
        "scores": columns["score"],
        "messages": [[dict(message) for message in row] for row in columns["messages"]],
        "generation_params": {"temperature": episodes[0].sampling.temperature},
        "env_metrics": env_metrics,
        **{name: columns[name] for name in (*_STEPS, *_BESIDE) if name in columns},
        OWN_COLUMNS: list(_BESIDE),
    }
    if "inference_logprobs" in columns:
        group["inference_logprobs"] = [
            [
                logprob if sampled and not math.isnan(logprob) else ATROPOS_NO_LOGPROB
                for logprob, sampled in zip(each.logprobs or (), each.mask, strict=True)
            ]
            for each in episodes
        ]
    return group


class AtroposServer:
    """What `Episode` samples from, over the `server` of an Atropos environment.

    For one event loop; any number of tasks ask at once. Policy versions are not known here: the producer that
    runs the environment stamps them.

    Args:
        manager: an atroposlib ServerManager; its servers must be of the type "vllm" or "sglang".
        split: "train" or "eval": which of the servers' queues.
    """

    def __init__(self, manager: Any, split: str = "train") -> None:
        self._manager, self._split = manager, split

    async def sample(
        self, prompt: Sequence[int], sampling: Sampling, messages: Sequence[Message] = ()
    ) -> Sampled:
        """Returns one completion of `prompt`, with the log-probability of each token.

        Raises:
            NoTokens: the server is of a type without token ids, or sampled after another prompt.
            ServerFailed: it refused, or did not answer; Atropos asks three times.
        """
        try:
            answered = await self._manager.tokens_and_logprobs_completion(
                input_ids=list(prompt), n=1, split=self._split, **sampling.fields()
            )
        except Exception as error:  # of tenacity, aiohttp, or the server class
            cause = _last(error)
            if isinstance(cause, NotImplementedError):
                raise NoTokens(f"{cause}", hint='serve with server_type "vllm" or "sglang"') from error
            raise ServerFailed(f"Atropos' server: {cause!r}", hint="see the server's log") from error
        said, tokens, logprobs, reasons = answered
        if list(said) != list(prompt):
            raise NoTokens(
                f"the server sampled after {len(said)} tokens, not after the {len(prompt)} it was given",
                hint="a tokenizer that begins a text twice? Give its chat template one beginning",
            )
        if _reason(reasons[0]) == "error":
            raise ServerFailed("the server ended the answer with an error", hint="see the server's log")
        return Sampled(list(tokens[0]), list(logprobs[0]), [-1] * len(tokens[0]), _reason(reasons[0]))


def _last(error: BaseException) -> BaseException:
    """What Atropos' retries ended with."""
    attempt = getattr(error, "last_attempt", None)
    cause = attempt.exception() if attempt is not None else None
    return cause if cause is not None else error


def _reason(said: Any) -> Any:
    """A finish reason; SGLang's is an object with its type."""
    name = said.get("type") if isinstance(said, dict) else said
    return name if name in ("stop", "length", "abort", "error") else "stop"


class SkyRLConfig(BaseEnvConfig):
    """What an adapter of SkyRL-Gym is told, beside what every Atropos environment is."""

    skyrl_repo_id: str = Field(
        default="NovaSky-AI/Sky-AIME-5K", description="data set in SkyRL's format: a path, or a name"
    )
    skyrl_split: str = Field(default="train", description="part of the data set")
    skyrl_env: str = Field(default="", description="environment of all rows; empty: what each row says")
    skyrl_max_turns: int = Field(
        default=-1, description="most turns, for environments that use it; -1: theirs"
    )
    enable_process_rewards: bool = Field(default=True, description="forward the reward of each step")
    thought_start_tag: str = Field(default="<think>", description="tag before a reasoning trace")
    thought_end_tag: str = Field(default="</think>", description="tag after a reasoning trace")
    temperature: float = Field(default=1.0, description="of sampling")
    top_p: float = Field(default=1.0, description="of sampling")
    stop: str = Field(default="", description="text that ends an answer, or a JSON list of them")
    separate_process: bool = Field(default=False, description="run SkyRL-Gym in a process of its own")
    env_python: str = Field(default="", description="that process's interpreter; empty: this one")
    env_imports: str = Field(default="", description="modules that register environments, with commas")
    env_config: str = Field(default="", description="settings of the environment class, a JSON object")
    episode_s: float = Field(default=1800.0, description="deadline of an episode, seconds; 0: none")
    group_s: float = Field(default=3600.0, description="deadline of a group, seconds; 0: none")
    refill: int = Field(default=0, description="episodes of a group that may be played in place of lost ones")
    incomplete: Incomplete = Field(
        default="put", description="a group with lost episodes: put the others, or drop it"
    )
    stop_after_failures: int = Field(
        default=8, description="end after groups failed so many times in a row; 0: never"
    )


class SkyRLAdapter(BaseEnv):
    """Plays SkyRL-Gym episodes as groups of Atropos, with exact tokens, rewards of steps, and traces.

    `step_rewards`, `env_metrics`, and the columns of identity, turns and traces are no fields of Atropos: its
    own rollout server drops them, a bridge carries them. Runs in one event loop, as every BaseEnv, and blocks
    it only to start a process of its own.
    """

    name = "skyrl"
    env_config_cls: type[SkyRLConfig] = SkyRLConfig
    config: SkyRLConfig

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        config = self.config
        self._process: EnvProcess | None = None
        self._over: TooManyFailures | None = None
        self._env_config: dict[str, Any] = json.loads(config.env_config or "{}")
        self._chat = ChatFormat(self.tokenizer)
        self._sampler = AtroposServer(self.server)
        self._sampling = Sampling(
            max_tokens=config.max_token_length,
            temperature=config.temperature,
            top_p=config.top_p,
            stop=_texts(config.stop),
        )
        self._numbers = itertools.count()
        self._limits = Limits(
            config.episode_s or None, config.group_s or None, config.refill, config.incomplete
        )
        log.info("%s", self._limits)
        self.losses = Losses(config.stop_after_failures)
        self._play = SkyRLPlay(
            self._make,
            tags=[TagPair(config.thought_start_tag, config.thought_end_tag)],
            process_rewards=config.enable_process_rewards,
            max_turns=config.skyrl_max_turns if config.skyrl_max_turns > 0 else None,
        )

    @classmethod
    def config_init(cls) -> tuple[SkyRLConfig, list[APIServerConfig]]:
        """Returns the defaults: a server of token ids on port 9004, as shmbridge's policy server is."""
        server = APIServerConfig(
            model_name="policy", base_url="http://127.0.0.1:9004/v1", api_key="x", server_type="vllm"
        )
        return cls.env_config_cls(steps_per_eval=0), [server]

    def get_server_command(self) -> list[str]:
        """Returns the command of the process that serves the data set's environments. Never blocks."""
        config = self.config
        return server_command(
            config.skyrl_repo_id, python=config.env_python or None, split=config.skyrl_split
        )

    async def setup(self) -> None:
        """Reads the tasks, and starts the environments' process where it is wanted.

        Raises:
            BadTask: the data set cannot be read, is not in SkyRL's format, or wants unknown environments.
            EnvProcessEnded: the process did not start.
        """
        config = self.config
        if config.separate_process:
            self._process = EnvProcess(
                self.get_server_command(), modules=self._modules(), env_config=self._env_config
            )
            rows: Any = await asyncio.to_thread(self._process.rows)
            self._tasks = SkyRLTasks(rows, env_class=config.skyrl_env or None)
        else:
            self._tasks = await asyncio.to_thread(
                SkyRLTasks.load,
                config.skyrl_repo_id,
                split=config.skyrl_split,
                env_class=config.skyrl_env or None,
            )
            names = {self._tasks[number].data.env_class for number in range(len(self._tasks))}
            check_registered(names, self._modules())
        log.info("%d tasks of %s", len(self._tasks), config.skyrl_repo_id)

    async def get_next_item(self) -> int:
        """Returns the number of the next row, over and over.

        Raises:
            EnvProcessEnded, TooManyFailures: nothing but errors would come; BaseEnv ends with it.
        """
        if self._process is not None:
            self._process.check()
        if self._over is not None:
            raise self._over
        return next(self._numbers) % len(self._tasks)

    async def collect_trajectories(self, item: int) -> tuple[dict[str, Any], list[int]]:
        """Returns the group of one row; an episode that fails costs its row, and is counted in `losses`.

        Raises EpisodesLost if no row is left.
        """
        began = asyncio.get_running_loop().time()
        try:
            group = await self._group(item)
        except Exception as error:
            try:
                self.losses.group(error, began)
            except TooManyFailures as over:  # BaseEnv ends with what get_next_item raises
                self._over = over
            raise
        self.losses.put()
        return group, []

    async def _group(self, item: int) -> dict[str, Any]:
        task = await asyncio.to_thread(self._tasks.__getitem__, item)
        size = self.config.group_size
        episodes = await survivors(
            lambda number: self._episode(task, number),
            lambda episode: self._play(episode, task.data),
            size,
            self._limits,
            self.losses,
        )
        group = scored_group(episodes, self._play.env_metrics(episodes))
        if len(episodes) < size:
            group["group_overrides"] = {"group_size": len(episodes)}  # else BaseEnv skips it
        return group

    async def evaluate(self, *args: Any, **options: Any) -> None:
        """Does nothing: evaluate with another adapter on another split."""

    def _episode(self, task: Task[SkyRLTask], repetition: int) -> Episode:
        longest = (
            self.max_token_len - 1 if self.max_token_len > 0 else None
        )  # BaseEnv drops a group beyond it
        return Episode(
            self._sampler,
            self._chat,
            task.messages,
            self._sampling,
            context=longest,
            instance_id=task.instance_id or "",
            repetition_id=repetition,
        )

    def _modules(self) -> list[str]:
        return [name.strip() for name in self.config.env_imports.split(",") if name.strip()]

    def _make(self, env_class: str, extras: Mapping[str, Any]) -> Any:
        if self._process is not None:
            return self._process.make(env_class, dict(extras))
        return made_here(env_class, dict(extras), self._env_config)


def _texts(said: str) -> tuple[str, ...]:
    if said.startswith("["):
        return tuple(json.loads(said))
    return (said,) if said else ()
