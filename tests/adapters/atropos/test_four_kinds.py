"""Four kinds of environments on one bridge, one of them killed and started again in the middle: nothing is
lost, nothing comes twice.

The count is the lanes' own: produced = released + held + discarded. The content is what BaseEnv records, and,
for the killed one, whose file was not flushed, the groups that it can have made.
"""

from __future__ import annotations

import importlib.util
import signal
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import shmbridge

pytestmark = pytest.mark.timeout(300)

pytest.importorskip("atroposlib")

ENVS = Path(__file__).parent / "envs"
RUN = shmbridge.Run(batch_size=16, max_token_len=4096, num_steps=100000)


def module_of(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, ENVS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Learner:
    """Takes batches of four groups in a thread of its own, and keeps every group under its producer and
    sequence.
    """

    def __init__(self, consumer: shmbridge.Consumer) -> None:
        self._consumer = consumer
        self.groups: defaultdict[str, list[dict[str, Any]]] = defaultdict(list)  # of an environment
        self.sequences: defaultdict[str, list[int]] = defaultdict(list)  # of a producer
        self.steps: list[tuple[Any, Any]] = []
        self.batches = 0
        self.go = threading.Event()
        self.go.set()
        self._thread = threading.Thread(target=self._train)
        self._thread.start()

    def _train(self, groups: int = 4) -> None:
        for batch in self._consumer.batches(groups=groups, prefetch=0):
            self.go.wait(60)
            for record in batch.records:
                self.take(record)
            self.batches += 1

    def take(self, record: shmbridge.Record) -> None:
        meta = record.meta
        assert not meta.redelivered
        self.groups[meta.env_name].append(record.to_scored_data())
        self.sequences[meta.producer_id].append(meta.sequence)
        if meta.env_name == "stepwise":
            rewards, ends = ([row.tolist() for row in record[name]] for name in ("step_rewards", "step_ends"))
            self.steps.append((rewards, ends))

    def finish(self) -> None:
        """Takes the groups that fill no batch, too."""
        self._consumer.drain()
        self._thread.join(60)
        assert not self._thread.is_alive()
        self._train(groups=1)


def test_groups_of_four_kinds_come_once_each(
    bridge: str,
    start_env: Callable[..., Any],
    groups_file: ModuleType,
    model: Path,
    policy_url: str,
    tmp_path: Path,
) -> None:
    truth = {name: tmp_path / f"{name}.jsonl" for name in ("single", "multi", "stepwise", "again")}

    def saving(name: str) -> tuple[str, str]:
        return "--env.data_path_to_save_groups", str(truth[name])

    with shmbridge.Consumer(bridge, run=RUN) as consumer:
        learner = Learner(consumer)
        server = ("--openai.base_url", policy_url)
        single = (*server, "--openai.tokenizer_name", str(model), *saving("single"))
        # The groups of a killed environment are those it can have made: 40 ms each, so that some are under
        # way.
        killed = start_env("--env.collect_s", "0.04", script="seeded_env.py")
        living = [
            start_env(*single, script="single_turn.py", tokenizer=str(model)),
            start_env(*server, *saving("multi"), script="multi_turn.py", tokenizer=str(model)),
            start_env(*saving("stepwise"), script="stepwise.py", options=("--step-rewards",)),
        ]
        killed.until(lambda: len(learner.groups["seeded"]) >= 10, timeout_s=120)
        learner.go.clear()  # what it commits from now on lies in its lane when it dies
        killed.until(lambda: consumer.stats()["queue_groups"] >= 4)
        killed.end(signal.SIGKILL)
        learner.go.set()
        before = len(learner.groups["seeded"])
        living.append(start_env(*saving("again"), "--env.items", "20", script="seeded_env.py"))
        enough = {"single": 3, "multi": 3, "stepwise": 12, "seeded": before + 22}
        living[0].until(
            lambda: all(len(learner.groups[name]) >= least for name, least in enough.items()), timeout_s=120
        )
        for env in living:
            env.send(signal.SIGTERM)
        for env in living:
            assert env.wait() == 143, env.output[-3000:]
            assert "not delivered: none" in env.output
        deadline = time.monotonic() + 20
        while consumer.stats()["lanes_live"] and time.monotonic() < deadline:
            time.sleep(0.02)
        learner.finish()
        stats = consumer.stats()

    assert learner.batches > 0
    assert stats["records_total"] == stats["released_total"] + stats["held"] + stats["discarded_total"]
    assert (stats["held"], stats["discarded_total"], stats["dropped_total"]) == (0, 0, 0)
    assert sum(map(len, learner.groups.values())) == stats["records_total"]

    assert len(learner.sequences) == 5
    assert all(sorted(sequences) == list(range(len(sequences))) for sequences in learner.sequences.values())

    for name in ("single", "multi", "stepwise"):
        assert sorted(map(groups_file.as_text, learner.groups[name])) == groups_file.recorded(truth[name])
    check_seeded(learner.groups["seeded"], groups_file.recorded(truth["again"]), groups_file)
    check_steps(learner)


def check_seeded(groups: list[dict[str, Any]], again: list[str], groups_file: ModuleType) -> None:
    """Twice as many as the second wrote, less what the first had not committed: every one that it can have
    made, once.
    """
    module = module_of("seeded_env")
    got = sorted(map(groups_file.as_text, groups))
    of_first = list(got)
    for group in again:
        of_first.remove(group)  # ValueError: the second's, and not delivered
    assert len(of_first) == len(set(of_first)) >= 10
    made: dict[str, int] = {}
    for item in range(2 * len(of_first) + 20):
        each = module.groups_of(item)
        made |= {groups_file.as_text(group): item for group in (each if isinstance(each, list) else [each])}
    items = sorted(made[group] for group in of_first)  # KeyError: a group that no environment made
    assert set(range(items[-1] - 8)) <= set(items), "only what its 8 workers had under way may be missing"


def check_steps(learner: Learner) -> None:
    """A list of groups came step by step, its unknown key and the rewards of its messages too."""
    module = module_of("stepwise")
    assert all(set(group) >= {"seed", "step_rewards", "step_ends"} for group in learner.groups["stepwise"])
    for group, (rewards, ends) in zip(learner.groups["stepwise"], learner.steps, strict=True):
        turns = len(group["messages"][0]) // 2
        assert 1 <= turns <= module.STEPS
        assert rewards == [[turn + row / 4 for turn in range(turns)] for row in range(4)]
        assert ends == [[3 * (turn + 2) for turn in range(turns)]] * 4
