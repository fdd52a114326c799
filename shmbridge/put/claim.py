"""An open claim of Producer.claim: the lane's own memory, written in place inside a `with` block."""

from collections.abc import Callable
from typing import Any

import numpy as np

from shmbridge._ext.lane import Claim, LaneWriter
from shmbridge._ext.put import Plan
from shmbridge.errors import BadArgument, ClaimOpen, NoColumn
from shmbridge.other_names import did_you_mean
from shmbridge.shown import shown


class Slot(Claim):
    """`slot[column]` is a writable flat view in the lane until the `with` block ends; then `sequence` is set.

    An exception in the block aborts the claim; leaving the block a second time does nothing. For the
    producer's thread. Do not write to an array after the block: its memory is the consumer's then.
    """

    def __init__(self, writer: LaneWriter, plan: Plan, publish: Callable[["Slot"], None]) -> None:
        self.plan, self._publish = plan, publish
        self._columns = {column.name: column for column in plan.columns}
        self._unused = dict.fromkeys(column.name for column in plan.columns if column.count)

    @property
    def sequence(self) -> int | None:
        """Sequence of the committed record; None before."""
        return self.plan.sequence

    def __getitem__(self, name: str) -> np.ndarray[Any, Any]:
        """Returns the column's values: those of every row, one after another.

        NoColumn (a KeyError) for a column that was not claimed, ClaimOpen after the block.
        """
        if not self.is_open:
            raise ClaimOpen(
                "the claim is over, committed or given up",
                hint="write inside the block, before the producer closes",
            )
        if name not in self._columns:
            raise self._not_claimed(name)
        view = self.plan.view(self.memory(), self._columns[name])
        self._unused.pop(name, None)
        return view

    def __setitem__(self, name: str, values: object) -> None:
        """Refuses `slot[column] = values`: the memory is written in place."""
        if name not in self._columns:
            raise self._not_claimed(name)
        raise BadArgument(
            f"slot[{name!r}] = ... would replace the view, and write nothing", hint=f"slot[{name!r}][:] = ..."
        )

    def _not_claimed(self, name: object) -> NoColumn:
        claimed = ", ".join(map(repr, self._columns))
        hint = did_you_mean(name, self._columns) or f"add it to lengths= of claim: {{{name!r}: ...}}"
        return NoColumn(f"column {shown(name)} was not claimed; the claim has {claimed}", hint=hint)

    @property
    def unused(self) -> str | None:
        """A column with values that the block never asked for; None if there is none."""
        return next(iter(self._unused), None)

    def publish_whole(self) -> None:
        """Checks and publishes the values the block wrote; for `__exit__`."""
        self._publish(self)

    def __repr__(self) -> str:
        state = (
            "open" if self.is_open else "over" if self.sequence is None else f"committed as {self.sequence}"
        )
        return f"<Slot of {self.plan.rows} rows, {self.plan.tokens} tokens: {state}>"
