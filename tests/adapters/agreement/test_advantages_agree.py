"""The estimators and what verl and TRL compute for the same random batches, where those packages are
installed.

TRL computes its advantages inside a method of GRPOTrainer, so that block of its source runs as it is written.
"""

from __future__ import annotations

import ast
import importlib.util
import math
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor

from shmbridge.consumers.advantages.from_scores import (
    batch_normalised,
    group_advantages,
    leave_one_out,
    spread_to_tokens,
)
from shmbridge.consumers.advantages.process_rewards import token_reward_advantages

TOLERANCE = 1e-5  # float32; advantages are of the order of 1, and up to 100 in groups that hardly differ
RAW = "a group of one gets its raw score there, 0 here"
SAMPLE = "the deviation is that of a sample there, of the population here"
ON_PURPOSE = {
    ("grpo", "some groups alone"): RAW,
    ("grpo, norm_adv_by_std_in_grpo=False", "some groups alone"): RAW,
    ("grpo_vectorized", "some groups alone"): RAW,
    ("rloo", "some groups alone"): RAW,
    ("reinforce_plus_plus_baseline", "some groups alone"): RAW,
    ("reinforce_plus_plus", "rewards on all tokens"): SAMPLE,
}


class Batch:
    """Random rows in groups of several sizes, some flat, some alone; responses of several lengths, unpadded
    and padded.
    """

    def __init__(self, seed, groups=24, longest=17, sizes=(1, 2, 4, 8)):
        rng = np.random.default_rng(seed)
        counts = rng.choice(sizes, groups)
        self.group = rng.permutation(np.repeat(np.arange(groups), counts))
        flat = np.isin(self.group, [0, 1])
        self.scores = np.where(
            flat,
            0.5,
            rng.choice([0.0, 1.0, rng.normal()], self.group.size) + rng.normal(0, 0.3, self.group.size),
        )
        self.scores = self.scores.astype(np.float32)
        self.lengths = rng.integers(1, longest + 1, self.group.size)
        self.cu_seqlens = np.concatenate([[0], np.cumsum(self.lengths)])
        self.mask = (rng.random(self.cu_seqlens[-1]) < 0.8).astype(np.uint8)
        self.mask[self.cu_seqlens[1:] - 1] = 1
        self.dense = rng.normal(0, 1, self.mask.size).astype(np.float32)

    def padded(self, values) -> Tensor:
        out = torch.zeros(self.lengths.size, int(self.lengths.max()))
        for row, (start, length) in enumerate(zip(self.cu_seqlens, self.lengths, strict=False)):
            out[row, :length] = torch.from_numpy(np.asarray(values[start : start + length], np.float32))
        return out

    def outcome(self) -> Tensor:
        """The score on the last token, as verl has it."""
        on_last = np.zeros(self.mask.size, np.float32)
        on_last[self.cu_seqlens[1:] - 1] = self.scores
        return self.padded(on_last)


def verl_rows(seed):
    verl = pytest.importorskip(
        "verl.trainer.ppo.core_algos", reason="verl is not installed", exc_type=ImportError
    )
    config = SimpleNamespace(gamma=0.9, get=lambda key, default=None: default)
    batches = {"no group alone": Batch(seed, sizes=(2, 4, 8)), "some groups alone": Batch(seed)}
    like = {"ddof": 1, "eps": 1e-6, "floor": 0.0}

    def theirs(name, it, rewards=None, **options):
        function = getattr(verl, f"compute_{name}_outcome_advantage")
        return function(
            it.outcome() if rewards is None else rewards,
            it.padded(it.mask),
            index=it.group,
            config=config,
            **options,
        )[0]

    for what, it in batches.items():
        normalised = group_advantages(it.scores, it.group, **like)
        centred = group_advantages(it.scores, it.group, scale="none")
        for name, per_row, options in (
            ("grpo", normalised, {}),
            ("grpo", centred, {"norm_adv_by_std_in_grpo": False}),
            ("grpo_vectorized", normalised, {}),
            ("rloo", leave_one_out(it.scores, it.group), {}),
            ("rloo_vectorized", leave_one_out(it.scores, it.group), {}),
        ):
            label = ", ".join([name, *(f"{key}={value}" for key, value in options.items())])
            made, ours = (
                theirs(name, it, **options),
                it.padded(spread_to_tokens(per_row, it.cu_seqlens, it.mask)),
            )
            yield label, what, made, ours
            if what == "some groups alone":
                company = torch.from_numpy(np.bincount(it.group)[it.group] > 1).unsqueeze(1)
                yield label, "some groups alone, those left out", made * company, ours * company
        on_tokens = spread_to_tokens(centred, it.cu_seqlens, it.mask)
        name = "reinforce_plus_plus_baseline"
        yield name, what, theirs(name, it), it.padded(batch_normalised(on_tokens, it.mask, ddof=1))

    name, count = "reinforce_plus_plus", int(it.mask.sum())
    dense = it.padded(
        token_reward_advantages(it.dense, it.group, it.cu_seqlens, it.mask, discount=0.9, over="batch")
    )
    yield name, "rewards on all tokens", theirs(name, it, it.padded(it.dense)), dense
    sampled = dense * math.sqrt((count - 1) / count)
    yield (
        name,
        "rewards on all tokens, for a sample's deviation",
        theirs(name, it, it.padded(it.dense)),
        sampled,
    )


