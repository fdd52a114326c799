"""The examples that need nothing but this package (and torch), each as a user runs it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import shmbridge

pytestmark = pytest.mark.timeout(120)

ROOT = Path(__file__).parents[2]
ENV = os.environ | {
    "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
    "OMP_NUM_THREADS": "1",
}


def start(name: str, *words: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, str(ROOT / "examples" / name), *words],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=ENV,
    )  # fmt: skip


def form(text: str) -> str:
    """A line without its numbers and its columns."""
    return re.sub(r"\d[\d.]*", "N", " ".join(text.split()))


def last_line_on_the_page(name: str) -> str:
    (row,) = re.findall(rf"^\| `{name}` \|.*$", (ROOT / "examples/README.md").read_text(), re.MULTILINE)
    return form(re.findall(r"`([^`]*)`", row.split(" | ")[3])[0])


def said(process: subprocess.Popen[str]) -> str:
    """What it printed, once it has ended well."""
    out, _ = process.communicate(timeout=100)
    assert process.returncode == 0, out
    return out


@pytest.fixture
def own(bridge: str) -> Iterator[str]:
    """A bridge of this test alone, removed after it."""
    yield bridge
    shmbridge.clean(bridge, dry_run=False)


def test_a_killed_consumers_group_comes_again_and_no_other_is_lost_or_twice(own):
    producer = start("producer.py", own)
    first = start("consumer.py", own, "30")
    assert first.stdout is not None
    seen = [first.stdout.readline() for _ in range(5)]
    first.send_signal(signal.SIGKILL)
    rest = first.communicate()[0].splitlines()
    assert "put 49 as record 49" in said(producer)
    second = said(start("consumer.py", own, "2"))
    again = re.findall(r"^group (\d+) \(again\)", second, re.MULTILINE)
    before = [int(re.match(r"group (\d+)", line)[1]) for line in [*seen, *rest]]
    after = [int(number) for number in re.findall(r"^group (\d+)", second, re.MULTILINE)]
    assert again == [str(before[-1])]
    assert before[:-1] + after == list(range(50))
    assert second.endswith(f"{len(after)} groups taken\n")


def test_the_numpy_environment_ends_without_a_learner_and_its_groups_wait(own):
    assert form(said(start("numpy_env.py", own))) == last_line_on_the_page("numpy_env.py")
    with shmbridge.Consumer(own) as consumer:
        records = consumer.poll()
        assert len(records) == 50
        assert all(record["loss_mask"][0].tolist() == [0, 0, 1, 1, 1] for record in records)
        for record in records:
            record.release()


def mean_scores(out: str) -> list[float]:
    return [float(found) for found in re.findall(r"mean score (0\.\d\d)$", out, re.MULTILINE)]


def test_the_own_loop_learns_and_goes_on_after_a_kill(own):
    pytest.importorskip("torch")
    first = start("own_loop.py", own)
    assert first.stdout is not None
    begun = mean_scores("".join(first.stdout.readline() for _ in range(4)))
    first.kill()
    second = mean_scores(said(start("own_loop.py", own)))
    first.communicate(timeout=60)  # its environment has ended, too
    assert begun[-1] > begun[0] + 0.1
    assert second[0] > begun[0] + 0.1, "not from the weights of the killed one"
    assert second[-1] > begun[0] + 0.4


def alone(name: str) -> str:
    """What an example printed on a bridge of its own, of which it left nothing."""
    process = start(name)
    out = said(process)
    assert form(out.splitlines()[-1]) == last_line_on_the_page(name)
    assert [info.name for info in shmbridge.list_bridges() if info.name.endswith(f"-{process.pid}")] == []
    return out


def test_the_own_loop_on_a_bridge_of_its_own_leaves_nothing():
    pytest.importorskip("torch")
    alone("own_loop.py")


def test_multi_turn_episodes_are_trained_where_the_policy_spoke():
    out = alone("multi_turn_env.py")
    asked, product = re.findall(r"\[calc (\d+\*\d+)\] .*\ntool: (\d+)\n", out)[0]
    one, other = map(int, asked.split("*"))
    assert int(product) == one * other
    assert "16 episodes; what the policy said is trained" in out


def test_evaluation_finds_the_same_live_and_in_the_recording():
    out = alone("evaluate.py")
    assert out.startswith("80 groups trained, 20 evaluated\n")
    live, recorded = out.split("live")[1].split("recorded")
    evaluated = re.findall(r"^  \w+ +eval .*$", live, re.MULTILINE)
    assert len(evaluated) == 2
    assert evaluated == re.findall(r"^  \w+ +eval .*$", recorded, re.MULTILINE)
