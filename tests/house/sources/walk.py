"""Prints the Python files and functions that one group passes from `put` to the loss, or that a model's
weights pass from `push` to an engine.

    python tests/house/sources/walk.py [-v]
    .venvs/vllm/bin/python tests/house/sources/walk.py weights [-v]

One process, no batch formed ahead, a model of one layer, a vLLM that runs in this process; the third step or
push is counted, so first-time work is not in it. Compiled parts do not show. PYTHONPATH chooses the revision.
"""

import os
import sys
import tempfile
import threading
from types import FrameType
from typing import Any

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

import shmbridge

ROOT = os.path.realpath(os.path.dirname(os.path.dirname(shmbridge.__file__)))
GROUP = {
    "tokens": [[1, 2, 3, 4, 5], [6, 7, 8, 9]],
    "loss_mask": [[0, 0, 1, 1, 1], [0, 1, 1, 1]],
    "scores": [1.0, 0.0],
    "inference_logprobs": [[0, 0, -1.0, -1.0, -1.0], [0, -1.0, -1.0, -1.0]],
}
SIZES = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1}


class Walk:
    """Records which of our files and functions are entered, in order."""

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


def make_model() -> Qwen2ForCausalLM:
    return Qwen2ForCausalLM(Qwen2Config(**SIZES, num_attention_heads=2, num_key_value_heads=2))


def walk_group(bridge: str, walk: Walk) -> None:
    """Takes three steps, and counts the last."""
    from shmbridge.consumers.learner.train.grpo_update import Learner, Objective

    learner = Learner(make_model(), Objective(), lambda step: 1e-3)
    with shmbridge.Producer(bridge, env_name="walk") as producer, shmbridge.Consumer(bridge) as consumer:
        batches = consumer.batches(groups=1, layout="packed", prefetch=0, timeout_s=10)
        for step in range(3):
            sys.setprofile(walk.profile if step == 2 else None)
            producer.put(GROUP)
            learner.accumulate(next(batches))
            learner.apply()
        sys.setprofile(None)
        batches.close()


def walk_weights(bridge: str, walk: Walk) -> None:
    """Pushes three versions into a vLLM, and counts the last; threads of ours, and threads that begin then,
    count.
    """
    os.environ.update(
        VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_CPU_KVCACHE_SPACE="1", VLLM_LOGGING_LEVEL="ERROR"
    )
    from vllm import LLM
    from vllm.config import WeightTransferConfig

    from shmbridge.consumers.weight_sync import WeightSync

    model = make_model()
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        engine = LLM(
            folder,
            skip_tokenizer_init=True,
            dtype="float32",
            enforce_eager=True,
            max_model_len=64,
            weight_transfer_config=WeightTransferConfig(backend="shmbridge"),
        )
    with WeightSync(bridge, engine) as sync:
        for push in range(3):
            if push == 2:
                threading.setprofile(walk.profile)
                sys.setprofile(walk.profile)
            sync.push(model)
        sys.setprofile(None)
    engine.llm_engine.engine_core.shutdown()


def main() -> None:
    torch.set_num_threads(1)
    bridge, walk = f"walk-{os.getpid()}", Walk()
    (walk_weights if "weights" in sys.argv else walk_group)(bridge, walk)
    shmbridge.clean(bridge, dry_run=False)
    print(f"{len(walk.files)} files, {len(walk.functions)} functions, {walk.calls} calls")
    if "-v" in sys.argv:
        print("\n".join(walk.files))


if __name__ == "__main__":
    main()
