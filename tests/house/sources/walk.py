"""Prints the Python files and functions that one group passes from `put` to the loss.

    python tests/house/sources/walk.py [-v]

One process, no batch formed ahead, a model of one layer; the third step is counted, so nothing of a first
time is in it. Compiled parts do not show. PYTHONPATH chooses the revision.
"""

import os
import sys
from types import FrameType
from typing import Any

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

import shmbridge
from shmbridge.consumers.learner.train.grpo_update import Learner, Objective

ROOT = os.path.realpath(os.path.dirname(os.path.dirname(shmbridge.__file__)))
GROUP = {
    "tokens": [[1, 2, 3, 4, 5], [6, 7, 8, 9]],
    "loss_mask": [[0, 0, 1, 1, 1], [0, 1, 1, 1]],
    "scores": [1.0, 0.0],
    "inference_logprobs": [[0, 0, -1.0, -1.0, -1.0], [0, -1.0, -1.0, -1.0]],
}
SIZES = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}


class Walk:
    """Which of our files and functions are entered, in order."""

    def __init__(self) -> None:
        self.files: dict[str, None] = {}
        self.functions: set[tuple[str, str]] = set()
        self.calls = 0

    def profile(self, frame: FrameType, event: str, _: Any) -> None:
        """For sys.setprofile."""
        name = frame.f_code.co_filename
        path = os.path.realpath(name)
        ours = (
            path.startswith(ROOT + "/") and "site-packages" not in path and path != os.path.realpath(__file__)
        )
        if event != "call" or name.startswith("<") or not ours:
            return
        self.files[path.removeprefix(ROOT + "/")] = None
        self.functions.add((path, frame.f_code.co_qualname))
        self.calls += 1


def main() -> None:
    """Takes three steps, and counts the last."""
    torch.set_num_threads(1)
    model = Qwen2ForCausalLM(Qwen2Config(**SIZES, num_attention_heads=2, num_key_value_heads=2))
    learner = Learner(model, Objective(), lambda step: 1e-3)
    bridge, walk = f"walk-{os.getpid()}", Walk()
    with shmbridge.Producer(bridge, env_name="walk") as producer, shmbridge.Consumer(bridge) as consumer:
        batches = consumer.batches(groups=1, layout="packed", prefetch=0, timeout_s=10)
        for step in range(3):
            sys.setprofile(walk.profile if step == 2 else None)
            producer.put(GROUP)
            learner.accumulate(next(batches))
            learner.apply()
        sys.setprofile(None)
        batches.close()
    shmbridge.clean(bridge, dry_run=False)
    print(f"{len(walk.files)} files, {len(walk.functions)} functions, {walk.calls} calls")
    if "-v" in sys.argv:
        print("\n".join(walk.files))


if __name__ == "__main__":
    main()
