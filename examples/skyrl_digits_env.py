"""A SkyRL-Gym environment with a reward for each step, in the demo's loop: the larger digit, in two tries.

    shmbridge demo --env examples/skyrl_digits_env.py --step-rewards -- --process-rewards to_go

`LargerDigit` is an ordinary environment of skyrl_gym; `SkyRLAdapter` makes it one of Atropos. The learner
gets the reward of each try with the token where that try ends.
"""

import json
import random
import tempfile
import time
from pathlib import Path
from typing import Any

import skyrl_gym
from atroposlib.envs.base import APIServerConfig
from pydantic import Field
from skyrl_gym.envs.base_text_env import BaseTextEnv, BaseTextEnvStepOutput

from shmbridge.producers.skyrl_gym.adapter import SkyRLAdapter, SkyRLConfig

TRIES = (1.0, 0.5)  # points for a right answer at the first and at the second try


class LargerDigit(BaseTextEnv):
    """`>37` asks for `7`; after a wrong answer it asks once more."""

    def __init__(self, env_config: Any = None, extras: dict[str, Any] | None = None) -> None:
        super().__init__()
        self.answer = (extras or {})["reward_spec"]["ground_truth"]

    def step(self, action: str) -> BaseTextEnvStepOutput:
        right = action == self.answer
        points = TRIES[self.turns] if right else 0.0
        self.turns += 1
        done = right or self.turns == len(TRIES)
        again = [] if done else [{"role": "user", "content": "?"}]
        return BaseTextEnvStepOutput(observations=again, reward=points, done=done, metadata={})


class SkyRLDigitsConfig(SkyRLConfig):
    seed: int = Field(default=0, description="Seed of the questions")
    reward_log: str | None = Field(default=None, description="File for one JSON line per group")


class SkyRLDigitsEnv(SkyRLAdapter):
    name = "skyrl_digits"
    env_config_cls = SkyRLDigitsConfig
    config: SkyRLDigitsConfig

    @classmethod
    def config_init(cls) -> tuple[SkyRLDigitsConfig, list[APIServerConfig]]:
        _, servers = super().config_init()
        config = SkyRLDigitsConfig(
            max_token_length=6,  # of one answer
            ensure_scores_are_not_same=False,  # a group of equal scores still has the entropy bonus
            steps_per_eval=0,
            wandb_name=cls.name,
        )
        return config, servers

    async def setup(self) -> None:
        """Writes a data set in SkyRL's format: the prompt, the environment, and what that needs."""
        skyrl_gym.register("larger_digit", entry_point=LargerDigit)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "train.jsonl")
            path.write_text("\n".join(map(json.dumps, rows(self.config.seed))))
            self.config.skyrl_repo_id = str(path)
            await super().setup()

    async def collect_trajectories(self, item: int) -> tuple[dict[str, Any], list[int]]:
        """Plays a group, and notes its mean reward for the demo."""
        group, backlog = await super().collect_trajectories(item)
        if self.config.reward_log is not None:
            scores = group["scores"]
            line = {"t": time.time(), "mean": sum(scores) / len(scores), "n": len(scores)}
            with open(self.config.reward_log, "a") as log:
                log.write(json.dumps(line) + "\n")
        return group, backlog


def rows(seed: int) -> list[dict[str, Any]]:
    """Returns a thousand questions, the same for the same seed."""
    stream = random.Random(seed)
    pairs = [(stream.choice("0123456789"), stream.choice("0123456789")) for _ in range(1000)]
    return [
        {
            "prompt": [{"role": "user", "content": f">{first}{second}"}],
            "env_class": "larger_digit",
            "reward_spec": {"ground_truth": max(first, second)},
        }
        for first, second in pairs
    ]


if __name__ == "__main__":
    SkyRLDigitsEnv.cli()
