"""Evaluation beside training: pass@k and the mean score of each environment, live and from a recording.

    python examples/evaluate.py                       # two made-up environments, on a bridge of its own
    python examples/evaluate.py runs/run1/records     # of a recording, made by a learner with --record

An environment puts a group with split="eval"; the learner scores it, and does not train on it.
"""

import os
import random
import sys
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from math import comb
from pathlib import Path
from typing import Any

from pyarrow.parquet import read_table

import shmbridge
from shmbridge.archive.recorder import Recorder

RIGHT = 1.0  # the score of a right answer


def pass_at_k(scores: Sequence[float], k: int) -> float:
    """The chance that one of k answers is right, if they are drawn from these without putting back."""
    wrong = sum(score < RIGHT for score in scores)
    return 1.0 - comb(wrong, k) / comb(len(scores), k)


class Scores:
    """The scores of groups, by environment and split."""

    def __init__(self) -> None:
        self._groups: defaultdict[tuple[str, str], list[list[float]]] = defaultdict(list)

    def add(self, env_name: str, split: str, scores: Sequence[float]) -> None:
        self._groups[env_name, split].append(list(scores))

    def print(self, title: str) -> None:
        print(f"{title:<28}{'groups':>8}{'mean':>8}{'pass@1':>8}{'pass@4':>8}")
        for (env_name, split), groups in sorted(self._groups.items()):
            means = [sum(scores) / len(scores) for scores in groups]
            columns = [means, *([pass_at_k(s, min(k, len(s))) for s in groups] for k in (1, 4))]
            numbers = "".join(f"{sum(column) / len(column):8.2f}" for column in columns)
            print(f"  {env_name:<18}{split:<8}{len(groups):>8}{numbers}")


def play(bridge: str, env_name: str, skill: float) -> None:
    """An environment: four groups to train on, then one to evaluate, ten times."""
    with shmbridge.Producer(bridge, env_name=env_name, lane_bytes="1M") as producer:
        for number in range(50):
            group = {
                "tokens": [[1, 2, 3]] * 8,
                "loss_mask": [[0, 1, 1]] * 8,
                "score": [1.0 if random.random() < skill else 0.1 for _ in range(8)],  # 0.1 for the form
            }
            producer.put(group, split="eval" if number % 5 == 4 else "train")


def train(bridge: str, folder: str) -> None:
    """A learner's side: groups of evaluation are scored as they arrive, and are in no batch."""
    evaluated = Scores()

    def score(group: Any) -> bool:
        meta = group.records[0].meta
        if meta.split == "eval":
            evaluated.add(meta.env_name, meta.split, [s for record in group.records for s in record["score"]])
        return True

    with shmbridge.Consumer(bridge, tap=Recorder(folder)) as consumer:
        consumer.screen(score)
        trained = 0
        try:
            for batch in consumer.batches(groups=8, timeout_s=2):
                assert all(meta.split == "train" for meta in batch.meta)
                trained += batch.group_count  # an optimizer step
        except shmbridge.ConsumerEmpty:
            pass
        print(f"{trained} groups trained, {consumer.stats()['left_out_total{eval}']:.0f} evaluated")
    evaluated.print("live")


def from_recording(folder: str) -> None:
    """Reads the finished parts; `shmbridge export FOLDER` finishes that of a killed recorder."""
    names = ["env_name", "split", "producer_id", "group_id", "score"]
    groups: defaultdict[tuple[str, ...], list[float]] = defaultdict(list)
    for row in read_table(sorted(Path(folder).glob("part-*.parquet")), columns=names).to_pylist():
        *key, score = (row[name] for name in names)
        groups[tuple(key)].append(score)
    scores = Scores()
    for (env_name, split, *_), group in groups.items():
        scores.add(env_name, split, group)
    scores.print("recorded")


def main() -> None:
    if len(sys.argv) > 1:
        from_recording(sys.argv[1])
        return
    bridge = f"evaluate-{os.getpid()}"
    with tempfile.TemporaryDirectory() as folder:
        for env_name, skill in (("algebra", 0.3), ("geometry", 0.6)):
            play(bridge, env_name, skill)
        train(bridge, folder)
        from_recording(folder)


if __name__ == "__main__":
    main()
