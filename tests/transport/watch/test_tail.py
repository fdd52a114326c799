"""`shmbridge tail`: what it prints of real records, and that it takes none away."""

import json
import subprocess
import sys

import numpy as np
import pytest

from shmbridge.cli import main
from shmbridge.segments import lane_names
from shmbridge.watch.observer import Observer
from shmbridge.watch.text import rows_of

GROUP = {
    "tokens": [np.arange(6, dtype=np.int32), np.arange(4, dtype=np.int32)],
    "loss_mask": [np.array([0, 0, 1, 1, 1, 1], np.uint8), np.array([0, 0, 1, 1], np.uint8)],
    "advantages": [np.full(6, 0.88, np.float32), np.full(4, -0.31, np.float32)],
    "scores": [1.0, 0.0],
    "step_rewards": [np.array([0.42, 0.99], np.float32), np.array([0.1], np.float32)],
    "step_ends": [np.array([4, 6], np.int32), np.array([4], np.int32)],
}


@pytest.fixture
def producer(make_producer, make_consumer):
    consumer = make_consumer()
    consumer.publish_policy_version(42)
    producer = make_producer(env_name="gsm8k")
    producer.put(GROUP, group_id="g7", group_size=2, policy_version=41)
    yield producer
    assert len(consumer.poll()) == producer.stats()["records_total"], "one was taken away"


def test_a_line_says_who_what_and_how_old(bridge, producer, capsys):
    assert main(["tail", bridge, "--no-follow"]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    assert line == (
        f"{producer.producer_id}#0  group g7 (2/2)  v41 (-1)  10 tokens, 6 trained  "
        "score 0.5 (0 to 1)  adv -0.31..0.88  3 steps 0.10..0.99"
    )


@pytest.mark.parametrize(
    ("given", "shown"),
    [(None, "1"), ("g8", "g8"), ("gsm8k:1", "gsm8k:1"), ("a:b:2", "a:b:2"), ("\x1b", "\\x1b")],
)
def test_a_lane_stands_once_in_a_line(bridge, producer, make_consumer, capsys, given, shown):
    producer.put({"tokens": [[1]]}, group_id=given)
    assert main(["tail", bridge, "--no-follow"]) == 0
    line = capsys.readouterr().out.splitlines()[1]
    assert line == f"{producer.producer_id}#1  group {shown} (1/1)  v42 (+0)  1 tokens"


def test_rows(bridge, producer, capsys):
    assert main(["tail", bridge, "--no-follow", "--rows"]) == 0
    assert capsys.readouterr().out.splitlines()[1:] == [
        "  1: 6 tokens  score 1  adv 0.88..0.88  steps 0.42 0.99",
        "  2: 4 tokens  score 0  adv -0.31..-0.31  steps 0.10",
    ]


def test_text_with_step_rewards(bridge, producer, capsys, tokenizer):
    assert main(["tail", bridge, "--no-follow", "--decode", tokenizer]) == 0
    first = capsys.readouterr().out.splitlines()[1]
    assert first.index("→") < first.index("⟨0.42⟩") < first.index("⟨0.99⟩")
    assert first.endswith("⟨0.99⟩")


def test_of_a_long_prompt_only_the_end_is_decoded(bridge, make_producer, make_consumer):
    make_consumer()
    tokens = np.arange(50_000, dtype=np.int32)
    make_producer(lane_bytes="1M").put({"tokens": [tokens], "prompt_length": [49_998], "scores": [1.0]})
    decoded = []

    def pieces(ids):
        decoded.extend(ids)
        return [f"<{each}>" for each in ids]

    with Observer(bridge) as observer:
        [line] = rows_of(observer.poll()[0], pieces)
    assert line.endswith("<49996><49997> → <49998><49999>")
    assert "  …" in line
    assert len(decoded) < 200


def test_json_for_programs(bridge, producer, capsys):
    assert main(["tail", bridge, "-n", "1", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["group_id"], found["sequence"], found["scores"]) == ("g7", 0, [1.0, 0.0])


def test_follows_says_what_it_missed_and_ends_with_its_reader(bridge, make_producer, make_consumer):
    producer, consumer = make_producer(env_name="gsm8k"), make_consumer()
    command = [sys.executable, "-m", "shmbridge.cli", "tail", bridge, "-n", "2"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as tail:
        producer.put(GROUP, group_id="one")
        assert "group one" in tail.stdout.readline()
        tail.stdout.close()
        producer.put(GROUP, group_id="two")
        assert tail.wait(20) == 0
        assert "Traceback" not in tail.stderr.read()
    assert len(consumer.poll()) == 2


def test_a_lane_that_cannot_be_read_is_said(bridge, producer, capsys):
    (name,) = lane_names(bridge)
    with open(f"/dev/shm{name}", "r+b") as file:
        file.seek(8)
        file.write(b"\x63")  # its layout version
    try:
        assert main(["tail", bridge, "--no-follow"]) == 0
    finally:
        with open(f"/dev/shm{name}", "r+b") as file:
            file.seek(8)
            file.write(b"\x02")
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err == f"lane {name} cannot be read: layout version 99, this build has 2\n"
