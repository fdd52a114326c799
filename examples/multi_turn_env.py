"""Multi-turn episodes with a tool, put by hand: a question, a call of the calculator, its result, an answer.

    python examples/multi_turn_env.py

The calculator is executed. The policy is a toy, which calls it or guesses; every character is a token. The
second half is the learner's side: it checks that exactly what the policy said is trained, and credits turns.
"""

import operator
import os
import random
import re
from typing import Any

import numpy as np

import shmbridge
from shmbridge.consumers.advantages.credit import Credit, credited

OPERATORS = {"+": operator.add, "-": operator.sub, "*": operator.mul}


def calculator(call: str) -> str:
    """The tool: `calc 17*23` -> `391`."""
    if (parts := re.fullmatch(r"calc (\d+)([-+*])(\d+)", call)) is None:
        return "error: not a call"
    return str(OPERATORS[parts[2]](int(parts[1]), int(parts[3])))


def policy(choices: dict[str, float]) -> tuple[str, list[float]]:
    """Samples a text; returns it with the log-probability of each token, an end token included.

    No two choices begin alike, so the first token decides, and the others are certain.
    """
    (text,) = random.choices(list(choices), list(choices.values()))
    return text, [float(np.log(choices[text])), *[0.0] * len(text)]


class Episode:
    """One episode is one row: everything that was said, in order."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.loss_mask: list[int] = []
        self.inference_logprobs: list[float] = []
        self.turn_ends: list[int] = []
        self.step_rewards: list[float] = []
        self.messages: list[dict[str, str]] = []

    def hear(self, role: str, text: str) -> None:
        """What user or tool said is in the row, and is not trained."""
        self.messages.append({"role": role, "content": text})
        self._append(f"{role}: {text}\nassistant: ", mask=0)

    def say(self, text: str, logprobs: list[float]) -> None:
        """What the policy sampled is trained, its end token included."""
        self.messages.append({"role": "assistant", "content": text})
        self._append(f"{text}\n", mask=1, logprobs=logprobs)
        self.turn_ends.append(len(self.tokens))  # exclusive

    def _append(self, text: str, mask: int, logprobs: list[float] | None = None) -> None:
        self.tokens += text.encode()
        self.loss_mask += [mask] * len(text)
        self.inference_logprobs += logprobs or [0.0] * len(text)


def play(question: str, right: str) -> dict[str, Any]:
    """Plays an episode; returns its row."""
    episode = Episode()
    episode.hear("user", f"{question}?")
    text, logprobs = policy({f"calc {question}": 0.6, "I guess 7": 0.4})
    episode.say(text, logprobs)
    called = text.startswith("calc")
    episode.step_rewards.append(0.5 if called else 0.0)  # a call is a step in the right direction
    if called:
        episode.hear("tool", calculator(text))
        text, logprobs = policy({right: 0.8, "no idea": 0.2})
        episode.say(text, logprobs)
        episode.step_rewards.append(1.0 if text == right else 0.0)
    row = vars(episode)
    return row | {
        "step_ends": episode.turn_ends,  # here each turn is a step
        "prompt_length": episode.loss_mask.index(1),
        "score": float(text == right),
    }


def spans(mask: np.ndarray) -> np.ndarray:
    """The begin and end of each run of trained tokens: (n, 2)."""
    return np.flatnonzero(np.diff(mask, prepend=0, append=0)).reshape(-1, 2)


def text_of(tokens: np.ndarray) -> str:
    return bytes(tokens.astype(np.uint8)).decode()


def check(record: shmbridge.Record) -> None:
    """Raises AssertionError unless exactly the policy's own words are trained."""
    for row, messages in enumerate(record.json("messages")):
        tokens, mask = record["tokens"][row], record["loss_mask"][row]
        said = [message["content"] + "\n" for message in messages if message["role"] == "assistant"]
        assert [text_of(tokens[begin:end]) for begin, end in spans(mask)] == said
        assert record["turn_ends"][row].tolist() == [end for _, end in spans(mask)]
        assert not record["inference_logprobs"][row][mask == 0].any()


def show(batch: shmbridge.Batch, advantages: np.ndarray) -> None:
    """Prints the row of most turns, with the advantage of each thing that the policy said."""
    row = max(range(len(batch)), key=lambda row: len(batch.turn_ends[row]))
    tokens, mask, worth = (
        each[batch.cu_seqlens[row] : batch.cu_seqlens[row + 1]]
        for each in (batch.tokens, batch.loss_mask, advantages)
    )
    at = 0
    for begin, end in spans(mask):
        print(text_of(tokens[at:begin]), end="")
        print(f"[{text_of(tokens[begin:end]).rstrip()}]  advantage {worth[begin]:+.2f}")
        at = end
    print(f"{len(batch)} episodes; what the policy said is trained: {mask.sum()} of {len(mask)} tokens here")


def main() -> None:
    bridge = f"multi-turn-{os.getpid()}"
    with shmbridge.Consumer(bridge) as consumer:
        with shmbridge.Producer(bridge, env_name="calculator", lane_bytes="1M") as producer:
            for _ in range(4):
                one, other = random.randint(2, 99), random.randint(2, 99)
                rows = [play(f"{one}*{other}", str(one * other)) for _ in range(4)]
                producer.put({name: [row[name] for row in rows] for name in rows[0]})
        with next(consumer.batches(groups=4, timeout_s=10)) as batch:
            for record in batch.records:
                check(record)
            by_step = Credit(steps="step", step_over="place")  # a half from the step, a half from the score
            advantages, _ = credited(batch, batch.loss_mask.astype(bool), by_step)
            show(batch, advantages)


if __name__ == "__main__":
    main()
