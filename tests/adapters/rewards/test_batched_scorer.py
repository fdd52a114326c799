"""Rows of concurrent callers go to the judge together, in one thread, bounded; errors reach who asked."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence

import pytest

from shmbridge.errors import BadArgument, Closed
from shmbridge.producers.rewards import BatchedScorer, StepRow


def rows(*numbers: int, length: int = 4) -> list[StepRow]:
    """Rows whose one step is worth its number."""
    return [StepRow([number] * length, (0,), (length,)) for number in numbers]


class Judge:
    """Scores a row by its first token, once it may; 13 is more than it can bear."""

    def __init__(self, *, open_gate: bool = True) -> None:
        self.gate, self.begun = threading.Event(), threading.Event()
        self.batches: list[list[int]] = []
        self.threads: set[str] = set()
        if open_gate:
            self.gate.set()

    def score_now(self, rows: Sequence[StepRow]) -> list[list[float]]:
        self.begun.set()
        assert self.gate.wait(30)
        self.threads.add(threading.current_thread().name)
        self.batches.append([row.tokens[0] for row in rows])
        if any(row.tokens[0] == 13 for row in rows):
            raise OverflowError("thirteen")
        return [[float(row.tokens[0])] for row in rows]


async def until(holds: Callable[[], object]) -> None:
    async with asyncio.timeout(30):
        while not holds():
            await asyncio.sleep(0.001)


async def test_rows_collect_while_the_judge_is_busy() -> None:
    judge = Judge(open_gate=False)
    with BatchedScorer(judge, max_rows=4) as scorer:
        asked = [asyncio.create_task(scorer.score_steps(rows(0, 1)))]
        await until(judge.begun.is_set)
        asked += [asyncio.create_task(scorer.score_steps(rows(number, number + 1))) for number in (2, 4, 6)]
        await until(lambda: scorer.stats()["rows_waiting"] == 6)
        judge.gate.set()
        assert await asyncio.gather(*asked) == [[[n], [n + 1]] for n in (0.0, 2.0, 4.0, 6.0)]
        assert judge.batches == [[0, 1], [2, 3, 4, 5], [6, 7]]
        assert judge.threads == {"shmbridge-rewards"}
        assert scorer.stats() == {
            "calls_total": 3,
            "rows_total": 8,
            "failures_total": 0,
            "rows_waiting": 0,
            "callers_waiting_for_room": 0,
        }


async def test_the_rows_of_one_caller_may_need_several_calls() -> None:
    judge = Judge()
    with BatchedScorer(judge, max_rows=3) as scorer:
        assert await scorer.score_steps(rows(*range(7))) == [[float(n)] for n in range(7)]
        assert [len(batch) for batch in judge.batches] == [3, 3, 1]
        assert await scorer.score_steps([]) == []


async def test_a_call_has_so_many_tokens_and_a_longer_row_goes_alone() -> None:
    judge = Judge()
    with BatchedScorer(judge, max_tokens=16) as scorer:
        mixed = [*rows(1, 2, length=4), *rows(3, length=8), *rows(4, length=40), *rows(5, length=4)]
        assert await scorer.score_steps(mixed) == [[1.0], [2.0], [3.0], [4.0], [5.0]]
        assert judge.batches == [[1, 2], [3], [4], [5]]


async def test_an_error_reaches_the_caller_whose_row_it_was_and_no_other() -> None:
    judge = Judge(open_gate=False)
    with BatchedScorer(judge) as scorer:
        first = asyncio.create_task(scorer.score_steps(rows(1)))
        await until(judge.begun.is_set)
        asked = [asyncio.create_task(scorer.score_steps(rows(n, n + 1))) for n in (2, 12, 20)]
        await until(lambda: scorer.stats()["rows_waiting"] == 6)
        judge.gate.set()
        assert await first == [[1.0]]
        found = await asyncio.gather(*asked, return_exceptions=True)
        assert (found[0], found[2]) == ([[2.0], [3.0]], [[20.0], [21.0]])
        assert isinstance(found[1], OverflowError)
        assert await scorer.score_steps(rows(3)) == [[3.0]]


@pytest.mark.parametrize("error", [StopIteration, SystemExit])
async def test_no_error_of_a_judge_ends_its_thread_or_the_event_loop(error: type[BaseException]) -> None:
    class Leaving:
        def score_now(self, rows: Sequence[StepRow]) -> list[list[float]]:
            raise error

    with BatchedScorer(Leaving()) as scorer:
        for _ in range(2):
            with pytest.raises(RuntimeError, match=error.__name__):
                await scorer.score_steps(rows(1))


async def test_so_many_rows_wait_and_further_callers_wait_for_room() -> None:
    judge = Judge(open_gate=False)
    with BatchedScorer(judge, max_rows=2, max_waiting=4) as scorer:
        asked = [asyncio.create_task(scorer.score_steps(rows(n, n + 1))) for n in range(0, 12, 2)]
        await until(lambda: judge.begun.is_set() and scorer.stats()["callers_waiting_for_room"] == 3)
        assert scorer.stats()["rows_waiting"] == 4
        judge.gate.set()
        assert await asyncio.gather(*asked) == [[[float(n)], [n + 1.0]] for n in range(0, 12, 2)]


async def test_a_cancelled_caller_is_not_judged() -> None:
    judge = Judge(open_gate=False)
    with BatchedScorer(judge, max_rows=1, max_waiting=1) as scorer:
        asked = [asyncio.create_task(scorer.score_steps(rows(n))) for n in range(4)]
        await until(lambda: judge.begun.is_set() and scorer.stats()["callers_waiting_for_room"] == 2)
        asked[1].cancel()
        asked[2].cancel()
        await asyncio.wait(asked[1:3])
        judge.gate.set()
        assert (await asked[0], await asked[3]) == ([[0.0]], [[3.0]])
        assert judge.batches == [[0], [3]]


async def test_tasks_of_several_event_loops_share_a_judge() -> None:
    judge = Judge()
    with BatchedScorer(judge) as scorer:
        other = await asyncio.to_thread(lambda: asyncio.run(scorer.score_steps(rows(5))))
        assert (other, await scorer.score_steps(rows(6))) == ([[5.0]], [[6.0]])
    assert judge.threads == {"shmbridge-rewards"}


async def test_closing_answers_those_who_wait() -> None:
    judge = Judge(open_gate=False)
    scorer = BatchedScorer(judge, max_rows=1, max_waiting=1)
    asked = [asyncio.create_task(scorer.score_steps(rows(n))) for n in range(3)]
    await until(lambda: judge.begun.is_set() and scorer.stats()["callers_waiting_for_room"] == 1)
    closing = asyncio.create_task(asyncio.to_thread(scorer.close))
    found = await asyncio.gather(*asked[1:], return_exceptions=True)
    assert [type(each) for each in found] == [Closed, Closed]
    judge.gate.set()
    await closing
    assert await asked[0] == [[0.0]]
    with pytest.raises(Closed):
        await scorer.score_steps(rows(1))


async def test_a_judge_that_forgets_a_row_is_an_error() -> None:
    class Forgetful:
        def score_now(self, rows: Sequence[StepRow]) -> list[list[float]]:
            return [[1.0]]

    with BatchedScorer(Forgetful()) as scorer, pytest.raises(ValueError, match="scored 1 rows of 2"):
        await scorer.score_steps(rows(1, 2))
    with pytest.raises(BadArgument, match="max_rows=0"):
        BatchedScorer(Forgetful(), max_rows=0)
