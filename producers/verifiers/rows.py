"""Makes the columns of one group of the episodes that verifiers played: a row for each trainable branch.

Used by `rollout.py`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from shmbridge import ShmBridgeError
from shmbridge.producers.verifiers.door import Heard, Tokens, key_of
from shmbridge.schema import FINISH_REASONS

_FINISHED = {"stop": "stop", "length": "length", "abort": "abort", "error": "error", "tool_calls": "stop"}


class EpisodeFailed(ShmBridgeError):
    """verifiers ended an episode, or one of its traces, with an error; `kind` is its own name of it."""

    code = "SB522"

    def __init__(self, message: str, kind: str) -> None:
        super().__init__(message, hint="see the error, and verifiers' log")
        self.kind = kind


@dataclass(eq=False)
class Run:
    """One episode of a task that verifiers plays.

    Attributes:
        traces: those that came to a good end and are trainable, once it is over.
        heard: what the server sampled for each trace that was begun, by its id.
    """

    instance_id: str
    repetition_id: int
    temperature: float = 1.0
    traces: list[Any] = field(default_factory=list)
    heard: dict[str, Heard] = field(default_factory=dict)

    @property
    def asked_again(self) -> int:
        """Answers that were aborted before their first token."""
        return sum(each.asked_again for each in self.heard.values())

    def sampled_versions(self) -> list[int]:
        """Returns the policy version of each token sampled so far, -1 where it is not known. Never blocks."""
        return [
            version
            for each in self.heard.values()
            for versions in each.versions.values()
            for version in versions.tolist()
        ]

    def require_finished(self) -> None:
        """Raises EpisodeFailed if no row can be made of it. Never blocks."""
        name = f"episode {self.repetition_id} of task {self.instance_id!r}"
        if not any(_branches(trace) for trace in self.traces):
            raise EpisodeFailed(f"{name} has no trainable branch with sampled tokens", "no_tokens")
        for trace in self.traces:
            for part, value in {"": trace.reward, **_components(trace)}.items():
                if not math.isfinite(value):
                    raise EpisodeFailed(f"{name} has the reward {part!r} {value}", "no_reward")


def group_of(runs: Sequence[Run], left_out: Counter[str] | None = None) -> dict[str, Any]:
    """Returns the columns of a group, a row for each trainable branch of each trace. Never blocks.

    A column of which no row has a value is not there. One of which only some have keeps those; but for
    `advantages`, which have no mark of "none": they are left out.

    Args:
        left_out: counts the rows whose advantages were left out, under "advantages".
    """
    rows = [row for run in runs for row in _rows(run)]
    group: dict[str, Any] = {name: [row[name] for row in rows] for name in rows[0] if name not in _ABSENT}
    for name, absent in _ABSENT.items():
        known = [row for row in rows if row[name] is not None]
        if known and absent is not None:
            group[name] = [absent(row) if row[name] is None else row[name] for row in rows]
        elif len(known) == len(rows):
            group[name] = [row[name] for row in rows]
        elif known and left_out is not None:
            left_out[name] += len(known)
    group["extra"] = {"rows": [row.pop("about") for row in rows]}
    del group["about"]
    return group


# What stands for a value that only other rows of the group have.
_ABSENT: dict[str, Callable[[Mapping[str, Any]], Any] | None] = {
    "advantages": None,
    "ref_logprobs": lambda row: np.full(len(row["tokens"]), np.nan, np.float32),
    "reward_components": lambda _: {},
    "routed_experts": lambda _: b"",
    "sampling_mask": lambda _: b"",
}


def _branches(trace: Any) -> list[Any]:
    """The branches that train the policy and have something that it sampled."""
    return [each for each in trace.branches if each.trainable and any(each.sampled_mask)]


def _rows(run: Run) -> list[dict[str, Any]]:
    """The rows of an episode, numbered through."""
    found = [(trace, branch) for trace in run.traces for branch in _branches(trace)]
    rows = [_row(run, trace, branch) for trace, branch in found]
    for number, row in enumerate(rows):
        row["row_index"], row["is_last"] = number, number == len(rows) - 1
    return rows


def _row(run: Run, trace: Any, branch: Any) -> dict[str, Any]:
    tokens = np.asarray(branch.token_ids, np.int32)
    mask = np.asarray(branch.sampled_mask, np.uint8)
    versions, logprobs, ends, reason = _sampled(run.heard.get(trace.id, Heard()), branch, tokens)
    components = _components(trace)
    routes, kept = branch.routed_experts, branch.sampling_mask
    return {
        "tokens": tokens,
        "loss_mask": mask,
        "prompt_length": int(mask.argmax()),
        "score": float(trace.reward),
        "inference_logprobs": logprobs,
        "token_versions": versions,
        "temperature": run.temperature,
        "finish_reason": FINISH_REASONS.index(reason),
        "turn_ends": ends,
        "messages": [each.model_dump(exclude_none=True) for each in branch.messages],
        "instance_id": run.instance_id,
        "repetition_id": run.repetition_id,
        "advantages": branch.advantages,
        "ref_logprobs": branch.reference_logprobs,
        "reward_components": components or None,
        "routed_experts": None if routes is None else np.ascontiguousarray(routes).tobytes(),
        "sampling_mask": None if kept is None else _mask_bytes(kept),
        "about": {
            "trace": trace.id,
            "agent": trace.agent.name,
            "branch": branch.index,
            "stop_condition": trace.stop_condition,
            "metrics": {name: value for name, value in trace.metrics.items() if _is_number(value)},
            **(
                {}
                if routes is None
                else {"routed_experts": {"shape": list(routes.shape), "dtype": str(routes.dtype)}}
            ),
        },
    }


def _components(trace: Any) -> dict[str, float]:
    return {name: each.value for name, each in trace.rewards.items() if each is not None}


def _is_number(value: Any) -> bool:
    return value is not None and math.isfinite(value)


def _sampled(heard: Heard, branch: Any, tokens: Tokens) -> tuple[Tokens, Any, list[int], str]:
    """Version and log-probability of each token, the ends of the turns, and why the last ended.

    Unknown are the version, -1, of what the server was not heard to sample, and the log-probability, NaN, of
    what has none; 0.0 stands where nothing was sampled.
    """
    versions = np.full(len(tokens), -1, np.int32)
    logprobs = np.zeros(len(tokens), np.float32)
    ends: list[int] = []
    reason, begin = "stop", 0
    for node in branch.nodes:
        end = begin + len(node.token_ids)
        at = begin + np.flatnonzero(np.asarray(node.mask, bool))
        if len(at):
            said = node.logprobs if len(node.logprobs) == len(at) else np.nan
            logprobs[at] = said
            ends.append(int(at[-1]) + 1)
            key = key_of(tokens[: ends[-1]], int(at[0]))
            if (found := heard.versions.get(key)) is not None and len(found) == len(at):
                versions[at] = found
            reason = _FINISHED.get(heard.reasons.get(key, "stop"), "stop")
        begin = end
    return versions, logprobs, ends, reason


def _mask_bytes(kept: Any) -> bytes:
    """The counts of kept token ids, one for each token of the row, then the ids themselves, all int32."""
    counts, ids = (np.ascontiguousarray(each, np.int32) for each in (kept.counts, kept.ids))
    return counts.tobytes() + ids.tobytes()
