"""A learner on a bridge with trained weights goes on with them, or prints what it gives up."""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
import sys

import numpy as np
import pytest
from safetensors.numpy import load_file
from transformers import Qwen2Config, Qwen2ForCausalLM

import shmbridge
from shmbridge.consumers import grpo
from shmbridge.consumers.feed import BridgeAhead
from shmbridge.consumers.learner import checkpoint
from shmbridge.consumers.learner.config.flags import parse
from shmbridge.consumers.learner.train.starting_point import decided
from shmbridge.weights import WeightsReader, WeightsWriter

STEPS = 3
FIXED = ("--device", "cpu", "--threads", "1", "--groups", "2", "--group-size", "4", "--lr", "1e-2")


@pytest.fixture
def producer(bridge):
    """A living environment: whatever learners do, the bridge stays."""
    with shmbridge.Producer(bridge, env_name="test", lane_bytes="4M") as living:
        yield living


@pytest.fixture
def learn(bridge, producer, tiny_model, tmp_path, capsys):
    """Return a function from a run directory, its steps and flags to exit status, output and errors."""
    tiny_model(5).save_pretrained(tmp_path / "model")

    def run(name, steps, *flags, batches=None):
        put_groups(producer, 2 * (steps if batches is None else batches))
        fixed = ["--bridge", bridge, "--model", str(tmp_path / "model"), "--steps", str(steps), *FIXED]
        fixed += ["--run-dir", str(tmp_path / name)] if name else []
        status = grpo.main([*fixed, "--max-wait-time", "0.2", *flags])
        return status, *capsys.readouterr()

    return run


@pytest.fixture
def trained(learn):
    """A run of three steps in folder "a"."""
    status, out, err = learn("a", STEPS, "--save-every", "1")
    assert status == 0, err
    return out


def put_groups(producer, count):
    for number in range(count):
        rows = [[1, 2 + number % 8, 10 + row, 11] for row in range(4)]
        scores = [1.0, 0.0, 0.25, number % 3]
        producer.put({"tokens": rows, "loss_mask": [[0, 0, 1, 1]] * 4, "score": scores}, timeout_s=10.0)


def info(bridge):
    (found,) = (each for each in shmbridge.list_bridges() if each.name == bridge)
    return found


def weights(bridge):
    with WeightsReader(bridge) as reader:
        version, tensors = reader.copy()
    return version, tensors


