"""Evaluation: its groups are never trained and always counted, and a user's function that fails ends
nothing.
"""

from __future__ import annotations

import itertools
import json
import re
import sys
import threading
import time
from pathlib import Path

import pytest

import shmbridge
from shmbridge.consumers import grpo
from shmbridge.consumers.learner.checkpoint import Consumed, Progress
from shmbridge.consumers.learner.report.run import as_text, read_run, summary
from shmbridge.consumers.learner.train.training_step import BadHook, EvalHook, TrainingScreen, load_hook
from shmbridge.control import ControlClient
from shmbridge.control.messages import Evaluated
from shmbridge.metrics import environment_label

START = Progress(step=0, policy_version=-1)


def test_groups_of_the_split_eval_are_scored_and_in_no_batch(bridge):
    screen = TrainingScreen(Consumed(START))
    with (
        shmbridge.Producer(bridge, env_name="sums", lane_bytes="1M") as producer,
        shmbridge.Consumer(bridge) as consumer,
    ):
        consumer.screen(screen)
        assert screen.metrics() == {"eval/groups_total": 0, "resume/known_groups_total": 0}
        for number in range(4):
            rows = {"tokens": [[number, 1]] * 2, "score": [float(number), number + 1.0]}
            producer.put(rows, split="eval" if number % 2 else "train")
        producer.put({"tokens": [[9]]}, split="eval")  # without scores
        consumer.drain()
        (batch,) = consumer.batches(groups=2, prefetch=0)
        assert batch.tokens.tolist() == [0, 1, 0, 1, 2, 1, 2, 1]
        found = screen.metrics()
        assert consumer.stats()["left_out_total{eval}"] == 3
    assert {
        name: found[name]
        for name in ("eval/mean_score", "eval/groups", "eval/trajectories", "eval/groups_total")
    } == {"eval/mean_score": 2.5, "eval/groups": 3, "eval/trajectories": 5, "eval/groups_total": 3}
    assert found["eval/sums/mean_score"] == 2.5
    assert screen.metrics() == {"eval/groups_total": 3, "resume/known_groups_total": 0}


def test_groups_that_the_checkpoint_contains_are_not_trained_twice(bridge):
    with shmbridge.Producer(bridge, lane_bytes="1M") as producer:
        for number in range(4):
            producer.put({"tokens": [[number]]})
        with shmbridge.Consumer(bridge) as consumer:
            (batch,) = itertools.islice(consumer.batches(groups=2, prefetch=0), 1)
            ledger = Consumed(START)
            ledger.took(batch.meta, groups=2, trajectories=2, tokens=2)
            saved = ledger.progress(1, 1)
            for record in batch.records:
                record._abandon()  # as a kill before the release would
            del batch, record
        screen = TrainingScreen(Consumed(saved))
        with shmbridge.Consumer(bridge) as consumer:
            consumer.screen(screen)
            assert next(consumer.batches(groups=2, prefetch=0)).tokens.tolist() == [2, 3]
            assert screen.metrics()["resume/known_groups_total"] == 2


def test_the_hook_is_called_at_its_steps_and_its_numbers_are_logged():
    seen = []

    def function(step, model, tokenizer):
        seen.append((step, model, tokenizer))
        return {"accuracy": 0.5, "count": 3}

    hook = EvalHook(function, 2, say=print)
    assert [hook.is_due(step) for step in (1, 2, 3, 4)] == [False, True, False, True]
    assert hook.called(2, "m", "t") == {"eval/accuracy": 0.5, "eval/count": 3.0}
    assert seen == [(2, "m", "t")]
    assert hook.failures_total == 0


@pytest.mark.parametrize("said", [None, {"accuracy": "high"}, 7])
def test_a_hook_that_fails_is_said_and_counted(said):
    lines = []
    hook = EvalHook(lambda step, model, tokenizer: said, 1, say=lines.append)
    assert hook.called(1, None, None) == hook.called(2, None, None) == {}
    assert hook.failures_total == 2
    assert "failed at step 2, training goes on" in lines[1]


