"""What tests of SkyRL-Gym share: a tokenizer, its environments, and the variables of their processes."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
sys.path[:0] = [str(HERE), str(HERE / "envs")]

from skyrl_scripted import piece_tokenizer  # noqa: E402


@pytest.fixture(scope="session")
def pieces() -> Any:
    """A tokenizer with tokens across tags, and several for one character."""
    return piece_tokenizer()


@pytest.fixture(autouse=True)
def _counting() -> None:
    """The environment `counting` is registered."""
    import counting_env  # noqa: F401


def environment() -> dict[str, str]:
    """Variables of a child that finds this checkout and the environments of envs/."""
    path = os.pathsep.join([str(ROOT), str(HERE / "envs"), os.environ.get("PYTHONPATH", "")])
    return os.environ | {
        "PYTHONPATH": path,
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "WANDB_MODE": "disabled",
        "PYTHONUNBUFFERED": "1",
    }


@pytest.fixture(scope="session")
def child_environment() -> dict[str, str]:
    return environment()
