"""A `Trajectory` as the fields of a trainer that this project has no adapter for.

    from shmbridge.consumers.record_factories import torchtitan_training_sample
    sample = TrainingSample(**torchtitan_training_sample(row))

Pure functions: a row in, a dict of the trainer's own field names out, in plain Python values. They import no
trainer and hold no lease; the batch may be released as soon as they returned. One copy of every token.

Written from `prime_rl.transports.rollouts.types` at commit 559b4477 (policy versions have no field there: the
orchestrator keeps them), `slime.utils.types.Sample` at commit 624b824a (slime computes advantages itself; the
row's own are in `train_metadata`, for a `--custom-advantage-function-path`), and
`torchtitan.experiments.rl.types` at commit b5bcd76c.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from shmbridge import BadArgument
from shmbridge.consumers.advantages.batch_facts import BatchFacts
from shmbridge.consumers.trajectories import Trajectory
from shmbridge.schema import recorded_logprobs

__all__ = ["prime_rl_micro_batch", "prime_rl_training_sample", "slime_sample", "torchtitan_training_sample"]


def group_number(row: Trajectory) -> int:
    """Returns the number of a row's group, 0 to 2**63 - 1; the same for its rows, in every process.

    Made from the producer and the group's id, so a group that a producer puts twice under one id has one
    number. Never blocks.
    """
    name = f"{row.meta.producer_id}\n{row.meta.group_id}".encode()
    return int.from_bytes(hashlib.sha256(name).digest()[:8], "big") >> 1


def prime_rl_training_sample(row: Trajectory, *, temperature: float = 1.0) -> dict[str, Any]:
    """Returns the fields of a `TrainingSample`. Never blocks; the values are copies.

    Args:
        row: of a packed batch.
        temperature: of a row that recorded none.

    Raises:
        NoLogprobs: a trained token has no log-probability: prime-rl's ratio needs all.
    """
    logprobs = row.known_logprobs("leave the row out: prime-rl trains none without")
    reference = row.value("ref_logprobs")
    if reference is not None:  # prime-rl has no mark for a token without one
        reference = np.where(row.trained, recorded_logprobs(reference), np.float32(0))
        reference = None if np.isnan(reference).any() else reference
    heat = float(BatchFacts(row.batch, temperature).temperatures[row.row])
    return {
        "token_ids": row.tokens.tolist(),
        "mask": row.trained.tolist(),
        "logprobs": logprobs.tolist(),
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
        NoLogprobs: see `prime_rl_training_sample`.
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


_STATUS = {"length": "truncated", "abort": "aborted", "error": "failed"}


def slime_sample(row: Trajectory, index: int, rollout_id: int | None = None) -> dict[str, Any]:
    """Returns what `Sample.from_dict` makes a sample of. Never blocks; the values are copies.

    Response arrays have R values, from `prompt_length` on; `rollout_log_probs` is None if one is unknown.

    Args:
        row: of a packed batch.
        index: the sample's number in the rollout.
        rollout_id: equal for rows of one episode; None: every row is an episode.
    """
    response = row.response
    versions = row.value("token_versions")
    known = [] if versions is None else np.unique(versions[versions >= 0]).tolist()
    ends = sorted({int(row.meta.min_policy_version), int(row.meta.max_policy_version)})
    return {
        "group_index": group_number(row),
        "index": index,
        "rollout_id": rollout_id,
        "tokens": row.tokens.tolist(),
        "response_length": len(row.tokens) - row.prompt_length,
        "reward": row.score,
        "loss_mask": row.trained[response].astype(int).tolist(),
        "weight_versions": [str(version) for version in known or ends if version >= 0],
        "rollout_log_probs": None if row.logprobs is None else row.logprobs[response].tolist(),
        "status": _STATUS.get(row.finish_reason or "stop", "completed"),
        "remove_sample": not row.trained.any(),
        "metadata": {"group_id": row.meta.group_id, "instance_id": row.instance_id},
        "train_metadata": {"advantages": row.advantages[response].tolist()},
    }


def torchtitan_training_sample(row: Trajectory) -> dict[str, Any]:
    """Returns the fields of a `TrainingSample`. Never blocks; the values are copies.

    `rollout_id` has the fields of a `RolloutTurnID`: build that first. A trained token without a recorded
    log-probability has NaN, which torchtitan leaves out of its loss.

    Args:
        row: of a packed batch.
    """
    oldest, newest = _versions(row)
    recorded = row.value("inference_logprobs")
    logprobs = np.where(row.trained, np.nan if recorded is None else recorded_logprobs(recorded), 0)
    return {
        "min_policy_version": oldest,
        "max_policy_version": newest,
        "rollout_id": {
            "group_id": group_number(row),
            "rollout_id": row.repetition_id,
            "turn_id": int(row.value("row_index") or 0),
        },
        "token_ids": row.tokens.tolist(),
        "loss_mask": row.trained.tolist(),
        "logprobs": logprobs.tolist(),
        "advantage": row.advantages.tolist(),
    }


def _versions(row: Trajectory) -> tuple[int, int]:
    """Returns the oldest and newest version of the trained tokens; the record's where tokens have none."""
    stamped = row.value("token_versions")
    if stamped is not None and (own := stamped[row.trained & (stamped >= 0)]).size:
        return int(own.min()), int(own.max())
    return int(row.meta.min_policy_version), int(row.meta.max_policy_version)
