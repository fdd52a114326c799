"""verifiers' own TextArena taskset, for games that it does not list since they need no list of words."""

from __future__ import annotations

import verifiers.v1 as vf
from verifiers.v1.tasksets.textarena.taskset import TextArenaEnv, TextArenaTask, TextArenaTaskset


class GamesConfig(vf.TasksetConfig):
    game: str


class GamesTaskset(TextArenaTaskset, vf.Taskset[TextArenaTask, GamesConfig]):
    """The same tasks of any game."""


__all__ = ["GamesTaskset", "TextArenaEnv"]
