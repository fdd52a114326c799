"""A real learner in a process of its own, for parts of `make gpu`: a model of random weights, groups of
arrays, its metrics read back.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import shmbridge

SHAPES: dict[str, dict[str, Any]] = {
    "smallest": {
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    },
    # Qwen2.5-0.5B's
    "full": {
        "vocab_size": 151936,
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
    },
}


def make_model(folder: Path, size: str, seed: int = 0) -> Path:
    """Saves a model of random weights in bfloat16, with a tokenizer of a few words."""
    import torch
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(seed)
    config = Qwen2Config(
        max_position_embeddings=4096, tie_word_embeddings=True, initializer_range=0.05, **SHAPES[size]
    )
    model: Any = Qwen2ForCausalLM(config)
    model.to(torch.bfloat16).save_pretrained(folder)
    words = models.WordLevel({f"w{number}": number for number in range(64)}, unk_token="w0")
    make: Any = PreTrainedTokenizerFast
    make(tokenizer_object=Tokenizer(words), unk_token="w0", eos_token="w1").save_pretrained(folder)
    return folder


@contextmanager
def running(
    bridge: str, model: Path, run_dir: Path, device: str, groups: int, group_size: int, *flags: str
) -> Iterator[subprocess.Popen[bytes]]:
    """`python -m shmbridge.consumers.grpo` on a bridge, in bfloat16 and without end; killed at the end of the
    block, and its bridge cleaned.
    """
    command = [sys.executable, "-m", "shmbridge.consumers.grpo", "--bridge", bridge, "--model", str(model)]
    command += ["--run-dir", str(run_dir), "--steps", "100000", "--save-every", "100000"]
    command += ["--device", device, "--precision", "bfloat16", "--lr", "1e-6"]
    command += ["--groups", str(groups), "--group-size", str(group_size), *flags]
    process = subprocess.Popen(command, stdout=sys.stderr)
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        shmbridge.clean(bridge, dry_run=False)


def feed(
    producer: shmbridge.Producer,
    learner: subprocess.Popen[bytes],
    metrics: Path,
    steps: int,
    group: Callable[[int], dict[str, Any]],
    until: float,
) -> list[dict[str, Any]]:
    """Puts groups until the learner has made its steps; their metrics.

    Raises:
        RuntimeError: the learner ended before, or the time is over.
    """
    number = 0
    while len(lines := _lines(metrics)) < steps:
        if learner.poll() is not None:
            raise RuntimeError(
                f"the learner ended with {learner.returncode} after {len(lines)} of {steps} steps"
            )
        if time.monotonic() > until:
            raise RuntimeError(f"{len(lines)} of {steps} steps were made in time")
        try:
            producer.put(group(number), timeout_s=0.2)
            number += 1
        except shmbridge.LaneFull:
            continue
    return lines


def wait_for_version(producer: shmbridge.Producer, learner: subprocess.Popen[bytes], until: float) -> None:
    """Returns once the learner has published a version. Raises RuntimeError as `feed`."""
    while producer.policy_version < 0:
        if learner.poll() is not None or time.monotonic() > until:
            raise RuntimeError(f"the learner published no version; it ended with {learner.poll()}")
        time.sleep(0.05)


def peak_memory_gib(process: subprocess.Popen[bytes]) -> float:
    """The most resident memory of a living process so far."""
    for line in Path(f"/proc/{process.pid}/status").read_text().splitlines():
        if line.startswith("VmHWM"):
            return int(line.split()[1]) / 2**20
    return 0.0


def _lines(metrics: Path) -> list[dict[str, Any]]:
    try:
        text = metrics.read_text()
    except FileNotFoundError:
        return []
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]
