"""How far the sampler's log-probabilities are from the learner's, over tokens of the very weights in
training, in bfloat16; and in float32, where only a mistake could be large.

The sampler is the policy server's own: tokens one by one over a cache; the learner sees whole rows. Weights
are random, since no trained ones are available, and spread widely enough that the distribution is not flat. A
part of `make gpu`.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

import shmbridge
from shmbridge.bench.gpu import learner
from shmbridge.bench.gpu.part import Figures, arguments

GROUPS, PROMPT = 2, 16
ROWS = {"smallest": 2, "full": 8}
ANSWER = {"smallest": 8, "full": 128}
# (precision, temperature)
RUNS = {"smallest": (("bfloat16", 0.7),), "full": (("bfloat16", 1.0), ("bfloat16", 0.7), ("float32", 0.7))}


def main() -> int:
    """0 if every run was measured."""
    options = arguments(__doc__ or "")
    figures = Figures(options.out, options.seconds)
    until = time.monotonic() + options.seconds
    with tempfile.TemporaryDirectory(prefix="shmbridge-gpu-") as folder:
        model = learner.make_model(Path(folder) / "model", options.size)
        for precision, temperature in RUNS[options.size]:
            groups = _sample(model, options, precision, temperature)
            run_dir = Path(folder) / f"{precision}-{temperature}"
            found = _seen_by_learner(model, run_dir, groups, precision, options, until)
            tokens = sum(len(row) for group in groups for row in group["tokens"])
            figures.add(f"{precision}, T = {temperature}, {tokens} tokens", **found)
    return 0


def _sample(model: Path, options: Any, precision: str, temperature: float) -> list[dict[str, Any]]:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from shmbridge.consumers.policy_server.sampler import PolicyModel, Row, Sampling

    loaded: Any = AutoModelForCausalLM.from_pretrained(model)
    sampler = PolicyModel(
        loaded.to(getattr(torch, precision)).to(options.device), AutoTokenizer.from_pretrained(model), seed=7
    )
    random = np.random.default_rng(7)
    sampling = Sampling(max_tokens=ANSWER[options.size], temperature=temperature, ignore_eos=True)
    groups, count = [], ROWS[options.size]
    for _ in range(GROUPS):
        prompt = random.integers(64, learner.SHAPES[options.size]["vocab_size"], PROMPT).tolist()
        rows = [Row(prompt, sampling) for _ in range(count)]
        sampler.generate(rows)
        groups.append(
            {
                "tokens": [prompt + row.token_ids for row in rows],
                "loss_mask": [[0] * PROMPT + [1] * len(row.token_ids) for row in rows],
                "inference_logprobs": [[1.0] * PROMPT + row.logprobs for row in rows],
                "token_versions": [[-1] * PROMPT + [0] * len(row.token_ids) for row in rows],
                "temperature": [temperature] * count,
                "scores": random.random(count).tolist(),
            }
        )
    return groups


def _seen_by_learner(
    model: Path, run_dir: Path, groups: list[dict[str, Any]], precision: str, options: Any, until: float
) -> dict[str, Any]:
    bridge = f"gpu-mismatch-{os.getpid()}"
    rows = ROWS[options.size]
    with (
        learner.running(
            bridge, model, run_dir, options.device, GROUPS, rows, "--precision", precision
        ) as process,
        shmbridge.Producer(bridge) as producer,
    ):
        learner.wait_for_version(producer, process, until)
        first = learner.feed(
            producer, process, run_dir / "metrics.jsonl", 1, lambda n: groups[n % GROUPS], until
        )[0]
    return {
        name: value
        for name, value in sorted(first.items())
        if name.startswith(("mismatch_kl", "logprob_diff"))
    }


if __name__ == "__main__":
    sys.exit(main())
