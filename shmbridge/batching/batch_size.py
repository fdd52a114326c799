"""How large a batch is to be, in groups or in rows."""

from collections.abc import Sequence
from dataclasses import dataclass

from shmbridge.errors import BadArgument
from shmbridge.record.groups import Group
from shmbridge.shown import shown


@dataclass(frozen=True, slots=True)
class Want:
    """The size of a batch: a number of groups, or a number of rows (trajectories)."""

    groups: int | None
    rows: int | None

    def __post_init__(self) -> None:
        given = [
            (name, size) for name, size in (("groups", self.groups), ("rows", self.rows)) if size is not None
        ]
        if len(given) != 1:
            said = "groups and rows are both given" if given else "neither groups nor rows is given"
            raise BadArgument(f"the size of a batch: {said}", hint="groups=8, or rows=64")
        name, size = given[0]
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            number = str(size).strip() if isinstance(size, str) else ""
            hint = f"{name}={number}, without quotes" if number.isdigit() else f"{name}=8"
            raise BadArgument(f"{name}={shown(size)} is no number of {name} from 1", hint=hint)

    def __str__(self) -> str:
        return f"{self.groups} groups" if self.rows is None else f"{self.rows} trajectories"

    @property
    def size(self) -> int:
        """The number of groups or rows."""
        return self.groups if self.groups is not None else self.rows or 0

    @property
    def by_rows(self) -> bool:
        """Whether the size counts rows (trajectories)."""
        return self.groups is None

    def as_groups(self, like: Sequence[Group]) -> int:
        """Returns how many groups that is, if all are like these."""
        if self.groups is not None:
            return self.groups
        return -(-(self.rows or 1) * len(like) // max(sum(group.size for group in like), 1))
