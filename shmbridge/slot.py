"""An open claim: the lane's own memory, to be written in place inside a `with` block. Made by Producer.claim."""

from collections.abc import Callable
from typing import Any, Self

import numpy as np

from shmbridge._ext.plan import Plan
from shmbridge.errors import ClaimOpen


class Slot:
    """`slot[column]` is a writable flat view in the lane, valid until the `with` block ends; `sequence` is set when that has committed.

    Leaving the block by an exception gives the claim back. For the producer's thread.
    """

    def __init__(self, plan: Plan, memory: memoryview, end: Callable[[memoryview | None], int | None]) -> None:
        self._plan, self._end = plan, end
        self._memory: memoryview | None = memory
        self._columns = {column.name: column for column in plan.columns}
        self.sequence: int | None = None

    def __getitem__(self, name: str) -> np.ndarray[Any, Any]:
        """The column's values: every row's, one after another. KeyError for a column that was not claimed."""
        if self._memory is None:
            raise ClaimOpen("the claim is over: its memory is the consumer's", hint="write inside the `with` block")
        return self._plan.view(self._memory, self._columns[name])

    def __del__(self) -> None:
        if self._memory is not None:  # never entered, or interrupted on the way
            self.__exit__(GeneratorExit)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        memory, self._memory = self._memory, None
        self.sequence = self._end(memory if kind is None else None)
