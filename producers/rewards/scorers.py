"""Scorers of steps: a function, an HTTP server, vLLM's pooling API, or a judge in a thread of its own."""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from typing import Any, Protocol, Self, TypeVar
from weakref import WeakKeyDictionary

from shmbridge.errors import BadArgument, Closed
from shmbridge.producers.rewards.models import InputMaker, ModelInput
from shmbridge.producers.rewards.steps import RewardsFailed, StepRow

Item = TypeVar("Item")
Result = TypeVar("Result")


class StepScorer(Protocol):
    """Scores steps without blocking the event loop; any number of tasks may await it at the same time."""

    async def score_steps(self, rows: Sequence[StepRow]) -> Sequence[Sequence[float]]:
        """Returns, for each row, a finite number per step, in the scorer's unit. Raises what went wrong."""
        ...


class StepJudge(Protocol):
    """Scores steps in the calling thread, which it blocks; one call at a time. See `BatchedScorer`."""

    def score_now(self, rows: Sequence[StepRow]) -> Sequence[Sequence[float]]:
        """Returns, for each row, a finite number per step, in the judge's unit. Raises what went wrong."""
        ...


def contained(error: BaseException, whose: str) -> Exception:
    """Returns an error that ends only its caller: StopIteration would never arrive in an event loop, and
    SystemExit would end it.
    """
    if isinstance(error, Exception) and not isinstance(error, StopIteration):
        return error
    return RuntimeError(f"{whose} ended with {error!r}")


async def in_thread(function: Callable[[Item], Result], item: Item, whose: str) -> Result:
    """Returns what a function gives, called in a thread. Raises what it raises, contained."""

    def called() -> Result:
        try:
            return function(item)
        except BaseException as error:
            if (told := contained(error, whose)) is error:
                raise
            raise told from error

    return await asyncio.to_thread(called)


class Limit:
    """At most so many calls at the same time, in each event loop."""

    def __init__(self, most: int) -> None:
        if most < 1:
            raise BadArgument(f"most_at_once={most} is less than 1", hint="most_at_once=16")
        self._most = most
        self._per_loop: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = WeakKeyDictionary()

    async def all(self, call: Callable[[Item], Awaitable[Result]], items: Iterable[Item]) -> list[Result]:
        """Returns the results in the order of the items; the first error ends the other calls."""
        turn = self._per_loop.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(self._most))

        async def one(item: Item) -> Result:
            async with turn:
                return await call(item)

        tasks = [asyncio.ensure_future(one(item)) for item in items]
        try:
            return list(await asyncio.gather(*tasks))
        finally:
            for task in tasks:
                task.cancel()


async def post_json(url: str, body: Any, headers: Mapping[str, str], timeout_s: float) -> Any:
    """Returns the answer's JSON. Never blocks the event loop.

    Raises:
        RewardsFailed: no answer, none in time, a status other than 200, or no JSON.
    """
    import aiohttp

    try:
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=timeout_s)) as session,
            session.post(url, json=body, headers=dict(headers)) as answer,
        ):
            if answer.status != 200:
                raise RewardsFailed(f"{url} answers {answer.status}: {(await answer.text())[:300]}")
            return await answer.json(content_type=None)
    except TimeoutError as late:
        raise RewardsFailed(f"{url} did not answer within {timeout_s:g} s") from late
    except (aiohttp.ClientError, ValueError) as wrong:
        raise RewardsFailed(f"{url}: {wrong!r}", hint="does the reward server run?") from wrong


class FunctionScorer:
    """A `StepScorer` that calls a function for each row.

    Args:
        function: takes a `StepRow`, returns a finite number per step. An ordinary function is called in
            threads, so that the event loop goes on: several rows at a time. A coroutine function is awaited.
        most_at_once: rows under way at the same time, for each event loop.
    """

    def __init__(
        self,
        function: Callable[[StepRow], Sequence[float]] | Callable[[StepRow], Awaitable[Sequence[float]]],
        *,
        most_at_once: int = 16,
    ) -> None:
        self._function, self._limit = function, Limit(most_at_once)

    async def score_steps(self, rows: Sequence[StepRow]) -> Sequence[Sequence[float]]:
        """Returns what the function says. Never blocks the event loop; may be cancelled.

        Raises:
            Whatever the function raises, for the first row that it raises for.
        """
        return await self._limit.all(self._one, rows)

    async def _one(self, row: StepRow) -> Sequence[float]:
        if inspect.iscoroutinefunction(self._function):
            made: Any = self._function(row)
        else:
            made = await in_thread(self._function, row, "the function")
        found: Sequence[float] = await made if inspect.isawaitable(made) else made
        return found


