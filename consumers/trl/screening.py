"""Which groups of a bridge a TRL trainer takes: those for training, and, if asked, of one size only."""

from __future__ import annotations

from collections import Counter

from shmbridge.record.groups import Group


class Screen:
    """A `Consumer.screen` callback: keeps out groups for evaluation, and groups of another size.

    Called in the thread that forms batches; `kept_out` may be read from any.

    Args:
        size: rows of a group to take; None: any number.
    """

    def __init__(self, size: int | None) -> None:
        self.size = size
        self.kept_out: Counter[str] = Counter()  # reason -> groups

    def __call__(self, group: Group) -> bool:
        """Returns whether the group is trained. Never blocks."""
        if any(record.meta.split == "eval" for record in group.records):
            self.kept_out["eval"] += 1
            return False
        if self.size is not None and group.rows != self.size:
            self.kept_out["uneven"] += 1
            return False
        return True
