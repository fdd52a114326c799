"""Environments of gem: any `gem.Env` into a lane, and any Atropos environment as a `gem.Env`.

    python -m shmbridge.producers.gem --bridge run1 --server URL --tokenizer DIR --env rg:leg_counting

`game.py` plays gem environments for a `Rollout`; `atropos_env.py` plays Atropos environments turn by turn.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shmbridge.producers.gem.game import GemGame, register
from shmbridge.producers.gem.turns import Action, EnvFailed, GroupNotAlike, NotSuspendable

if TYPE_CHECKING:
    from shmbridge.producers.gem.atropos_env import AtroposGemEnv

__all__ = ["Action", "AtroposGemEnv", "EnvFailed", "GemGame", "GroupNotAlike", "NotSuspendable", "register"]


def __getattr__(name: str) -> Any:
    """Returns `AtroposGemEnv`, whose base class needs gem."""
    if name == "AtroposGemEnv":
        from shmbridge.producers.gem.atropos_env import AtroposGemEnv

        return AtroposGemEnv
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
