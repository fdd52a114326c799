"""An Atropos environment: `>37` asks for the larger of two digits, `7`.

    python examples/larger_digit_env.py process --env.total_steps 4 --env.use_wandb false \\
        --env.data_path_to_save_groups runs/groups.jsonl

An ordinary `BaseEnv`, written as one would without shmbridge: it imports none of it. `echo_letters_env.py`
is the same with other questions; `demo.py` runs both.
"""

import json
import random
import time
from collections.abc import Iterator
from typing import Any

from atroposlib.envs.base import APIServerConfig, BaseEnv, BaseEnvConfig, EvalHandlingEnum, ScoredDataGroup
from pydantic import Field

Item = tuple[str, str]  # question, answer


class LargerDigitConfig(BaseEnvConfig):
    seed: int = Field(default=0, description="Seed of the stream of questions")
    temperature: float = Field(default=1.0, description="Sampling temperature of training rollouts")
    reward_log: str | None = Field(
        default=None, description="File that gets one JSON line per group: its time, mean reward and size"
    )


class LargerDigitEnv(BaseEnv):
    name = "larger_digit"
    env_config_cls = LargerDigitConfig

    def __init__(self, config: LargerDigitConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        self.config: LargerDigitConfig = config
        self.rewards: list[float] = []
        self.eval_metrics: list[tuple[str, float]] = []

    @classmethod
    def config_init(cls) -> tuple[LargerDigitConfig, list[APIServerConfig]]:
        env_config = LargerDigitConfig(
            tokenizer_name="runs/tiny",
            group_size=8,
            max_token_length=6,
            max_num_workers=16,
            total_steps=1000,
            steps_per_eval=100,
            eval_handling=EvalHandlingEnum.NONE,
            # A group of equal scores has no advantage, but it still carries the learner's entropy bonus.
            ensure_scores_are_not_same=False,
            use_wandb=False,
            wandb_name=cls.name,
        )
        # A list, even of one: with a bare config the server manager ignores base_url and tries four ports.
        server_configs = [
            APIServerConfig(
                model_name="policy",
                tokenizer_name="runs/tiny",
                base_url="http://127.0.0.1:9004/v1",
                api_key="x",
                server_type="vllm",
            )
        ]
        return env_config, server_configs

    async def setup(self) -> None:
        self.stream = self.questions()

    def questions(self) -> Iterator[Item]:
        """Yields training questions without end, the same for the same seed."""
        stream = random.Random(self.config.seed)
        while True:
            first, second = stream.choice("0123456789"), stream.choice("0123456789")
            yield f">{first}{second}", max(first, second)

    def fixed_questions(self) -> list[Item]:
        """Returns the questions of an evaluation."""
        pairs = [f"{index:02}" for index in range(0, 100, 7)]
        return [(f">{pair}", max(pair)) for pair in pairs]

    async def get_next_item(self) -> Item:
        return next(self.stream)

    async def collect_trajectories(self, item: Item) -> tuple[ScoredDataGroup, list[Item]]:
        question, answer = item
        async with self.server.managed_server(tokenizer=self.tokenizer) as managed:
            completion = await managed.chat_completion(
                messages=[{"role": "user", "content": question}],
                n=self.config.group_size,
                max_tokens=self.config.max_token_length,
                temperature=self.config.temperature,
            )
            nodes = managed.get_state()["nodes"]

        scores = [reward(choice.message.content, answer) for choice in completion.choices]
        self.log_reward(scores)
        group = ScoredDataGroup(
            tokens=[node.tokens for node in nodes],
            masks=[node.masked_tokens for node in nodes],
            inference_logprobs=[node.logprobs for node in nodes],
            scores=scores,
            generation_params={"temperature": self.config.temperature},
        )
        return group, []

    def log_reward(self, scores: list[float]) -> None:
        """Records the rewards here, before any filter between this group and a learner."""
        mean = sum(scores) / len(scores)
        self.rewards.append(mean)
        if self.config.reward_log is not None:
            with open(self.config.reward_log, "a") as log:
                log.write(json.dumps({"t": time.time(), "mean": mean, "n": len(scores)}) + "\n")

    async def evaluate(self, *args: Any, **kwargs: Any) -> None:
        """Answers the fixed questions greedily."""
        started = time.time()
        scores = []
        for question, answer in self.fixed_questions():
            completion = await self.server.chat_completion(
                messages=[{"role": "user", "content": question}],
                n=1,
                max_tokens=self.config.max_token_length,
                temperature=0.0,
                split="eval",
            )
            scores.append(reward(completion.choices[0].message.content, answer))
        accuracy = sum(scores) / len(scores)
        self.eval_metrics.append(("eval/reward", accuracy))
        await self.evaluate_log({"eval/reward": accuracy}, start_time=started, end_time=time.time())

    async def wandb_log(self, wandb_metrics: dict[str, Any] | None = None) -> None:
        metrics = dict(wandb_metrics or {})
        if self.rewards:
            metrics["train/reward"] = sum(self.rewards) / len(self.rewards)
        metrics.update(self.eval_metrics)
        self.rewards, self.eval_metrics = [], []
        await super().wandb_log(metrics)


def reward(completion: str | None, answer: str) -> float:
    """Share of positions that match: partial credit teaches content, length and where to end, all at once."""
    said = completion or ""
    return sum(a == b for a, b in zip(said, answer, strict=False)) / max(len(answer), len(said))


if __name__ == "__main__":
    LargerDigitEnv.cli()