def same(one, other):
    assert one.keys() == other.keys()
    return all(np.array_equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("flags", [(), ("--resume",), ("--no-weights",), ("--resume", "--no-weights")])
@pytest.mark.parametrize("name", [None, "another"])
def test_without_its_checkpoint_it_is_refused_and_nothing_changes(
    learn, trained, bridge, tmp_path, monkeypatch, flags, name
):
    monkeypatch.chdir(tmp_path)  # without a run directory it is runs/<bridge>
    monkeypatch.setattr(grpo, "load_learner", None)  # nothing is loaded
    before = weights(bridge)
    status, out, err = learn(name, 30, *flags)
    assert status == 1
    (line,) = err.splitlines()
    folder = str(tmp_path / name) if name else f"runs/{bridge}"
    assert line.startswith(
        f"grpo: error: [SB518] bridge {bridge} has been trained up to version {STEPS}, and the run directory "
        f"{folder} holds no checkpoint -> "
    )
    for way in ("--resume", f"--from-bridge takes the weights of version {STEPS}", "--from-scratch"):
        assert way in line
    assert out == ""
    assert not (tmp_path / folder).exists()
    after = weights(bridge)
    assert before[0] == after[0] == info(bridge).policy_version == STEPS
    assert same(before[1], after[1])


def test_from_bridge_goes_on_with_the_newest_weights(learn, trained, bridge, tmp_path):
    before = weights(bridge)
    status, out, err = learn("b", 2, "--from-bridge", "--lr", "0", "--save-every", "1")
    assert status == 0, err
    assert f"begins with the weights of version {STEPS} of bridge {bridge}" in out
    assert "optimizer, schedule and step count are new" in out
    assert f"step 0 of 2, version {STEPS + 1}, waiting" in out
    version, after = weights(bridge)
    assert version == STEPS + 3
    assert same(before[1], after)  # the learning rate is 0
    steps = [json.loads(line) for line in (tmp_path / "b" / "metrics.jsonl").read_text().splitlines()]
    assert [line["policy_version"] for line in steps] == [STEPS + 2, STEPS + 3]
    status, out, err = learn("b", 3, "--resume")
    assert (status, "done: 3 of 3 steps" in out) == (0, True), err
    assert "trained again" not in out


@pytest.mark.parametrize("flags", [("--from-bridge",), ("--from-bridge", "--resume")])
def test_from_bridge_is_durable_before_its_first_step(learn, trained, bridge, tmp_path, flags):
    before = weights(bridge)
    for _ in range(2):  # no batch comes, and it is started again
        status, _, err = learn("b", 2, *flags, batches=0)
        assert status == 3, err
        first = tmp_path / "b" / "checkpoints" / "step-00000000"
        assert same(load_file(first / "model.safetensors"), before[1])
    assert learn("b", 2, "--resume", "--lr", "0")[0] == 0
    assert same(weights(bridge)[1], before[1])


def test_from_bridge_takes_what_the_killed_learner_had_trained_since(learn, trained, bridge, tmp_path):
    """A first checkpoint holds no step: the bridge has more."""
    assert learn("b", 2, "--from-bridge")[0] == 0
    shutil.rmtree(tmp_path / "b" / "checkpoints" / "step-00000002")
    newest = weights(bridge)
    status, out, err = learn("b", 1, "--from-bridge", "--lr", "0")
    assert status == 0, err
    assert f"begins with the weights of version {newest[0]}" in out
    assert same(weights(bridge)[1], newest[1])


def test_from_scratch_gives_up_what_was_trained_in_a_line(learn, trained, bridge, tmp_path, tiny_model):
    status, out, err = learn("b", 1, "--from-scratch", "--lr", "0")
    assert status == 0, err
    assert f"--from-scratch: a new run begins with {tmp_path / 'model'}; version {STEPS} of bridge" in out
    version, tensors = weights(bridge)
    assert version == STEPS + 2
    assert same(tensors, {name: each.numpy() for name, each in tiny_model(5).state_dict().items()})


def test_a_checkpoint_of_another_run_is_refused(learn, trained, bridge, tmp_path):
    assert learn("b", 1, "--from-scratch")[0] == 0
    status, _, err = learn("a", 9, "--resume")
    assert status == 1
    assert f"[SB518] bridge {bridge} has been trained up to version {STEPS + 2}" in err
    assert f"{tmp_path / 'a'} holds step-0000000{STEPS} of another run -> " in err
    assert f"another --bridge for the run in {tmp_path / 'a'}" in err
    assert learn("a", 9, "--resume", "--from-bridge")[0] == 1  # a run directory has one run
    assert learn("b", 2, "--resume")[0] == 0


def test_a_checkpoint_of_another_bridge_is_refused_on_a_trained_one(learn, trained, bridge, tmp_path):
    other = f"{bridge}-2"
    try:
        with shmbridge.Producer(other, lane_bytes="1M") as producer:
            put_groups(producer, 2)
            assert learn("b", 1, "--bridge", other, batches=0)[0] == 0
            status, _, err = learn("a", 9, "--resume", "--bridge", other, batches=0)
            assert (status, "holds step-00000003 of another run" in err) == (1, True), err
    finally:
        shmbridge.clean(other, dry_run=False)


def test_an_older_checkpoint_of_the_run_is_allowed_and_what_is_trained_again_is_named(
    learn, trained, tmp_path
):
    shutil.rmtree(tmp_path / "a" / "checkpoints" / f"step-{STEPS:08d}")
    status, out, err = learn("a", 4, "--resume")
    assert status == 0, err
    assert "step-00000002 has policy version 2, bridge" in out
    assert " 3: up to 1 step after that checkpoint are trained again, on other groups" in out


def test_a_start_without_a_step_is_no_step_to_lose(learn, trained, bridge, tmp_path):
    for version in (5, 6):  # its own version each
        assert learn("a", 9, "--resume", batches=0)[0] == 3
        assert info(bridge).policy_version == version - 1
        assert info(bridge).trained_version == STEPS
    status, out, err = learn("a", 4, "--resume")
    assert status == 0, err
    assert "trained again" not in out


def test_the_same_command_starts_a_run_and_restarts_it(learn, bridge, tmp_path):
    """On a fresh bridge, and on one where no learner has trained a step: starts alone give nothing up."""
    for version in (0, 1, 2):
        status, out, err = learn("a", 2, "--resume", batches=0)
        assert status == 3, err
        assert f"no checkpoint in {tmp_path / 'a'}, and no trained weights in bridge {bridge}" in out
        assert info(bridge).policy_version == version
    assert learn("a", 2, "--resume", "--save-every", "1")[0] == 0
    assert learn("a", 3, "--resume")[0] == 0
    assert learn("b", 3, "--resume")[0] == 1


def test_resume_works_on_a_fresh_mount(learn, trained, bridge, producer, tmp_path, monkeypatch):
    with shmbridge.Consumer(bridge, resume="discard"):
        pass
    producer.close()
    assert not [each for each in shmbridge.list_bridges() if each.name == bridge]
    with shmbridge.Producer(bridge, env_name="test", lane_bytes="4M") as again:
        put_groups(again, 2)
        status, out, err = learn("a", 4, "--resume", batches=0)
    assert status == 0, err
    assert f"step 3 of 4, version {STEPS + 1}, waiting" in out


@pytest.mark.parametrize("flags", [("--from-bridge",), ("--from-bridge", "--resume")])
def test_a_bridge_without_weights_gives_none(learn, bridge, tmp_path, flags):
    status, _, err = learn("a", 2, "--from-bridge")
    assert status == 1
    assert f"--from-bridge: bridge {bridge} has no trained weights -> leave it out, or add --resume" in err
    assert learn("a", 2, "--no-weights", "--from-bridge", "--resume")[0] == 0
    status, _, err = learn("b", 2, *flags)
    assert status == 1
    assert f"bridge {bridge} is at version 2, and has no weights segment" in err
    status, _, err = learn("b", 2)
    assert (status, "--from-bridge" in err, "--from-scratch" in err) == (1, False, True)


def test_weights_of_another_model_are_refused_and_stay(learn, bridge, producer, tmp_path):
    """Also if nobody lives there: leaving must not remove them."""
    config = Qwen2Config(
        vocab_size=28, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=4, tie_word_embeddings=False,
    )  # fmt: skip
    Qwen2ForCausalLM(config).save_pretrained(tmp_path / "other")
    killed = """
import os, signal, sys
import shmbridge
from shmbridge.consumers import grpo
from shmbridge.consumers.learner.train.training_step import TrainingStep
TrainingStep.finish = lambda step: os.kill(os.getpid(), signal.SIGKILL)
producer = shmbridge.Producer(sys.argv[2], lane_bytes="1M")
for _ in range(2):
    producer.put({"tokens": [[1, 2], [1, 3]], "loss_mask": [[0, 1]] * 2, "score": [0.0, 1.0]})
grpo.main(sys.argv[1:])
"""
    producer.close()
    argv = ["--bridge", bridge, "--model", str(tmp_path / "model"), "--steps", "1", *FIXED]
    done = subprocess.run(
        [sys.executable, "-c", killed, *argv, "--run-dir", str(tmp_path / "a")], timeout=100
    )
    assert done.returncode == -signal.SIGKILL
    status, _, err = learn_alone(learn, "b", "--from-bridge", "--model", str(tmp_path / "other"))
    assert status == 1
    assert "[SB501] --from-bridge: --model " in err
    assert "other shape: model.embed_tokens.weight (28, 64) here (28, 32)" in err
    assert weights(bridge)[0] == 1  # this reader, the last participant, removes them


def learn_alone(learn, name, *flags):
    return learn(name, 2, *flags, batches=0)


def test_adapters_cannot_be_split_from_published_weights(learn, trained, bridge):
    pytest.importorskip("peft")
    status, _, err = learn("b", 2, "--from-bridge", "--lora-rank", "2")
    assert (status, "have their adapters merged" in err) == (1, True), err
    assert weights(bridge)[0] == STEPS


def test_weights_that_are_not_finite_are_not_taken(learn, trained, bridge, tmp_path, tiny_model):
    broken = tiny_model(5)
    broken.lm_head.weight.data[3, 4] = float("nan")
    with WeightsWriter(bridge) as writer:
        writer.publish(9, broken.state_dict().items())
    status, _, err = learn("b", 2, "--from-bridge")
    assert status == 1
    assert f"tensor lm_head.weight of version 9 of bridge {bridge} has values that are not finite" in err
    assert not (tmp_path / "b").exists()


def test_a_run_directory_that_takes_no_weights_is_named(learn, trained, tmp_path):
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "checkpoints").write_text("")
    status, _, err = learn("b", 2, "--from-bridge")
    assert status == 1
    assert f"cannot be saved in {tmp_path / 'b' / 'checkpoints'}: " in err


