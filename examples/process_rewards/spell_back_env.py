"""An environment with rewards of steps: say twelve letters back, `acdbbeadcabe` → `acdbbeadcabe`, each letter
a step.

    python examples/process_rewards/spell_back_env.py --bridge run1 --model runs/tiny --rewards steps

Plain Python, no framework: it samples with the newest weights of the bridge, judges every answer, and puts
one batch of groups into its lane, then waits for the next weights: everything it sends is on-policy, and a
run with one seed repeats itself. Ends with status 0 once the exact answers reach the goal, 3 if they never
do.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import shmbridge
from shmbridge.consumers.policy_server.engine import WeightsFollower
from shmbridge.consumers.policy_server.sampler import PolicyModel, Row, Sampling
from shmbridge.weights import WeightsReader

LETTERS = "abcde"
STEPS = 12
WINDOW = 4  # batches over which the share of exact answers is measured
NOT_REACHED = 3

Flags = list[bool]  # one per token of an answer: whether it is the right one


# A judge's result for an answer: the score of the whole, always between 0 and 1.
SCORES: dict[str, Callable[[Flags], float]] = {
    "steps": lambda right: float(exact(right)),  # and the reward of each step
    "graded": lambda right: sum(right) / STEPS,
    "binary": lambda right: float(exact(right)),
}


def exact(right: Flags) -> bool:
    """Whether every step is there and right."""
    return len(right) == STEPS and all(right)


def questions(seed: int) -> Iterator[str]:
    """Yields letters to say back, without end, the same for the same seed."""
    stream = random.Random(seed)
    while True:
        yield "".join(stream.choices(LETTERS, k=STEPS))


class Policy:
    """The model that is trained, kept at the newest weights of a bridge.

    Args:
        bridge: whose weights to follow.
        model: folder of the model and its tokenizer.
        seed: of the sampling.
    """

    def __init__(self, bridge: str, model: Path, seed: int) -> None:
        network = AutoModelForCausalLM.from_pretrained(model)
        self.tokenizer = AutoTokenizer.from_pretrained(model)
        self._policy = PolicyModel(network, self.tokenizer, version=-1, seed=seed)
        self._follower = WeightsFollower(WeightsReader(bridge), network)

    def wait_newer(self, timeout_s: float) -> int:
        """Loads newer weights than the last; returns their version. Blocks; TimeoutError if none come."""
        deadline = time.monotonic() + timeout_s
        while (version := self._follower.refresh()) is None:
            if time.monotonic() > deadline:
                raise TimeoutError(f"no new weights within {timeout_s:.0f} s: does the learner run?")
            time.sleep(0.001)
        return version

    def answer(self, prompts: Sequence[list[int]], answers: int) -> list[Row]:
        """Samples so many answers to each prompt, prompt after prompt. Blocks for the compute."""
        rows = [Row(prompt, Sampling(max_tokens=STEPS)) for prompt in prompts for _ in range(answers)]
        self._policy.generate(rows)
        return rows

    def prompt(self, question: str) -> list[int]:
        """Returns the question's tokens."""
        text = self.tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], tokenize=False, add_generation_prompt=True
        )
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False)
        return ids

    def close(self) -> None:
        """Closes the bridge's weights."""
        self._follower.close()


def group(rows: Sequence[Row], answer_ids: list[int], rewards: str) -> tuple[dict[str, Any], list[Flags]]:
    """Returns the group of one question's answers as the bridge takes it, and the right tokens of each."""
    right = [
        [token == wanted for token, wanted in zip(row.token_ids, answer_ids, strict=False)] for row in rows
    ]
    columns: dict[str, Any] = {
        "tokens": [[*row.prompt, *row.token_ids] for row in rows],
        "loss_mask": [[0] * len(row.prompt) + [1] * len(row.token_ids) for row in rows],
        "inference_logprobs": [[1.0] * len(row.prompt) + row.logprobs for row in rows],
        "prompt_length": [len(row.prompt) for row in rows],
        "score": [SCORES[rewards](flags) for flags in right],
    }
    if rewards == "steps":  # a step is one token here; of a model that reasons it would be a line
        columns["step_rewards"] = [[float(flag) for flag in flags] for flags in right]
        columns["step_ends"] = [
            list(range(len(row.prompt) + 1, len(row.prompt) + len(row.token_ids) + 1)) for row in rows
        ]
    return columns, right


def run(options: argparse.Namespace) -> int:
    """Samples, judges and puts until the goal or the limit; returns the exit status. Blocks for minutes."""
    newest: list[float] = []  # share of exact answers per batch
    stream = questions(options.seed)
    with (
        closing(Policy(options.bridge, options.model, options.seed)) as policy,
        shmbridge.Producer(options.bridge, env_name="spell_back", lane_bytes="4M") as producer,
        options.log.open("a") as log,
    ):
        for done in range(options.groups, options.limit + 1, options.groups):
            version = policy.wait_newer(options.patience)
            asked = [next(stream) for _ in range(options.groups)]
            rows = policy.answer([policy.prompt(question) for question in asked], options.group_size)
            flags: list[Flags] = []
            for index, question in enumerate(asked):
                own = rows[index * options.group_size : (index + 1) * options.group_size]
                wanted = policy.tokenizer.convert_tokens_to_ids(list(question))
                columns, judged = group(own, wanted, options.rewards)
                producer.put(columns, policy_version=version, timeout_s=options.patience)
                flags += judged
            newest.append(sum(map(exact, flags)) / len(flags))
            right = sum(map(sum, flags)) / (len(flags) * STEPS)
            log.write(json.dumps({"groups": done, "exact": newest[-1], "right": right}) + "\n")
            log.flush()
            if len(newest) >= WINDOW and sum(newest[-WINDOW:]) / WINDOW >= options.goal:
                return 0
    return NOT_REACHED


def main() -> int:
    parser = argparse.ArgumentParser(
        description="Twelve letters to say back, judged letter by letter or as a whole."
    )
    parser.add_argument(
        "--bridge", required=True, metavar="NAME", help="where groups go and weights come from"
    )
    parser.add_argument("--model", required=True, type=Path, metavar="DIR", help="the learner's model")
    parser.add_argument("--rewards", choices=SCORES, default="steps", help="what the judge says [steps]")
    parser.add_argument("--groups", type=int, default=16, help="sent per weights: the learner's batch [16]")
    parser.add_argument("--group-size", type=int, default=8, help="answers to a question [8]")
    parser.add_argument("--limit", type=int, default=6400, help="groups after which to give up [6400]")
    parser.add_argument("--goal", type=float, default=0.9, help="share of exact answers to reach [0.9]")
    parser.add_argument("--seed", type=int, default=1, help="of the questions and the sampling [1]")
    parser.add_argument("--log", type=Path, default=Path("spell_back.jsonl"), help="one line per batch")
    parser.add_argument(
        "--patience", type=float, default=120.0, metavar="SECONDS", help="for new weights [120]"
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    return run(options)


if __name__ == "__main__":
    raise SystemExit(main())
