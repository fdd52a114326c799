"""Unedited environments as processes: the consumer gets the groups that they record themselves, whatever
happens.
"""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

import shmbridge
from shmbridge.cli.log import stamp_of
from shmbridge.testing import json_lines

# Several processes start and learn in one test: the timeout for hangs is longer than elsewhere.
pytestmark = pytest.mark.timeout(300)

pytest.importorskip("atroposlib")

ROOT = Path(__file__).parents[3]
ENVS = Path(__file__).parent / "envs"
MODULE = ("-m", "shmbridge.producers.atropos")
SCRIPT = str(ENVS / "as_a_script.py")
FLOAT32 = ("advantages", "ref_logprobs", "inference_logprobs", "distill_logprobs")
RUN = shmbridge.Run(batch_size=16, max_token_len=4096, num_steps=1000)


def rounded(value: Any) -> Any:
    """Floats as float32, at any depth."""
    if isinstance(value, list):
        return [rounded(each) for each in value]
    return float(np.float32(value)) if isinstance(value, float) else value


def delivered_form(recorded: dict, env_id: int) -> str:
    """Returns a group that BaseEnv has recorded in the form in which it is delivered."""
    expected = {key: rounded(value) if key in FLOAT32 else value for key, value in recorded.items()}
    return json.dumps(expected | {"env_id": env_id}, sort_keys=True)


def take(consumer: shmbridge.Consumer, into: list[str], timeout_s: float = 0.0) -> bool:
    """Take one record, as JSON of its group."""
    try:
        with consumer.get(timeout_s=timeout_s) as record:
            into.append(json.dumps(record.to_scored_data(), sort_keys=True))
            return True
    except shmbridge.ConsumerEmpty:
        return False


def undelivered(bridge: str) -> int:
    lanes = [lane for info in shmbridge.list_bridges() if info.name == bridge for lane in info.lanes]
    return sum(lane.held for lane in lanes)


def still(count: Callable[[], int], for_s: float = 1.0) -> Callable[[], bool]:
    """Whether a count has not changed for a while."""
    last, since = -1, 0.0

    def holds() -> bool:
        nonlocal last, since
        if (now := count()) != last:
            last, since = now, time.monotonic()
        return time.monotonic() - since > for_s

    return holds


def recorded(path: Path) -> list[str]:
    return [delivered_form(line, env_id=0) for line in json_lines(path)]


def test_an_environment_waits_for_a_run_and_then_delivers_what_it_records(
    bridge: str, start_env: Callable[..., Any], tmp_path: Path
) -> None:
    truth = tmp_path / "groups.jsonl"
    env = start_env("--env.items", "20", "--env.data_path_to_save_groups", str(truth))
    env.until(lambda: "no consumer answers" in env.output)
    with shmbridge.Consumer(bridge) as consumer:
        env.until(lambda: "the consumer has announced no run" in env.output)
        assert consumer.stats()["records_total"] == 0
        consumer.publish_policy_version(5)
        consumer.announce_run(RUN)
        groups: list[str] = []
        metas = []

        def twenty_items() -> bool:
            for record in consumer.poll():
                with record:
                    metas.append(record.meta)
                    groups.append(json.dumps(record.to_scored_data(), sort_keys=True))
            return len(groups) == 22  # two of the items are lists of two

        env.until(twenty_items)
        assert env.end(signal.SIGINT) != 0
        assert "Traceback" not in env.output
        assert all(map(stamp_of, env.output.splitlines())), env.output
        assert not take(consumer, groups)
        assert sorted(groups) == sorted(recorded(truth))
        assert {(meta.env_name, meta.env_id, meta.split) for meta in metas} == {("seeded", 0, "train")}
        assert {(meta.min_policy_version, meta.max_policy_version) for meta in metas} == {(5, 5)}
        assert len({meta.group_id for meta in metas}) == 22
        assert [meta.sequence for meta in metas] == list(range(22))
        assert sum(meta.uneven for meta in metas) == 2
        assert "22 groups delivered, not delivered: none" in env.output


def test_an_environment_outlives_its_consumer_and_serves_the_next(
    bridge: str, start_env: Callable[..., Any], script: ModuleType
) -> None:
    env = start_env("--env.collect_s", "0.05")
    groups: list[str] = []
    with shmbridge.Consumer(bridge, run=RUN) as first:
        env.until(lambda: take(first, groups) and len(groups) >= 30)
    env.until(lambda: "no new rollouts begin" in env.output)
    env.until(still(lambda: undelivered(bridge)))
    # What was queued, and what the 8 workers had begun: three batches of four groups, the throttle's limit.
    assert undelivered(bridge) <= 12 + 8
    with shmbridge.Consumer(bridge, run=RUN) as second:
        env.until(lambda: "going on after" in env.output)
        env.until(lambda: take(second, groups) and len(groups) >= 100)
        assert env.end(signal.SIGKILL) == -signal.SIGKILL
        while take(second, groups, timeout_s=0.3):
            pass
        stats = second.stats()
        assert stats["lanes_live"] == 0
        assert stats["records_total"] == len(groups) == len(set(groups))
    made = {}
    for item in range(len(groups)):
        each = script.groups_of(item)
        for group in each if isinstance(each, list) else [each]:
            defaults = dict.fromkeys(["ref_logprobs", "overrides", "group_overrides"])
            defaults |= dict.fromkeys(["distill_token_ids", "distill_logprobs"])
            made[delivered_form(defaults | group, env_id=0)] = item
    items = sorted(made[group] for group in groups)  # KeyError: a group that no environment made
    # Only what the killed process had under way may be missing, at the end: 8 workers.
    assert set(range(items[-1] - 8)) <= set(items)
    assert env.output.count("no consumer answers") == env.output.count("going on after") <= 2


