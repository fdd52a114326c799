"""Groups that are in a batch whose step is not over: they count against the off-policy limit. Pure counting.

Called by former.py; the limit is admission/limit.py's.
"""

from collections.abc import Iterable

from shmbridge.record.groups import Group


class Chosen:
    """Groups that were chosen for a batch and whose step is not over. For one thread at a time."""

    def __init__(self) -> None:
        self.count = 0
        self._in_step: list[Group] = []

    def add(self, groups: Iterable[Group]) -> None:
        """They left the queue, for a batch."""
        for group in groups:
            self.count += not group.chosen
            group.chosen = True

    def remove(self, groups: Iterable[Group]) -> None:
        """Their step is over, or they went back to the queue, or were discarded. Idempotent."""
        for group in groups:
            self.count -= group.chosen
            group.chosen = False

    def begin_step(self, groups: list[Group]) -> None:
        """They are trained with from now on; whatever was trained with before is over."""
        self.end_step()
        self._in_step = list(groups)

    def end_step(self) -> None:
        """What was trained with is in the policy now."""
        self.remove(self._in_step)
        self._in_step = []
