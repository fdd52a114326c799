"""Checkpoints: training goes on as if never interrupted, and a half-written one is never taken for whole."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from shmbridge.consumers.learner import checkpoint
from shmbridge.consumers.learner.checkpoint import Progress, rng_state, set_rng_state
from shmbridge.consumers.learner.model.optimizer import cast_parameters, new_optimizer
from shmbridge.consumers.learner.train.grpo_update import Learner, Objective

ROWS = [[3, 4, 5, 6], [3, 4, 7, 8], [9, 1, 2], [9, 1, 3]]


def learner(model):
    return Learner(model, Objective(entropy=0.1), lambda step: 5e-3, weight_decay=0.01)


def train(own, batch, steps):
    for _ in range(steps):
        own.accumulate(batch)
        own.apply()


@pytest.fixture
def batch(packed_batch):
    return packed_batch(ROWS, scores=[1.0, 0.0, 0.0, 1.0], groups=[0, 0, 1, 1])


def test_a_restored_learner_trains_on_as_if_nothing_had_happened(tiny_model, batch, tmp_path):
    through = learner(tiny_model(1))
    train(through, batch, 6)

    first = learner(tiny_model(1))
    train(first, batch, 3)
    path = checkpoint.save(tmp_path, Progress(3, 7), first.model, None, first.optimizer)

    second = learner(AutoModelForCausalLM.from_pretrained(path).float())
    assert checkpoint.load_progress(path) == Progress(step=3, policy_version=7)
    checkpoint.load_optimizer(path, second.model, second.optimizer)
    train(second, batch, 3)

    for (name, expected), (_, found) in zip(
        through.model.named_parameters(), second.model.named_parameters(), strict=True
    ):
        torch.testing.assert_close(found, expected, rtol=0, atol=0, msg=name)


def test_a_learner_without_its_optimizer_state_would_differ(tiny_model, batch, tmp_path):
    """This shows that the test above can fail: the moments matter after three steps."""
    own = learner(tiny_model(1))
    train(own, batch, 3)
    path = checkpoint.save(tmp_path, Progress(3, 3), own.model, None, own.optimizer)
    bare = learner(AutoModelForCausalLM.from_pretrained(path).float())
    train(own, batch, 1)
    train(bare, batch, 1)
    pairs = zip(own.model.parameters(), bare.model.parameters(), strict=True)
    assert any(not torch.equal(a, b) for a, b in pairs)


def test_a_checkpoint_has_only_safetensors_json_and_tokenizer_files(tiny_model, batch, tmp_path):
    own = learner(tiny_model(1))
    train(own, batch, 1)
    path = checkpoint.save(tmp_path, Progress(1, 1), own.model, None, own.optimizer)
    assert {file.suffix for file in path.iterdir()} == {".json", ".safetensors"}
    assert {"model.safetensors", "optimizer.safetensors", "learner.json"} <= {f.name for f in path.iterdir()}


def test_a_save_that_dies_leaves_the_earlier_checkpoint_and_the_next_one_cleans_up(
    tiny_model, batch, tmp_path, monkeypatch
):
    own = learner(tiny_model(1))
    train(own, batch, 1)
    first = checkpoint.save(tmp_path, Progress(1, 1), own.model, None, own.optimizer)

    class KilledError(BaseException):
        pass

    def die(*args):
        raise KilledError

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "save_file", die)
        with pytest.raises(KilledError):
            checkpoint.save(tmp_path, Progress(2, 2), own.model, None, own.optimizer)
    assert len(list(tmp_path.iterdir())) == 2
    assert checkpoint.complete(tmp_path) == [first]

    second = checkpoint.save(tmp_path, Progress(2, 2), own.model, None, own.optimizer)
    assert checkpoint.complete(tmp_path) == [first, second]
    assert sorted(tmp_path.iterdir()) == [first, second]


def test_the_newest_checkpoints_are_kept_in_order_of_steps(tiny_model, tmp_path):
    own = learner(tiny_model(1))
    for step in (9, 10, 100):
        checkpoint.save(tmp_path, Progress(step, step), own.model, None, own.optimizer, keep=2)
    assert [checkpoint.load_progress(path).step for path in checkpoint.complete(tmp_path)] == [10, 100]


def test_a_missing_folder_has_no_checkpoint(tmp_path):
    assert checkpoint.complete(tmp_path / "nothing") == []


def test_checkpoints_of_an_older_release_are_read_and_of_a_newer_one_refused(tiny_model, batch, tmp_path):
    own = learner(tiny_model(1))
    train(own, batch, 1)
    path = checkpoint.save(tmp_path, Progress(1, 4, groups=2), own.model, None, own.optimizer)
    assert checkpoint.load_rng(path) is None
    (path / "learner.json").write_text('{"step": 1, "policy_version": 4}\n')
    assert checkpoint.load_progress(path) == Progress(1, 4)
    (path / "learner.json").write_text('{"step": 1, "policy_version": 4, "moons": 2}\n')
    with pytest.raises(checkpoint.CheckpointMismatch, match=r"newer release.*moons"):
        checkpoint.load_progress(path)


def draw():
    return [
        *torch.rand(5).tolist(),
        *np.random.rand(5),
        *np.random.randn(3),
        *(random.random() for _ in range(5)),
        random.gauss(0, 1),
    ]


def test_every_random_generator_goes_on_where_it_was(tiny_model, tmp_path):
    own = learner(tiny_model(1))
    torch.manual_seed(3)
    np.random.seed(4)
    random.seed(5)
    draw()  # an odd number of normal ones: both numpy and Python keep one back
    path = checkpoint.save(tmp_path, Progress(1, 1), own.model, None, own.optimizer, rng=rng_state())
    expected = draw()
    assert draw() != expected
    set_rng_state(checkpoint.load_rng(path))
    assert draw() == expected


def test_bfloat16_parameters_go_on_from_their_masters(tiny_model, batch, tmp_path):
    def bfloat16(model):
        cast_parameters(model.parameters(), torch.bfloat16)
        own = learner(model)
        own.optimizer = new_optimizer(model.parameters(), 0.01)
        return own

    through, first = bfloat16(tiny_model(1)), bfloat16(tiny_model(1))
    train(through, batch, 4)
    train(first, batch, 2)
    path = checkpoint.save(tmp_path, Progress(2, 2), first.model, None, first.optimizer)
    second = bfloat16(AutoModelForCausalLM.from_pretrained(path))
    checkpoint.load_optimizer(path, second.model, second.optimizer)
    train(second, batch, 2)
    pairs = zip(through.model.parameters(), second.model.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)

    other = learner(AutoModelForCausalLM.from_pretrained(path).float())
    with pytest.raises(checkpoint.CheckpointMismatch, match="--param-dtype"):
        checkpoint.load_optimizer(path, other.model, other.optimizer)


def test_a_state_of_other_parameters_is_refused(tiny_model, batch, tmp_path):
    own = learner(tiny_model(1))
    train(own, batch, 1)
    path = checkpoint.save(tmp_path, Progress(1, 1), own.model, None, own.optimizer)
    own.model.lm_head.weight.requires_grad_(False)
    with pytest.raises(checkpoint.CheckpointMismatch, match=r"lm_head.weight and 0 more.*--lora"):
        checkpoint.load_optimizer(path, own.model, own.optimizer)
