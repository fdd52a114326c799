"""Rows as prime-rl takes them: `prime_rl_training_sample`, and packed, `prime_rl_micro_batch`.

Fields of `prime_rl.transports.rollouts.types` at commit 559b4477. Policy versions have no field there: the
orchestrator keeps them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from shmbridge import BadArgument, InvalidRecord
from shmbridge.consumers.advantages.batch_facts import BatchFacts
from shmbridge.consumers.trajectories import Trajectory
from shmbridge.schema import recorded_logprobs


def prime_rl_training_sample(row: Trajectory, *, temperature: float = 1.0) -> dict[str, Any]:
    """Returns the fields of a `TrainingSample`. Never blocks; the values are copies.

    Args:
        row: of a packed batch.
        temperature: of a row that recorded none.

    Raises:
        InvalidRecord: a trained token has no log-probability: prime-rl's ratio needs all.
    """
    if row.logprobs is None:
        raise InvalidRecord(
            f"row {row.number} of group {row.meta.group_id} of {row.meta.env_name} has no log-probability "
            "for every trained token, and prime-rl trains none without",
            hint="record inference_logprobs in the environment",
            column="inference_logprobs",
            row=row.number,
        )
    reference = row.value("ref_logprobs")
    if reference is not None:  # prime-rl has no mark for a token without one
        reference = np.where(row.trained, recorded_logprobs(reference), np.float32(0))
        reference = None if np.isnan(reference).any() else reference
    heat = float(BatchFacts(row.batch, temperature).temperatures[row.row])
    return {
        "token_ids": row.tokens.tolist(),
        "mask": row.trained.tolist(),
        "logprobs": row.logprobs.tolist(),
        "temperatures": [heat] * len(row.tokens),
        "env_name": row.meta.env_name,
        "ref_logprobs": None if reference is None else reference.tolist(),
        "advantages": row.advantages.tolist(),
    }


def prime_rl_micro_batch(rows: Sequence[Trajectory], *, temperature: float = 1.0) -> dict[str, Any]:
    """Returns the fields of a `MicroBatch` of whole rows, one after the other. Never blocks; copies.

    Reference log-probabilities are carried if all rows have them.

    Args:
        rows: of packed batches, at least one.
        temperature: of rows that recorded none.

    Raises:
        BadArgument: no rows, or an environment is called "all", which prime-rl keeps for its metrics.
        InvalidRecord: see `prime_rl_training_sample`.
    """
    if not rows:
        raise BadArgument("a micro batch of no rows", hint="give it at least one")
    samples = [prime_rl_training_sample(row, temperature=temperature) for row in rows]
    if any(sample["env_name"] == "all" for sample in samples):
        raise BadArgument(
            'an environment is called "all", which prime-rl keeps for its metrics',
            hint="give its producer another env_name",
        )
    lengths = [len(sample["token_ids"]) for sample in samples]
    reference = [sample["ref_logprobs"] for sample in samples]
    return {
        "input_ids": _joined(samples, "token_ids"),
        "loss_mask": _joined(samples, "mask"),
        "advantages": _joined(samples, "advantages"),
        "inference_logprobs": _joined(samples, "logprobs"),
        "position_ids": [position for length in lengths for position in range(length)],
        "sequence_lengths": lengths,
        "temperatures": _joined(samples, "temperatures"),
        "env_names": [
            name
            for sample, length in zip(samples, lengths, strict=True)
            for name in [sample["env_name"]] * length
        ],
        "seq_lens": list(lengths),
        "ref_logprobs": None if None in reference else _joined(samples, "ref_logprobs"),
    }


def _joined(samples: Sequence[dict[str, Any]], name: str) -> list[Any]:
    return [value for sample in samples for value in sample[name]]