def test_a_way_out_that_would_be_refused_is_not_offered(learn, trained):
    _, _, err = learn("b", 2, "--lora-rank", "2")
    assert ("--from-bridge" in err, "--from-scratch begins" in err) == (False, True), err
    _, _, err = learn("a", 9)
    assert "--resume goes on with it, another --run-dir with --from-scratch starts afresh" in err


def test_weights_that_are_older_than_their_bridge_are_named_as_such(learn, bridge, tiny_model):
    """As after a resume with --no-weights."""
    with shmbridge.Consumer(bridge) as consumer, WeightsWriter(bridge) as writer:
        writer.publish(3, tiny_model(7).state_dict().items())
        consumer.publish_policy_version(7)
    _, _, err = learn("a", 2)
    assert "trained up to version 7" in err
    assert "; --from-bridge takes the weights of version 3, the newest that it has, with a new" in err
    status, out, err = learn("a", 2, "--from-bridge")
    assert status == 0, err
    assert f"bridge {bridge} has been trained up to version 7: all after 3 is given up" in out
    assert "step 0 of 2, version 8, waiting" in out


def test_weights_taken_over_from_one_run_are_not_thrown_away_for_those_of_another(
    learn, trained, bridge, tmp_path
):
    assert learn("b", 2, "--from-bridge", batches=0)[0] == 3
    first = tmp_path / "b" / "checkpoints" / "step-00000000" / "model.safetensors"
    before = load_file(first)
    assert learn("c", 1, "--from-scratch")[0] == 0
    for flags in (("--from-bridge",), ("--resume", "--from-bridge")):
        status, _, err = learn("b", 2, *flags)
        assert (status, "holds step-00000000 of another run" in err) == (1, True), err
    assert same(load_file(first), before)