def test_workers_cancelled_by_the_throttle_lose_nothing(
    bridge: str, start_env: Callable[..., Any], tmp_path: Path
) -> None:
    """A lane of 256 KiB, records of 40: it is full long before the queue is, workers wait for room, BaseEnv
    cancels them.
    """
    truth, cancelled = tmp_path / "groups.jsonl", tmp_path / "cancelled"
    small = shmbridge.Run(batch_size=4, max_token_len=4096, num_steps=1000)
    groups: list[str] = []
    with shmbridge.Consumer(bridge, run=small) as consumer:
        env = start_env(
            *("--env.items", "40", "--env.tokens", "1000", "--env.data_path_to_save_groups", str(truth)),
            *("--env.max_batches_offpolicy", "12", "--env.cancelled", str(cancelled)),
            lane_bytes="256K",
        )
        env.until(lambda: consumer.stats()["producer_wait_s"] > 0)
        # now the queue is too long, too
        with shmbridge.Producer(bridge, env_name="flood", lane_bytes="1M") as flood:
            flood.put_many([{"tokens": [[1]]}] * 20)
        env.until(cancelled.exists)
        env.until(lambda: take(consumer, groups, timeout_s=0.1) and len(groups) == 44 + 20, timeout_s=100)
        assert env.end(signal.SIGINT) != 0
        assert consumer.stats()["producer_wait_s"] > 0
        assert consumer.stats()["dropped_total"] == 0
    assert sorted(group for group in groups if json.loads(group)["tokens"] != [[1]]) == sorted(
        recorded(truth)
    )


def test_an_environment_evaluates_and_ends_when_its_steps_are_done(
    bridge: str, start_env: Callable[..., Any], tmp_path: Path
) -> None:
    evaluated = tmp_path / "evaluated"
    run = shmbridge.Run(batch_size=16, max_token_len=4096, num_steps=9, starting_step=3)
    with shmbridge.Consumer(bridge, run=run) as consumer:
        env = start_env(
            *("--env.total_steps", "9", "--env.steps_per_eval", "5", "--env.evaluated", str(evaluated)),
            *("--env.collect_s", "0.05"),
        )
        trained = []

        def train() -> None:
            for batch in consumer.batches(groups=4, prefetch=0):
                trained.append(len(batch.scores))

        learner = threading.Thread(target=train)
        learner.start()
        assert env.wait() == 0, env.output[-4000:]
        consumer.drain()
        learner.join()
        assert consumer.current_step >= 3 + len(trained) > 3
    assert evaluated.read_text().splitlines(), "steps_per_eval was crossed"
    assert "groups delivered, not delivered: none" in env.output


# --- the command line -------------------------------------------------------------------------------------


def command(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)} | environment,
        timeout=60,
    )


def test_a_script_sees_itself_as_python_would_show_it() -> None:
    alone = command(SCRIPT, "serve", "--env.group_size", "8")
    bridged = command(*MODULE, "--bridge", "b", SCRIPT, "serve", "--env.group_size", "8")
    assert alone.stdout
    assert bridged.stdout == alone.stdout
    assert bridged.returncode == 2  # since it begins no environment


def test_help_has_examples_and_the_script_keeps_its_own_help() -> None:
    ours = command(*MODULE, "--help")
    assert ours.returncode == 0
    assert "examples:" in ours.stdout
    theirs = command(*MODULE, "--bridge", "b", SCRIPT, "--help")
    assert "examples:" not in theirs.stdout
    assert "'--help'" in theirs.stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--bridge", "b", "nowhere.py", "serve"], "no environment script nowhere.py"),
        (["--bridge", "b!", SCRIPT], "bridge name 'b!'"),
        (["--bridge", "b", "--lane-bytes", "much", SCRIPT], "'much' is not a size"),
        (["--bridge", "b", "--on-full", "explode", SCRIPT], "explode"),
        ([SCRIPT], "--bridge"),
    ],
)
def test_a_script_that_cannot_start_says_why_and_exits_with_2(arguments: list[str], said: str) -> None:
    finished = command(*MODULE, *arguments)
    assert finished.returncode == 2
    assert said in finished.stderr
    assert "Traceback" not in finished.stderr


def test_too_little_memory_is_said_before_anything_runs(
    bridge: str, start_env: Callable[..., Any], tmp_path: Path
) -> None:
    env = start_env("--env.items", "1", lane_bytes="900T")
    assert env.wait() == 2
    assert "SB101" in env.output
    assert "Traceback" not in env.output


def test_a_missing_atroposlib_is_said_with_what_to_install(tmp_path: Path) -> None:
    (tmp_path / "atroposlib.py").write_text("raise ImportError('No module named atroposlib')")
    finished = command(*MODULE, *("--bridge", "b", SCRIPT), PYTHONPATH=f"{tmp_path}:{ROOT}")
    assert finished.returncode == 2
    assert "pip install 'shmbridge[atropos]'" in finished.stderr
    assert "Traceback" not in finished.stderr
