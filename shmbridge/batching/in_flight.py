"""Groups in a batch whose step is not over: they count against the off-policy limit of admission/limit.py."""

from collections.abc import Iterable

from shmbridge.record.groups import Group


class Chosen:
    """The groups chosen for a batch whose step is not over. For one thread at a time."""

    def __init__(self) -> None:
        self.count = 0
        self._in_step: list[Group] = []

    def add(self, groups: Iterable[Group]) -> None:
        """Counts groups that left the queue for a batch."""
        for group in groups:
            self.count += not group.chosen
            group.chosen = True

    def remove(self, groups: Iterable[Group]) -> None:
        """Stops counting groups: their step is over, or they were put back or discarded. Idempotent."""
        for group in groups:
            self.count -= group.chosen
            group.chosen = False

    def begin_step(self, groups: list[Group]) -> None:
        """Starts the step of these groups, and ends the step before."""
        self.end_step()
        self._in_step = list(groups)

    def end_step(self) -> None:
        """Ends the step: its groups are in the policy now."""
        self.remove(self._in_step)
        self._in_step = []