def trl_block():
    """The statement of GRPOTrainer that makes advantages of rewards, and its `nanstd`, compiled from TRL's
    own files.
    """
    package = importlib.util.find_spec("trl")
    if package is None:
        pytest.skip("TRL is not installed")
    where = Path(package.origin).parent / "trainer"
    trainer = ast.parse((where / "grpo_trainer.py").read_text())
    # The outermost `if` on the aggregation is found first: ast.walk goes breadth first.
    block = next(
        node
        for node in ast.walk(trainer)
        if isinstance(node, ast.If)
        and "self.multi_objective_aggregation ==" in ast.unparse(node.test)
        and "advantages = " in ast.unparse(node)
    )
    tools = ast.parse((where / "utils.py").read_text())
    nanstd = next(node for node in tools.body if isinstance(node, ast.FunctionDef) and node.name == "nanstd")
    scope = {"torch": torch}
    exec(compile(ast.Module([nanstd], []), "trl/trainer/utils.py", "exec"), scope)
    return compile(ast.Module([block], []), "trl/trainer/grpo_trainer.py", "exec"), scope


def trl_rows(seed):
    code, scope = trl_block()
    batch = Batch(seed, sizes=(8,))
    group = np.sort(batch.group)  # TRL has its groups one after another
    for scale, options in (("group", {"scale": "std", "ddof": 1, "floor": 0.0}), ("none", {"scale": "none"})):
        trainer = SimpleNamespace(
            multi_objective_aggregation="sum_then_normalize",
            scale_rewards=scale,
            reward_weights=torch.ones(1),
        )
        for what, broken in (("all scored", 0), ("some rows without a score", 9)):
            scores = np.where(np.arange(group.size) < broken, np.nan, batch.scores).astype(np.float32)
            rewards = torch.from_numpy(scores).unsqueeze(1)
            names = {
                **scope,
                "self": trainer,
                "rewards_per_func": rewards,
                "device": torch.device("cpu"),
                "num_generations": 8,
                "unscorable_mask": torch.isnan(rewards).all(dim=1),
            }
            exec(code, names)
            theirs = torch.nan_to_num(names["advantages"], nan=0.0)  # as the trainer does after that block
            yield (
                f"GRPOTrainer, scale_rewards={scale}",
                what,
                theirs,
                torch.from_numpy(group_advantages(scores, group, **options)),
            )


@pytest.mark.parametrize(("package", "rows"), [("verl", verl_rows), ("TRL", trl_rows)])
def test_estimators_agree_with_verl_and_trl(agreement, package, rows):
    worst = {}
    for seed in range(5):
        for estimator, what, theirs, ours in rows(seed):
            assert theirs.shape == ours.shape
            worst[estimator, what] = max(
                worst.get((estimator, what), 0.0), float((theirs.float() - ours).abs().max())
            )
    for (estimator, what), difference in worst.items():
        why = ON_PURPOSE.get((estimator, what)) if package == "verl" else None
        agreement(package, f"{estimator}: {what}", difference, None, TOLERANCE if why is None else None, why)
        assert difference < TOLERANCE if why is None else difference > 1e-3