def test_both_beginnings_at_once_are_refused(learn):
    status, _, err = learn("b", 2, "--from-bridge", "--from-scratch")
    assert (status, "--from-bridge and --from-scratch begin with other weights" in err) == (1, True)


def test_versions_of_another_program_are_not_given_up_either(learn, bridge, tmp_path):
    with shmbridge.Consumer(bridge) as consumer, WeightsWriter(bridge) as writer:
        writer.publish(7, [("w", np.zeros(2, np.float32))])
        consumer.publish_policy_version(7)
    assert "[SB518]" in learn("a", 2)[2]
    assert learn("a", 2, "--from-scratch")[0] == 0
    assert info(bridge).policy_version == 10


def test_a_checkpoint_of_an_earlier_release_belongs_where_no_run_is_noted(learn, trained, bridge, tmp_path):
    path = tmp_path / "a" / "checkpoints" / f"step-{STEPS:08d}" / "learner.json"
    said = json.loads(path.read_text())
    assert said.pop("run_id") == info(bridge).run_id
    path.write_text(json.dumps(said))
    status, _, err = learn("a", 9, "--resume")
    assert (status, "of another run" in err) == (1, True)
    other = f"{bridge}-old"
    try:
        with shmbridge.Producer(other, lane_bytes="1M") as producer:
            with shmbridge.Consumer(other) as consumer:
                consumer.publish_policy_version(STEPS)  # a learner of that release
            # killed before it saves: the next start takes the same checkpoint
            for steps, status in ((9, 3), (STEPS + 1, 0)):
                put_groups(producer, 2 if status == 0 else 0)
                found, _, err = learn("a", steps, "--resume", "--bridge", other, batches=0)
                assert found == status, err
    finally:
        shmbridge.clean(other, dry_run=False)
    newest = checkpoint.complete(tmp_path / "a" / "checkpoints")[-1]
    assert checkpoint.load_progress(newest).run_id


def test_a_bridge_that_goes_on_while_the_learner_loads_is_not_thrown_back(
    learn, bridge, tmp_path, monkeypatch
):
    load = grpo.load_learner

    def meanwhile(*arguments):
        with shmbridge.Consumer(bridge) as other:
            other.publish_policy_version(4)
        return load(*arguments)

    monkeypatch.setattr(grpo, "load_learner", meanwhile)
    status, _, err = learn("a", 2)
    assert status == 1
    assert f"[SB518] bridge {bridge} went on to version 4 while this learner was loading" in err
    assert info(bridge).policy_version == 4


def test_a_living_learner_is_named_before_anything_is_loaded(learn, bridge, monkeypatch):
    monkeypatch.setattr(grpo, "load_learner", None)
    with shmbridge.Consumer(bridge) as living:
        living.publish_policy_version(4)
        status, _, err = learn("a", 2)
    assert (status, "[SB401]" in err) == (1, True)


