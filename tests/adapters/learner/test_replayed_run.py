"""A learner that records, and a learner of the replay: the same batches, losses and weights, bit by bit."""

from __future__ import annotations

import json
import random
import threading
from pathlib import Path

import pytest

import shmbridge
from shmbridge.archive.folder import read_archive
from shmbridge.consumers import grpo
from shmbridge.consumers.learner import checkpoint

STEPS, GROUPS = 4, 3
CHANGES = ("time", "_s", "per_s", "api_perf", "bridge/", "memory", "rate", "latency", "idle")


@pytest.fixture
def train(bridge, tiny_model, tmp_path, monkeypatch):
    """Runs a learner that records while `put` puts in a thread; gives its metrics, weights and records."""
    tiny_model(5).save_pretrained(tmp_path / "model")

    def run(name: str, put) -> tuple[list[dict], bytes, list]:
        folder, failed = tmp_path / name, []
        flags = ["--bridge", bridge, "--model", str(tmp_path / "model"), "--run-dir", str(folder)]
        flags += ["--steps", str(STEPS), "--groups", str(GROUPS), "--group-size", "2", "--lr", "1e-2"]
        flags += ["--device", "cpu", "--threads", "1", "--seed", "3", "--no-weights"]
        flags += ["--record", str(folder / "records"), "--batch-timeout", "30", "--batch-attempts", "1"]

        def putting() -> None:
            try:
                put()
            except BaseException as wrong:
                failed.append(wrong)

        thread = threading.Thread(target=putting)
        thread.start()
        assert grpo.main(flags) == 0
        thread.join(30)
        assert not failed
        metrics = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        saved = checkpoint.complete(folder / "checkpoints")[-1] / "model.safetensors"
        return metrics, saved.read_bytes(), list(read_archive(folder / "records"))

    return run


def steady(line: dict) -> dict:
    """A step's metrics without those of time and of the machine."""
    return {key: value for key, value in line.items() if not any(part in key for part in CHANGES)}


@pytest.mark.timeout(180)
def test_the_same_batches_losses_and_weights(train, bridge, tmp_path):
    from shmbridge.producers.replay import replay

    def environments() -> None:
        drawn = random.Random(7)
        with (
            shmbridge.Producer(bridge, "math", "1M") as math,
            shmbridge.Producer(bridge, "code", "1M") as code,
        ):
            for number in range(STEPS * GROUPS):
                lengths = [drawn.randrange(3, 9) for _ in range(2)]
                group = {
                    "tokens": [[drawn.randrange(28) for _ in range(n)] for n in lengths],
                    "loss_mask": [[0, *[1] * (n - 1)] for n in lengths],
                    "inference_logprobs": [[-drawn.random() for _ in range(n)] for n in lengths],
                    "score": [drawn.random(), drawn.random()],
                }
                (math if drawn.random() < 0.6 else code).put(group, group_id=number, timeout_s=30)

    first, weights, records = train("first", environments)
    again, same_weights, same_records = train(
        "again", lambda: replay(tmp_path / "first" / "records", bridge, speed="max", timeout_s=60)
    )
    assert len(first) == len(again) == STEPS
    for line, other in zip(first, again, strict=True):
        assert steady(other) == steady(line)
    assert {"loss", "tokens", "reward_mean"} <= steady(first[0]).keys()
    assert weights == same_weights
    assert len(records) == STEPS * GROUPS
    assert {record.env_name for record in records} == {"math", "code"}
    assert [(each.group_id, each.env_name) for each in same_records] == [
        (each.group_id, each.env_name) for each in records
    ]
    assert {Path(path).suffix for path in (tmp_path / "first" / "records").glob("part-*")} == {".parquet"}
