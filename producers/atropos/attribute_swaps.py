"""Attributes that are replaced for a while, and put back. Used by the modules that patch BaseEnv or its
clients.
"""

from typing import Any
from weakref import ref

_INHERITED = object()


class Changes:
    """Attributes that were replaced, and their earlier values. Keeps no owner alive."""

    def __init__(self) -> None:
        self._before: list[tuple[ref[Any], str, Any]] = []

    def replace(self, owner: Any, name: str, value: Any) -> None:
        """Sets `owner.name`, whether it is its own or inherited."""
        self._before.append((ref(owner), name, vars(owner).get(name, _INHERITED)))
        setattr(owner, name, value)

    def undo(self) -> None:
        """Puts everything back, the last first."""
        while self._before:
            alive, name, value = self._before.pop()
            if (owner := alive()) is None:
                continue
            if value is _INHERITED:
                delattr(owner, name)
            else:
                setattr(owner, name, value)
