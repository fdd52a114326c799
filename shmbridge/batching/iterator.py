"""What Consumer.batches and Rank.batches return: batches for `for` and for `async for`."""

from collections.abc import Callable, Generator
from contextlib import AbstractContextManager
from typing import Protocol, Self

from shmbridge.batch import Batch
from shmbridge.segments.at_exit import closed_at_exit
from shmbridge.segments.helper_threads import run_to_end

# Yields batches; None where none came within the seconds of its argument, if that is given.
Steps = Generator[Batch | None, None, None]
_TICK_S = 0.25
_OVER = object()


class Waiter(Protocol):
    """A consumer or rank, as far as its batches use it."""

    def one_wait(self) -> AbstractContextManager[None]:
        """Makes all that is waited for inside the block one wait."""


class Batches:
    """Batches, one after the other: `for batch in batches`, or `async for`, which never blocks the event
    loop.

    Holds its consumer or rank, which is not collected meanwhile. For one thread or task at a time.

    `async for` waits in a thread of the loop's executor. A cancelled step takes effect within a fraction of a
    second and loses nothing: the batch that it was about to get comes with the next step.
    """

    def __init__(self, begin: Callable[[float | None], Steps], owner: Waiter, what: str) -> None:
        self._begin, self._owner, self._what = begin, owner, what
        self._steps: Steps | None = None
        self._came: object = None  # by a step that was cancelled
        self._count = 0

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Batch:
        if self._came is None and self._steps is not None:
            self._came = next(self._steps, _OVER)  # as in _step: a call less for the common case
        while not isinstance(self._came, Batch):
            if self._came is _OVER:
                raise StopIteration
            self._step(None)
        batch, self._came = self._came, None
        self._count += 1
        return batch

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Batch:
        with self._owner.one_wait():
            while not isinstance(self._came, Batch):
                if self._came is _OVER:
                    raise StopAsyncIteration
                await run_to_end(self._step, _TICK_S)
        batch, self._came = self._came, None
        self._count += 1
        return batch

    def _step(self, tick_s: float | None) -> None:
        if self._steps is None:
            self._steps = closed_at_exit(self._begin(tick_s))
        self._came = next(self._steps, _OVER)

    def close(self) -> None:
        """Ends the iteration; releases nothing. Idempotent; ValueError while another thread is in a step."""
        if self._steps is not None:
            self._steps.close()
        self._came = _OVER

    async def aclose(self) -> None:
        """As close."""
        self.close()

    def __repr__(self) -> str:
        state = (
            "ended" if self._came is _OVER else f"{self._count} handed out" if self._steps else "not begun"
        )
        return f"<Batches of {self._what}: {state}>"
