"""How large a batch is to be. Knows groups' sizes; nothing of who chooses them."""

from collections.abc import Sequence
from dataclasses import dataclass

from shmbridge.groups import Group


@dataclass(frozen=True, slots=True)
class Want:
    """How large a batch is to be: so many groups, or so many rows (trajectories)."""

    groups: int | None
    rows: int | None

    def __post_init__(self) -> None:
        if (self.groups is None) == (self.rows is None) or self.size < 1:
            raise ValueError(f"groups={self.groups}, rows={self.rows}: one of them, at least 1")

    def __str__(self) -> str:
        return f"{self.groups} groups" if self.rows is None else f"{self.rows} trajectories"

    @property
    def size(self) -> int:
        """In groups or in rows, whichever it is."""
        return self.groups if self.groups is not None else self.rows or 0

    @property
    def by_rows(self) -> bool:
        """Whether trajectories are counted."""
        return self.groups is None

    def as_groups(self, like: Sequence[Group]) -> int:
        """How many groups that is, if all are like these."""
        if self.groups is not None:
            return self.groups
        return -(-(self.rows or 1) * len(like) // max(sum(group.size for group in like), 1))
