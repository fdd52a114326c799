"""A user's mistakes end the learner before anything is trained, with exit status 1 and one line: what is
wrong and what to do.
"""

from __future__ import annotations

import os
import uuid

import pytest
import torch

import shmbridge
from shmbridge.consumers import grpo
from shmbridge.consumers.learner import checkpoint
from shmbridge.consumers.learner.checkpoint import Progress, rng_state
from shmbridge.consumers.learner.model.optimizer import new_optimizer


@pytest.fixture
def refused(tiny_model, tmp_path, capsys):
    """Return what a learner with these flags says on its one line."""
    bridge = f"refused-{os.getpid()}-{uuid.uuid4().hex[:8]}"
    if not (tmp_path / "model").exists():
        tiny_model(1).save_pretrained(tmp_path / "model")

    def start(*flags):
        fixed = [
            "--bridge",
            bridge,
            "--model",
            str(tmp_path / "model"),
            "--run-dir",
            str(tmp_path / "run"),
            "--steps",
            "3",
        ]
        assert grpo.main([*fixed, "--device", "cpu", "--threads", "1", "--max-wait-time", "0.1", *flags]) == 1
        lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("grpo: error: ")]
        assert len(lines) == 1
        return lines[0]

    yield start
    shmbridge.clean(bridge, dry_run=False)


@pytest.fixture
def saved(tiny_model, tmp_path):
    """Return a checkpoint after two steps."""
    model = tiny_model(1)
    optimizer = new_optimizer(model.parameters(), 0.0)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return checkpoint.save(
        tmp_path / "run" / "checkpoints", Progress(2, 2), model, None, optimizer, rng=rng_state()
    )


def test_a_model_that_is_not_there(refused, tmp_path):
    assert "[SB106] there is no folder " in refused("--model", str(tmp_path / "nothing"))
    (tmp_path / "empty").mkdir()
    assert "empty has no config.json -> " in refused("--model", str(tmp_path / "empty"))


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is there")
def test_a_gpu_that_is_not_there(refused):
    assert "torch sees no GPU here -> --device cpu" in refused("--device", "cuda")


def test_a_run_dir_that_cannot_be_written(refused, tmp_path):
    (tmp_path / "file").write_text("")
    assert "cannot write to --run-dir" in refused("--run-dir", str(tmp_path / "file"))
    assert "cannot write to --run-dir" in refused("--run-dir", "/proc/nowhere")


@pytest.mark.parametrize(
    "name", ["learner.json", "optimizer.safetensors", "rng.safetensors", "model.safetensors"]
)
@pytest.mark.parametrize("length", [0, 40])
def test_a_damaged_checkpoint(refused, saved, name, length):
    os.truncate(saved / name, length)
    said = refused("--resume")
    assert str(saved) in said
    assert name in said or "cannot load a model" in said
    assert said.endswith(" -> put step-00000002 elsewhere: --resume takes the one before it")


def test_a_checkpoint_without_its_optimizer_or_progress(refused, saved):
    (saved / "optimizer.safetensors").unlink()
    assert "optimizer.safetensors is damaged or not there" in refused("--resume")
    (saved / "learner.json").write_text("{}")
    assert "put step-00000002 elsewhere: --resume takes the one before it" in refused("--resume")


@pytest.mark.parametrize(
    ("flags", "needs"),
    [
        ("--tis-level sequence", "--tis-cap"),
        ("--kl-estimator k1", "--kl-coef"),
        ("--max-answer-tokens 9", "--loss dr_grpo"),
        ("--process-weight 0.2", "--process-rewards"),
        ("--process-over place", "--process-rewards"),
        ("--process-discount 0.5 --process-rewards step", "--process-rewards to_go"),
        ("--token-weight 0.2", "--token-rewards"),
        ("--token-discount 0.2", "--token-rewards"),
        ("--lora-alpha 4", "--lora-rank"),
        ("--lora-dropout 0.5", "--lora-rank"),
        ("--lora-targets q_proj", "--lora-rank"),
        ("--eval-every 3", "--eval-hook"),
        ("--stop-patience 3", "--stop-when"),
        ("--stop-stall 3", "--stop-no-better"),
        ("--wandb-name mine", "--wandb"),
    ],
)
def test_a_flag_that_does_nothing_alone(refused, flags, needs):
    assert f"{flags.split()[0]} does nothing without {needs} ->" in refused(*flags.split())


@pytest.mark.parametrize(
    ("flags", "beside"),
    [
        ("--clip-dual 5 --tis-cap 2", "--tis-cap"),
        ("--no-fallback-to-grpo --no-use-advantages", "--no-use-advantages"),
    ],
)
def test_a_flag_that_does_nothing_beside_another(refused, flags, beside):
    assert f"{flags.split()[0]} does nothing beside {beside}: " in refused(*flags.split())


@pytest.mark.parametrize(
    "flags",
    [
        *("--lr nan", "--lr inf", "--lr -1", "--weight-decay -1", "--entropy nan", "--kl-coef inf"),
        *("--seed -1", f"--seed {2**64}", "--schedule-option power=high", "--stop-when reward_mean>=nan"),
    ],
)
def test_numbers_that_nothing_can_be_computed_with(refused, flags, capsys):
    with pytest.raises(SystemExit) as ended:
        refused(*flags.split())
    assert ended.value.code == 2
    assert f"error: {flags.split()[0]}: " in capsys.readouterr().err


def test_a_torchrun_environment_that_lacks_variables(refused, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert "WORLD_SIZE is 2, and there is no RANK, MASTER_ADDR, MASTER_PORT" in refused()
    monkeypatch.setenv("WORLD_SIZE", "two")
    assert "WORLD_SIZE=two is no whole number" in refused()


@pytest.mark.parametrize("flags", [("--pause", "wait"), ("--engine-patience", "5")])
def test_flags_of_engines_without_one(refused, flags):
    assert flags[0] + " does nothing without --engine" in refused(*flags)


def test_engines_without_weights(refused):
    said = refused("--engine", "http://127.0.0.1:9", "--no-weights")
    assert "--engine takes weights, and --no-weights writes none -> leave one of them out" in said


@pytest.mark.parametrize(
    ("hook", "said"),
    [
        ("accuracy", "--eval-hook accuracy is not MODULE:FUNCTION -> such as my_evaluation:accuracy"),
        (
            "no_such_module:f",
            "No module named 'no_such_module' -> is no_such_module.py in this folder, or on",
        ),
        ("json:dumpz", "module 'json' has no attribute 'dumpz' -> did you mean json:dump?"),
        ("json:__name__", "--eval-hook json:__name__: a str cannot be called -> name a function"),
    ],
)
def test_an_evaluation_hook_that_cannot_be_had(refused, hook, said):
    assert said in refused("--eval-hook", hook)