def test_a_hook_is_found_by_its_name_or_refused_in_words(tmp_path, monkeypatch):
    (tmp_path / "my_hooks.py").write_text(
        "def score(step, model, tokenizer):\n    return {'x': step}\nnumber = 3\n"
    )
    (tmp_path / "my_broken_hooks.py").write_text("def score(:\n")
    (tmp_path / "my_raising_hooks.py").write_text("raise RuntimeError('no moons here')\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert load_hook("my_hooks:score")(4, None, None) == {"x": 4}
    for name, says in (
        ("my_hooks", "MODULE:FUNCTION"),
        ("no_such_module:f", "No module"),
        ("my_hooks:moons", "moons"),
        ("my_hooks:number", "int cannot be called"),
        ("my_broken_hooks:score", "SyntaxError"),
        ("my_raising_hooks:score", "no moons here"),
    ):
        with pytest.raises(BadHook, match=says):
            load_hook(name)
    sys.modules.pop("my_hooks")


def test_a_learner_scores_evaluation_groups_under_the_names_of_the_page_and_trains_the_others(
    bridge, tiny_model, tmp_path
):
    tiny_model(5).save_pretrained(tmp_path / "model")
    arguments = ["--bridge", bridge, "--model", str(tmp_path / "model"), "--run-dir", str(tmp_path / "run")]
    arguments += ["--device", "cpu", "--threads", "1", "--steps", "2", "--groups", "2", "--group-size", "2"]
    with shmbridge.Producer(bridge, env_name="sums", lane_bytes="1M") as producer:
        for number in range(6):
            rows = {
                "tokens": [[1, 2, 3], [1, 2, 4]],
                "loss_mask": [[0, 1, 1]] * 2,
                "score": [0.0, 1.0 + 8.0 * (number % 3 == 2)],
            }
            producer.put(rows, split="eval" if number % 3 == 2 else "train")
        assert grpo.main(arguments) == 0
        assert producer.stats()["held"] == 0
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["reward_mean"] for line in lines] == [0.5, 0.5]
    assert lines[-1]["eval/groups_total"] == 2
    found = {
        name.replace("/sums/", "/{env_name}/") for line in lines for name in line if name.startswith("eval/")
    }
    page = (Path(__file__).parents[3] / "docs" / "reference" / "metrics.md").read_text()
    section = page.split("\n## Evaluation\n")[1].split("\n## ")[0]
    on_the_page = set(re.findall(r"^\| `([^`]+)` \|", section, re.MULTILINE))
    reported = {
        f"eval/{{env_name}}/{name}" for name in ("{measured}", "at_step", "at_version", "evaluations")
    }
    assert found == on_the_page - reported - {"eval/{name}", "eval/hook_failures_total"} | {
        "eval/groups_total"
    }
    assert {line["eval/mean_score"] for line in lines if "eval/mean_score" in line} == {4.5}


def test_what_environments_measured_is_in_the_metrics_with_its_step_and_version(bridge):
    screen = TrainingScreen(Consumed(START))
    said = [
        Evaluated("a", "own/sums", 1, {"eval/percent_correct": 0.25, "length": 7.0}, 3, 20),
        Evaluated("b", "own/sums", 1, {"eval/percent_correct": 0.75}, 5, 22),
        Evaluated("c", "letters", 1, {"eval/mean_score": 0.5}, 5, 22),
    ]
    screen.reported = lambda: said
    found = screen.metrics()
    label = environment_label("own/sums")
    assert found[f"eval/{label}/percent_correct"] == 0.5
    assert found[f"eval/{label}/length"] == 7.0
    assert (found[f"eval/{label}/at_step"], found[f"eval/{label}/at_version"]) == (21, 4)
    assert (found[f"eval/{label}/evaluations"], found["eval/letters/evaluations"]) == (2, 1)
    assert found["eval/letters/mean_score"] == 0.5

    with shmbridge.Consumer(bridge) as consumer, shmbridge.Producer(bridge, env_name="letters") as producer:
        consumer.screen(screen)
        producer.put({"tokens": [[1, 2]], "score": [4.0]}, split="eval")
        consumer.drain()
        assert list(consumer.batches(groups=1)) == []
    found = screen.metrics()
    assert (found["eval/letters/mean_score"], found["eval/letters/mean_score_reported"]) == (4.0, 0.5)


def test_a_learner_writes_what_environments_measured_into_its_metrics(bridge, tiny_model, tmp_path):
    tiny_model(5).save_pretrained(tmp_path / "model")
    arguments = ["--bridge", bridge, "--model", str(tmp_path / "model"), "--run-dir", str(tmp_path / "run")]
    arguments += ["--device", "cpu", "--threads", "1", "--steps", "2", "--groups", "1", "--group-size", "2"]

    with shmbridge.Producer(bridge, env_name="sums", lane_bytes="1M") as producer:

        def report() -> None:
            with ControlClient(bridge, role="env", name="sums") as client:
                for number, share in ((1, 0.25), (2, 0.5)):
                    client.request(Evaluated("a", "sums", number, {"eval/correct": share}, -1, number), 60)
                    rows = {"tokens": [[1, 2, 3], [1, 2, 4]], "loss_mask": [[0, 1, 1]] * 2}
                    producer.put(rows | {"score": [0.0, 1.0]})
                    deadline = time.monotonic() + 60
                    path = tmp_path / "run" / "metrics.jsonl"
                    while not path.exists() or path.read_text().count("\n") < number:
                        assert time.monotonic() < deadline
                        time.sleep(0.02)

        thread = threading.Thread(target=report)
        thread.start()
        assert grpo.main(arguments) == 0
        thread.join()
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["eval/sums/correct"] for line in lines] == [0.25, 0.5]
    assert [line["eval/sums/at_step"] for line in lines] == [1, 2]
    kept = [json.loads(line) for line in (tmp_path / "run" / "evaluations.jsonl").read_text().splitlines()]
    assert [(line["env_name"], line["step"], line["metrics"]) for line in kept] == [
        ("sums", 1, {"eval/correct": 0.25}),
        ("sums", 2, {"eval/correct": 0.5}),
    ]
    found = summary(read_run(tmp_path / "run"))
    assert found["evaluations"] == {"sums/correct": {"first": 0.25, "last": 0.5, "last_step": 2}}
    assert "evaluation sums/correct 0.500 at step 2, 0.250 at the first" in as_text(found)
