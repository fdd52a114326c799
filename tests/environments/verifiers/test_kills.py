"""kill -9 of the environment, of the inference server, and of the learner, in one run: no task is lost, none
is trained twice unmarked.
"""

from __future__ import annotations

import json
import subprocess
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import shmbridge
from shmbridge import ConsumerEmpty

pytestmark = pytest.mark.timeout(300)

TASKS, GROUP, STEPS, SAVED = 14, 2, 6, 3


def until(condition: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    give_up = time.monotonic() + 90
    while not condition():
        assert time.monotonic() < give_up
        assert process.poll() is None
        time.sleep(0.02)


def killed(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.wait(30)


def test_environment_server_and_learner_are_killed(
    bridge: str, tiny: Path, serve: Callable[..., Any], program: Callable[..., Any], tmp_path: Path
) -> None:
    """The environment goes on behind the tasks that are over, and its episodes wait for the next server on
    the same port. The learner is killed between two checkpoints: the resumed model has every group once, but
    for those that still wait. Each step trains two groups, and each is named in samples.jsonl.
    """
    run, position = tmp_path / "run", tmp_path / "position"

    def lines(name: str) -> list[dict[str, Any]]:
        text = (run / name).read_text() if (run / name).exists() else ""
        return [json.loads(each) for each in text.splitlines(keepends=True) if each.endswith("\n")]

    def over() -> int:
        return int(json.loads(position.read_text())["next"]) if position.exists() else 0

    learns = [
        *("--bridge", bridge, "--model", tiny, "--run-dir", run, "--steps", STEPS, "--save-every", SAVED),
        *("--groups", 2, "--group-size", GROUP, "--sample-every", 1, "--threads", 1, "--max-token-len", 64),
    ]
    url, server = serve()
    plays = [
        *("--verifiers", "larger_digit", "--bridge", bridge, "--server", url, "--tokenizer", tiny),
        *("--env-config", "agent.runtime.type=subprocess", f"taskset.tasks={TASKS}", "--epochs", 1),
        *("--group-size", GROUP, "--concurrency", 1, "--max-tokens", 4, "--lane-bytes", "4M"),
        *("--resume", position),
    ]
    learner = program("shmbridge", "train", *learns)
    environment = program("shmbridge", "env", *plays)
    until(lambda: over() >= 3, environment)
    killed(environment)
    environment = program("shmbridge", "env", *plays)
    until(lambda: over() >= 2 * SAVED, environment)
    killed(server)
    serve(int(url.rsplit(":", 1)[1]))
    until(lambda: len(lines("metrics.jsonl")) > SAVED, learner)
    killed(learner)
    assert environment.wait(90) == 0
    assert "lost: none" in environment.stdout.read()

    first, before = lines("samples.jsonl"), len(lines("metrics.jsonl"))
    saved = max(int(each.name.split("-")[1]) for each in (run / "checkpoints").glob("step-*"))
    in_checkpoint = [each["group_id"] for each in first if each["step"] <= saved]
    not_in_it = {each["group_id"] for each in first if each["step"] > saved}
    assert len(in_checkpoint) == 2 * saved
    assert not_in_it
    assert program("shmbridge", "train", *learns, "--resume").wait(90) == 0

    second = lines("samples.jsonl")[len(first) :]
    assert [each["step"] for each in second] == [
        each for step in range(saved, STEPS) for each in [step + 1] * 2
    ]
    trained = Counter([*in_checkpoint, *(each["group_id"] for each in second)])
    waiting: Counter[str] = Counter()
    with shmbridge.Consumer(bridge) as consumer:
        while sum(waiting.values()) < TASKS - len(trained):
            with consumer.get(5) as record:
                assert len(record) == GROUP
                waiting[str(record.meta.group_id)] += 1
        with pytest.raises(ConsumerEmpty):
            consumer.get(0.1)
        assert not [name for name, n in consumer.stats().items() if n and name.startswith("discarded_total")]
    assert set((trained + waiting).values()) == {1}
    assert (len(trained), len(waiting)) == (2 * STEPS, TASKS - 2 * STEPS)
    # groups that the killed learner had trained and not saved come again, marked as redelivered
    marked = {each["step"]: each["trajectories_redelivered"] for each in lines("metrics.jsonl")[before:]}
    again = Counter(each["step"] for each in second if each["group_id"] in not_in_it)
    assert sum(again.values()) == len(not_in_it)
    assert all(marked[step] >= GROUP * groups for step, groups in again.items())
    assert sum(marked.values()) < GROUP * len(second)  # and what is new does not
