"""The room imports no trainer before it is needed, and TRL has what it builds on."""

import inspect
import os
import subprocess
import sys

import pytest
from trl import GRPOTrainer
from trl.experimental.async_grpo import async_grpo_trainer as stock
from trl.experimental.async_grpo.async_rollout_worker import RolloutSample

import shmbridge
from shmbridge.consumers import trl as room
from shmbridge.consumers.trl import ShmRolloutWorker, ShmWeightTransfer


def test_importing_the_room_imports_no_trainer():
    code = (
        "import sys, shmbridge.consumers.trl\n"
        "print(sorted({'trl', 'torch', 'transformers', 'accelerate', 'datasets'} & set(sys.modules)))"
    )
    path = os.path.dirname(os.path.dirname(shmbridge.__file__))
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=os.environ | {"PYTHONPATH": path}
    )
    assert done.stdout == "[]\n", done.stderr


def test_every_listed_name_is_there():
    assert all(getattr(room, name) is not None for name in room.__all__)
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = room.no_such_name


def test_trl_has_the_methods_that_are_extended():
    """`ShmGRPOTrainer` overrides or calls these of TRL's own; another signature is another contract."""
    parameters = {
        name: list(inspect.signature(getattr(GRPOTrainer, name)).parameters)
        for name in ("_generate_and_score_completions", "_get_per_token_logps_and_entropies", "log")
    }
    assert parameters["_generate_and_score_completions"] == ["self", "inputs"]
    assert parameters["_get_per_token_logps_and_entropies"][:6] == [
        "self", "model", "input_ids", "attention_mask", "logits_to_keep", "batch_size"
    ]  # fmt: skip
    assert parameters["log"] == ["self", "logs", "start_time"]
    source = inspect.getsource(GRPOTrainer._compute_loss)
    assert 'inputs.get("old_per_token_logps")' in source
    assert "advantages.dim() == 1" in source


@pytest.mark.parametrize(
    ("protocol", "ours"),
    [(stock.RolloutWorkerProtocol, ShmRolloutWorker), (stock.WeightTransferProtocol, ShmWeightTransfer)],
)
def test_the_protocols_of_the_async_trainer_are_kept(protocol, ours):
    wanted = {
        name: each for name, each in vars(protocol).items() if inspect.isfunction(each) and name[0] != "_"
    }
    assert wanted
    for name, each in wanted.items():
        mine = list(inspect.signature(getattr(ours, name)).parameters)
        assert mine == list(inspect.signature(each).parameters), name


def test_a_sample_has_the_fields_that_are_filled():
    assert list(inspect.signature(RolloutSample).parameters) == [
        "prompt", "completion", "input_ids", "completion_mask", "old_log_probs", "advantage", "model_version",
        "group_id", "metrics", "enqueued_at",
    ]  # fmt: skip
