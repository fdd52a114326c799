"""Groups that an environment recorded with `data_path_to_save_groups`, and groups from a bridge, as
comparable text.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

FLOAT32 = ("advantages", "ref_logprobs", "inference_logprobs", "distill_logprobs")
NOT_RECORDED = ("env_id", "step_rewards", "step_ends")


def rounded(value: Any) -> Any:
    """Floats as float32, at any depth."""
    if isinstance(value, list):
        return [rounded(each) for each in value]
    return float(np.float32(value)) if isinstance(value, float) else value


def as_text(group: dict[str, Any]) -> str:
    """A group as text, without nulls and without keys that are added on the way."""
    kept = {
        key: rounded(value) if key in FLOAT32 else value
        for key, value in group.items()
        if key not in NOT_RECORDED
    }
    return json.dumps({key: value for key, value in kept.items() if value is not None}, sort_keys=True)


def recorded(*paths: Path) -> list[str]:
    """All groups of some files, sorted."""
    return sorted(as_text(json.loads(line)) for path in paths for line in path.read_text().splitlines())