def test_steps_below_the_step_reached_are_a_clear_line(learn, trained, bridge):
    for steps in (STEPS, STEPS - 2):
        status, out, err = learn("a", steps, "--resume", batches=0)
        assert status == 0, err
        (line,) = re.findall(r"^grpo: bridge .*nothing is trained.*$", out, re.MULTILINE)
        assert f"step {STEPS} is reached and --steps is {steps}" in line
        assert "done:" not in out
        assert "waiting" not in out


def test_the_run_is_noted_with_its_bridge(bridge, learn, trained, tmp_path):
    config = parse(["--bridge", bridge, "--model", "m", "--steps", "9", "--run-dir", str(tmp_path / "b")])
    with pytest.raises(BridgeAhead) as error:
        decided(config)
    assert error.value.code == "SB518"
    assert re.fullmatch("[0-9a-f]{16}", info(bridge).run_id)


# --- options ----------------------------------------------------------------------------------------------


def test_what_a_resume_changes_is_printed_and_kept_in_the_runs_file(learn, trained, tmp_path):
    path = tmp_path / "a" / "config.yaml"
    status, out, err = learn("a", 4, "--resume", "--lr", "0.5", "--keep", "7", "--entropy", "0.1")
    assert status == 0, err
    first = "from step 3 on --steps 3 -> 4, --entropy 0 -> 0.1, --lr 0.01 -> 0.5"
    assert f"grpo: {first.replace(' on ', ' on with other options: ', 1)}\n" in out
    assert parse(["--config", str(path)]).checkpoints.keep == 7
    status, out, err = learn("a", 5, "--resume", "--lr", "0.5", "--entropy", "0.1")
    assert status == 0, err
    assert "from step 4 on with other options: --steps 4 -> 5\n" in out
    lines = path.read_text().splitlines()
    assert lines[1:3] == [f"# changed: {first}", "# changed: from step 4 on --steps 4 -> 5"]
    assert parse(["--config", str(path)]).optimizer.lr == 0.5


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--model", "elsewhere"), "--model model -> elsewhere -> give --model model again"),
        (("--lora-rank", "2"), "--lora-rank none -> 2 -> leave --lora-rank out"),
        (("--param-dtype", "bfloat16"), "--param-dtype float32 -> bfloat16 -> give --param-dtype float32"),
    ],
)
def test_a_resume_of_another_model_is_refused_and_the_runs_file_stays_true(
    learn, bridge, tmp_path, monkeypatch, flags, said
):
    monkeypatch.chdir(tmp_path)
    assert learn("a", 1, "--model", "model")[0] == 0
    shutil.copytree("model", "elsewhere")
    before = (tmp_path / "a" / "config.yaml").read_bytes()
    monkeypatch.setattr(grpo, "load_learner", None)
    status, _, err = learn("a", 2, "--resume", "--model", "model", *flags)
    assert status == 1
    (line,) = err.splitlines()
    assert f"the checkpoints in {tmp_path / 'a'} hold another model than these options train: {said}" in line
    assert ("was the folder moved?" in line) == (flags[0] == "--model")
    assert (tmp_path / "a" / "config.yaml").read_bytes() == before


def test_a_start_that_fails_changes_no_option_of_the_run(learn, trained, tmp_path):
    before = (tmp_path / "a" / "config.yaml").read_bytes()
    assert learn("a", 9, "--resume", "--schedule", "cosine", "--schedule-option", "moons=3")[0] == 1
    assert (tmp_path / "a" / "config.yaml").read_bytes() == before


def test_one_folder_by_another_path_is_the_same_model(learn, trained, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "link").symlink_to("model")
    for steps, model in ((4, "./model"), (5, "link"), (6, "a/../model")):
        status, out, err = learn("a", steps, "--resume", "--model", model)
        assert status == 0, err
        assert "--model" not in out


@pytest.mark.parametrize("text", [None, "{", "[1]", "run: {unheard_of: 1}", "optimizer: {lr: fast}"])
def test_a_run_whose_file_cannot_be_read_is_resumed_with_a_line(learn, trained, tmp_path, text):
    path = tmp_path / "a" / "config.yaml"
    path.unlink()
    if text is not None:
        path.write_text(text)
    status, out, err = learn("a", 4, "--resume")
    assert status == 0, err
    assert "has no readable config.yaml: options are not compared with earlier ones" in out
    assert parse(["--config", str(path)]).run.steps == 4
