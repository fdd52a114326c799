"""An Atropos environment for data in GSM8K's form: questions, and worked answers that end in `#### 42`.

    python -m shmbridge.producers.atropos --bridge run1 examples/gsm8k/gsm8k_env.py serve --env.group_size 8

An ordinary `BaseEnv`; it imports nothing of shmbridge. `--env.dataset` names a Hugging Face data set, or a
folder with `train.jsonl` and `test.jsonl`. An answer is right if its last number is the worked answer's: no
parser of LaTeX is needed. For upstream's own `environments/gsm8k_server.py` see README.md beside this file.
"""

import json
import random
import re
import time
from pathlib import Path
from typing import Any, TypedDict

from atroposlib.envs.base import APIServerConfig, BaseEnv, BaseEnvConfig, EvalHandlingEnum, ScoredDataGroup
from pydantic import Field

MODEL = "Qwen/Qwen2.5-0.5B-Instruct"
NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")
SYSTEM_PROMPT = "Solve the problem step by step. End with the answer alone on the last line, as in: #### 42"


class Problem(TypedDict):
    question: str
    answer: str


class Gsm8kConfig(BaseEnvConfig):
    dataset: str = Field(
        default="openai/gsm8k", description="Hugging Face data set, or a folder of train.jsonl and test.jsonl"
    )
    system_prompt: str = Field(
        default=SYSTEM_PROMPT, description="What stands in front of every question; empty for nothing"
    )
    temperature: float = Field(default=1.0, description="Sampling temperature of training rollouts")
    format_reward: float = Field(default=0.1, description="Score of a wrong answer that is marked with ####")
    eval_problems: int = Field(
        default=200, description="Problems of the test split that an evaluation answers"
    )
    seed: int = Field(default=0, description="Seed of the order of problems")
    reward_log: str | None = Field(
        default=None,
        description="File that gets one JSON line per group: time, mean score, share of right answers, size",
    )


class Gsm8kEnv(BaseEnv):
    name = "gsm8k"
    env_config_cls = Gsm8kConfig

    def __init__(self, config: Gsm8kConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        self.config: Gsm8kConfig = config
        self.right: list[float] = []
        self.eval_metrics: list[tuple[str, float]] = []

    @classmethod
    def config_init(cls) -> tuple[Gsm8kConfig, list[APIServerConfig]]:
        env_config = Gsm8kConfig(
            tokenizer_name=MODEL,
            group_size=8,
            max_token_length=512,
            max_num_workers=32,
            total_steps=10_000,
            steps_per_eval=25,
            eval_handling=EvalHandlingEnum.LIMIT_TRAIN,
            use_wandb=False,
            wandb_name=cls.name,
        )
        server_configs = [
            APIServerConfig(
                model_name=MODEL,
                tokenizer_name=MODEL,
                base_url="http://127.0.0.1:8001/v1",
                api_key="x",
                server_type="vllm",
            )
        ]
        return env_config, server_configs

    async def setup(self) -> None:
        self.train, self.test = problems(self.config.dataset, "train"), problems(self.config.dataset, "test")
        random.Random(self.config.seed).shuffle(self.train)
        self.next = 0

    async def get_next_item(self) -> Problem:
        problem = self.train[self.next % len(self.train)]
        self.next += 1
        return problem

    def messages(self, problem: Problem) -> list[dict[str, str]]:
        system = (
            [{"role": "system", "content": self.config.system_prompt}] if self.config.system_prompt else []
        )
        return [*system, {"role": "user", "content": problem["question"]}]

    async def collect_trajectories(self, item: Problem) -> tuple[ScoredDataGroup, list[Problem]]:
        async with self.server.managed_server(tokenizer=self.tokenizer) as managed:
            completion = await managed.chat_completion(
                messages=self.messages(item),
                n=self.config.group_size,
                max_tokens=self.config.max_token_length,
                temperature=self.config.temperature,
            )
            nodes = managed.get_state()["nodes"]

        texts = [choice.message.content or "" for choice in completion.choices]
        scores = [score(text, item["answer"], self.config.format_reward) for text in texts]
        self.log_rewards(scores, [float(is_right(text, item["answer"])) for text in texts])
        group = ScoredDataGroup(
            tokens=[node.tokens for node in nodes],
            masks=[node.masked_tokens for node in nodes],
            inference_logprobs=[node.logprobs for node in nodes],
            scores=scores,
            generation_params={"temperature": self.config.temperature},
        )
        return group, []

    def log_rewards(self, scores: list[float], right: list[float]) -> None:
        """Records the rewards here, before any filter between this group and a learner."""
        self.right.append(sum(right) / len(right))
        if self.config.reward_log is not None:
            line = {
                "t": time.time(),
                "mean": sum(scores) / len(scores),
                "right": self.right[-1],
                "n": len(scores),
            }
            with open(self.config.reward_log, "a") as log:
                log.write(json.dumps(line) + "\n")

    async def evaluate(self, *args: Any, **kwargs: Any) -> None:
        """Answers problems of the test split greedily."""
        asked = self.test[: self.config.eval_problems]
        started = time.time()
        right = []
        for problem in asked:
            completion = await self.server.chat_completion(
                messages=self.messages(problem),
                n=1,
                max_tokens=self.config.max_token_length,
                temperature=0.0,
                split="eval",
            )
            right.append(float(is_right(completion.choices[0].message.content or "", problem["answer"])))
        accuracy = sum(right) / len(right)
        self.eval_metrics.append(("eval/accuracy", accuracy))
        await self.evaluate_log({"eval/accuracy": accuracy}, start_time=started, end_time=time.time())

    async def wandb_log(self, wandb_metrics: dict[str, Any] | None = None) -> None:
        metrics = dict(wandb_metrics or {})
        if self.right:
            metrics["train/accuracy"] = sum(self.right) / len(self.right)
        metrics.update(self.eval_metrics)
        self.right, self.eval_metrics = [], []
        await super().wandb_log(metrics)


def problems(dataset: str, split: str) -> list[Problem]:
    """Returns the problems of a split. Blocks for the disk, or for a download."""
    if Path(dataset).is_dir():
        lines = (Path(dataset) / f"{split}.jsonl").read_text().splitlines()
        return [Problem(**json.loads(line)) for line in lines]
    from datasets import load_dataset

    return [
        Problem(question=row["question"], answer=row["answer"])
        for row in load_dataset(dataset, "main", split=split)
    ]


def number_of(text: str) -> float | None:
    """Returns the number that a text ends with: behind its last `####`, if there is any, else the last of
    all.
    """
    _, marked, behind = text.rpartition("####")
    found = NUMBER.findall(behind if marked else text)
    return float(found[0 if marked else -1].replace(",", "")) if found else None


def is_right(said: str, answer: str) -> bool:
    """Whether both come to the same number."""
    number = number_of(said)
    return number is not None and number == number_of(answer)


def score(said: str, answer: str, format_reward: float) -> float:
    """1 for the right number; `format_reward` for a wrong one in the right place; else 0."""
    if is_right(said, answer):
        return 1.0
    return format_reward if re.search(r"####\s*-?\d", said) else 0.0


if __name__ == "__main__":
    Gsm8kEnv.cli()