class EndpointScorer:
    """A `StepScorer` that posts the rows of a call to an address.

    The request is `{"rows": [{"tokens": [...], "step_starts": [...], "step_ends": [...]}, ...]}`, each row
    with `"prompt": "..."` and `"steps": ["...", ...]` besides if `text`; the answer
    `{"step_rewards": [[0.5, ...], ...]}`.

    Args:
        url: where to post.
        text: send text, too; needs `StepRewards(tokenizer=)`.
        headers: of the request.
        timeout_s: seconds for one answer.
        most_at_once: requests under way at the same time, for each event loop.
    """

    def __init__(
        self,
        url: str,
        *,
        text: bool = False,
        headers: Mapping[str, str] | None = None,
        timeout_s: float = 60.0,
        most_at_once: int = 8,
    ) -> None:
        self._url, self._text, self._headers, self._timeout_s = url, text, headers or {}, timeout_s
        self._limit = Limit(most_at_once)

    async def score_steps(self, rows: Sequence[StepRow]) -> Sequence[Sequence[float]]:
        """Returns what the server says. Never blocks the event loop; may be cancelled.

        Raises:
            RewardsFailed: the server cannot be reached, or does not answer as said above.
        """
        (scores,) = await self._limit.all(self._ask, [rows])
        return scores

    async def _ask(self, rows: Sequence[StepRow]) -> Sequence[Sequence[float]]:
        body = {"rows": [self._row(row) for row in rows]}
        answer = await post_json(self._url, body, self._headers, self._timeout_s)
        scores = answer.get("step_rewards") if isinstance(answer, dict) else None
        if not isinstance(scores, list) or not all(isinstance(row, list) for row in scores):
            raise RewardsFailed(
                f'{self._url} answers without "step_rewards", a list per row: {answer!r:.200}'
            )
        return scores

    def _row(self, row: StepRow) -> dict[str, Any]:
        sent = {"tokens": list(row.tokens), "step_starts": list(row.starts), "step_ends": list(row.ends)}
        return {**sent, "prompt": row.prompt_text, "steps": row.step_texts} if self._text else sent


class PoolingScorer:
    """A `StepScorer` that asks vLLM for the outputs of a token classification head.

    All rows of a call are one request; vLLM itself puts requests together. Both of vLLM's ways of answering
    are understood: an output per token, and (pooling type STEP, as for Qwen2.5-Math-PRM) one per separator.

    Args:
        url: of the server, such as "http://127.0.0.1:8002"; "/pooling" is added.
        model: its name there.
        make_input: what the model is given of a row; it is sent as token ids.
        separator: id of the separator that STEP pooling looks for; None: outputs are per token.
        good: index of the output that is the value, where there are several.
        task: vLLM's name of the task; None where an older server does not know any.
        headers: of the request, such as an authorization.
        timeout_s: seconds for one answer.
        most_at_once: requests under way at the same time, for each event loop.
    """

    def __init__(
        self,
        url: str,
        model: str,
        make_input: InputMaker,
        *,
        separator: int | None = None,
        good: int = 1,
        task: str | None = "token_classify",
        headers: Mapping[str, str] | None = None,
        timeout_s: float = 60.0,
        most_at_once: int = 8,
    ) -> None:
        self._url = url.rstrip("/") + "/pooling"
        self._model, self._make_input, self._separator, self._good = model, make_input, separator, good
        self._task, self._headers, self._timeout_s = task, headers or {}, timeout_s
        self._limit = Limit(most_at_once)

    async def score_steps(self, rows: Sequence[StepRow]) -> Sequence[Sequence[float]]:
        """Returns the values of each row's steps. Never blocks the event loop; may be cancelled.

        Raises:
            RewardsFailed: the server cannot be reached, refuses, or answers with other numbers of outputs.
        """
        inputs = await in_thread(lambda rows: [self._make_input(row) for row in rows], rows, "make_input")
        asked = [each for each in inputs if each.reads]
        if not asked:
            return [[] for _ in rows]
        (found,) = await self._limit.all(self._ask, [asked])
        values = iter(found)
        return [next(values) if each.reads else [] for each in inputs]

    async def _ask(self, inputs: Sequence[ModelInput]) -> list[list[float]]:
        body: dict[str, Any] = {
            "model": self._model,
            "input": [each.ids for each in inputs],
            "add_special_tokens": False,
            "encoding_format": "float",
        }
        if self._task is not None:
            body["task"] = self._task
        answer = await post_json(self._url, body, self._headers, self._timeout_s)
        try:
            outputs = {each["index"]: each["data"] for each in answer["data"]}
            return [self._values(each, outputs[at]) for at, each in enumerate(inputs)]
        except (KeyError, TypeError, IndexError, ValueError) as wrong:
            raise RewardsFailed(
                f"{self._url} does not answer as vLLM's pooling API: {wrong!r} in {answer!r:.200}"
            ) from wrong

    def _values(self, asked: ModelInput, outputs: list[Any]) -> list[float]:
        """The outputs at the tokens that are read."""
        separators = [at for at, token in enumerate(asked.ids) if token == self._separator]
        if len(outputs) == len(asked.ids):
            found = [outputs[read] for read in asked.reads]
        elif self._separator is not None and len(outputs) == len(separators):
            by_place = dict(zip(separators, outputs, strict=True))
            found = [by_place[read] for read in asked.reads]
        else:
            raise RewardsFailed(
                f"{self._url} has {len(outputs)} outputs for {len(asked.ids)} tokens with {len(separators)} "
                "separators",
                hint="PoolingScorer(separator=): the id that the server's step_tag_id names",
            )
        return [self._value(each) for each in found]

    def _value(self, output: Any) -> float:
        if isinstance(output, list):
            return float(output[self._good] if len(output) > 1 else output[0])
        return float(output)


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
