"""Collects the rows of concurrent calls, and has a judge score many of them at a time, in one thread."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from typing import Self

from shmbridge.errors import BadArgument, Closed
from shmbridge.producers.rewards.concurrency import contained
from shmbridge.producers.rewards.scorer import StepJudge
from shmbridge.producers.rewards.step_row import StepRow


class _Request:
    """The rows of one call, and the scores that are there already."""

    def __init__(self, rows: Sequence[StepRow]) -> None:
        self.rows = rows
        self.scores: list[Sequence[float]] = [()] * len(rows)
        self.left = len(rows)
        self.answer: Future[list[Sequence[float]]] = Future()


class BatchedScorer:
    """A `StepScorer` that runs a `StepJudge` in a thread of its own, beside generation.

    Tasks of any event loop may use it. While the judge is busy, rows collect; it then gets as many as fit one
    call, of whichever callers. At most `max_waiting` rows wait for it: further callers await their turn.

    An error of the judge reaches the callers whose rows caused it: if rows of several were in one call, each
    caller's are tried again by themselves.

    The thread begins with the first call and ends with `close`, or the `with` block.

    Args:
        judge: what scores; only this thread calls it.
        max_rows: most rows of one call.
        max_tokens: most tokens of one call, each row counted as long as the longest; a longer row goes alone.
        max_waiting: most rows that wait, unless one caller has more.
    """

    def __init__(
        self, judge: StepJudge, *, max_rows: int = 32, max_tokens: int = 65536, max_waiting: int = 1024
    ) -> None:
        for name, value in (("max_rows", max_rows), ("max_tokens", max_tokens), ("max_waiting", max_waiting)):
            if value < 1:
                raise BadArgument(f"{name}={value} is less than 1", hint=f"{name}=32")
        self._judge, self._max_rows, self._max_tokens = judge, max_rows, max_tokens
        self._max_waiting = max_waiting
        self._changed = threading.Condition()
        self._waiting: deque[tuple[_Request, int]] = deque()  # rows that wait for the judge
        self._outside: deque[_Request] = deque()  # calls that wait for room there
        self._thread: threading.Thread | None = None
        self._closed = False
        self._calls = self._rows_scored = self._failures = 0

    async def score_steps(self, rows: Sequence[StepRow]) -> Sequence[Sequence[float]]:
        """Returns the judge's scores. Never blocks the event loop; may be cancelled.

        Raises:
            Closed: this scorer was closed. Whatever the judge raises.
        """
        request = _Request(rows)
        if rows:
            self._hand_in(request)
            return await asyncio.wrap_future(request.answer)
        return []

    def stats(self) -> dict[str, float]:
        """Returns counters: calls of the judge, rows scored, failed calls; rows and callers that wait now."""
        with self._changed:
            return {
                "calls_total": self._calls,
                "rows_total": self._rows_scored,
                "failures_total": self._failures,
                "rows_waiting": len(self._waiting),
                "callers_waiting_for_room": len(self._outside),
            }

    def close(self) -> None:
        """Ends the thread; blocks until the judge's present call is over. Calls that wait raise Closed."""
        with self._changed:
            self._closed = True
            left = [request for request, _ in self._waiting] + [*self._outside]
            self._waiting.clear()
            self._outside.clear()
            self._changed.notify_all()
        for request in left:
            _fail(request, _closed())
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- the callers' side ---------------------------------------------------------------------------------

    def _hand_in(self, request: _Request) -> None:
        with self._changed:
            if self._closed:
                raise _closed()
            if self._thread is None or not self._thread.is_alive():  # it is not there after a fork
                self._thread = threading.Thread(target=self._run, name="shmbridge-rewards", daemon=True)
                self._thread.start()
            self._outside.append(request)
            self._let_in()
            self._changed.notify_all()

    def _let_in(self) -> None:
        """Moves calls to where the judge takes rows, the first first, as far as there is room."""
        while self._outside:
            request = self._outside[0]
            if self._waiting and len(self._waiting) + len(request.rows) > self._max_waiting:
                return
            self._outside.popleft()
            if not request.answer.cancelled():
                self._waiting.extend((request, at) for at in range(len(request.rows)))

    # --- the judge's thread --------------------------------------------------------------------------------

    def _run(self) -> None:
        while batch := self._next_batch():
            self._score(batch)

    def _next_batch(self) -> list[tuple[_Request, int]]:
        """Blocks until there are rows; none if this is closed."""
        with self._changed:
            while True:
                self._changed.wait_for(lambda: self._waiting or self._closed)
                if self._closed:
                    return []
                batch = self._taken()
                self._let_in()
                if batch:
                    return batch

    def _taken(self) -> list[tuple[_Request, int]]:
        batch: list[tuple[_Request, int]] = []
        longest = 0
        while self._waiting and len(batch) < self._max_rows:
            request, at = self._waiting[0]
            if request.answer.done():  # cancelled, or another of its rows failed
                self._waiting.popleft()
                continue
            length = max(longest, len(request.rows[at].tokens))
            if batch and length * (len(batch) + 1) > self._max_tokens:
                break
            longest = length
            batch.append(self._waiting.popleft())
        return batch

    def _score(self, batch: list[tuple[_Request, int]]) -> None:
        try:
            scores = self._judged(batch)
        except BaseException as error:
            self._failures += 1
            requests = list(dict.fromkeys(request for request, _ in batch))
            if len(requests) == 1:
                _fail(requests[0], error)
                return
            for each in requests:
                self._score([(request, at) for request, at in batch if request is each])
            return
        for (request, at), row_scores in zip(batch, scores, strict=True):
            request.scores[at] = row_scores
            request.left -= 1
            if not request.left:
                with suppress(InvalidStateError):  # cancelled
                    request.answer.set_result(request.scores)

    def _judged(self, batch: list[tuple[_Request, int]]) -> Sequence[Sequence[float]]:
        self._calls += 1
        scores = self._judge.score_now([request.rows[at] for request, at in batch])
        if len(scores) != len(batch):
            raise ValueError(f"{type(self._judge).__name__} scored {len(scores)} rows of {len(batch)}")
        self._rows_scored += len(batch)
        return scores


def _fail(request: _Request, error: BaseException) -> None:
    with suppress(InvalidStateError):
        request.answer.set_exception(contained(error, "the judge"))


def _closed() -> Closed:
    return Closed("this scorer is closed", hint="close it after the producers that use it")
