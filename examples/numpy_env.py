"""An environment in numpy alone: it samples with the learner's newest weights, scores, puts groups.

    python examples/numpy_env.py [BRIDGE [GROUPS]]        # default: run1 50; own_loop.py is a learner for it

The task: answer with token 7. The policy is a table, token -> logits of the next token; before the first
weights every token is equally likely. It ends after that many groups, or with its learner's run.
"""

import sys
from typing import Any

import numpy as np

import shmbridge
from shmbridge.weights import WeightsReader

PROMPT, ANSWER, VOCABULARY, ROWS, WANTED = [1, 2], 3, 16, 8, 7


def rollouts(table: np.ndarray, random: np.random.Generator) -> dict[str, Any]:
    """Samples a group: eight answers to the prompt."""
    tokens = np.tile(np.int32(PROMPT), (ROWS, 1))
    logprobs = np.zeros((ROWS, len(PROMPT)), np.float32)  # nobody sampled the prompt
    for _ in range(ANSWER):
        logits = table[tokens[:, -1]]
        choices = logits - np.logaddexp.reduce(logits, axis=1, keepdims=True)
        sampled = (choices + random.gumbel(size=choices.shape)).argmax(axis=1)[:, None]
        tokens = np.hstack([tokens, sampled.astype(np.int32)])
        logprobs = np.hstack([logprobs, np.take_along_axis(choices, sampled, axis=1)])
    answers = tokens[:, len(PROMPT) :]
    return {
        "tokens": list(tokens),  # a row for each rollout
        "loss_mask": [[0] * len(PROMPT) + [1] * ANSWER] * ROWS,
        "inference_logprobs": list(logprobs.astype(np.float32)),
        "score": (answers == WANTED).mean(axis=1),
    }


def main(bridge: str = "run1", groups: str = "50") -> None:
    random = np.random.default_rng()
    table, version, scores = np.zeros((VOCABULARY, VOCABULARY), np.float32), None, []
    with shmbridge.Producer(bridge, env_name="sevens", lane_bytes="64K") as producer:
        weights = WeightsReader(bridge)
        while len(scores) < int(groups):
            if weights.version != version:
                version, tensors = weights.copy()
                table = tensors["weight"]
            group = rollouts(table, random)
            try:
                producer.put(group, policy_version=version, timeout_s=60)  # waits while the lane is full
            except (shmbridge.BridgeDraining, shmbridge.LaneFull):
                break  # the learner's run is over, or no learner takes groups
            scores.append(group["score"].mean())
    first, last = np.mean(scores[:10]), np.mean(scores[-10:])
    print(f"{len(scores)} groups put; mean score of the first ten {first:.2f}, of the last ten {last:.2f}")


if __name__ == "__main__":
    main(*sys.argv[1:])
