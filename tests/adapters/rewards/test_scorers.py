"""Steps scored by functions and by HTTP servers; what a scorer must not say."""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from aiohttp import web
from aiohttp.test_utils import TestServer
from transformers import AutoModelForTokenClassification

from shmbridge.errors import BadArgument
from shmbridge.producers.rewards import (
    EndpointScorer,
    FunctionScorer,
    OwnTokens,
    PoolingScorer,
    RewardsFailed,
    SplitByTurn,
    StepRewards,
    StepRow,
    split_by_blank_line,
)

ROWS = [("what?", "a\n\nbc\n\nd"), ("who?", "xyz")]


@asynccontextmanager
async def serving(path: str, answer: Callable[[Any], Any]) -> AsyncIterator[str]:
    """A server that answers a path with JSON of what it is asked."""

    async def handle(request: web.Request) -> web.Response:
        made = answer(await request.json())
        return made if isinstance(made, web.Response) else web.json_response(made)

    application = web.Application()
    application.router.add_post(path, handle)
    async with TestServer(application) as server:
        yield f"http://127.0.0.1:{server.port}"


# --- functions ----------------------------------------------------------------------------------------------


async def test_a_function_sees_question_steps_and_tokens(make_group: Any, policy: Any) -> None:
    seen: list[StepRow] = []

    def judge(row: StepRow) -> list[float]:
        seen.append(row)
        assert threading.current_thread() is not threading.main_thread()
        return [float(len(text.strip())) for text in row.step_texts]

    group = make_group(*ROWS)
    before = {name: [list(row) for row in rows] for name, rows in group.items()}
    new = await StepRewards(FunctionScorer(judge), split_by_blank_line(policy), tokenizer=policy)(group)
    assert new["step_rewards"] == [[1.0, 2.0, 1.0], [3.0]]
    assert new["step_ends"] == [[8, 12, 13], [7]]
    assert sorted(row.question for row in seen) == ["what?", "who?"]
    assert group == before
    assert new["tokens"] is group["tokens"]


async def test_a_coroutine_function_is_awaited_a_bounded_number_at_a_time(make_group: Any) -> None:
    now = most = 0

    async def judge(row: StepRow) -> list[float]:
        nonlocal now, most
        now += 1
        most = max(most, now)
        for _ in range(10):  # the others could begin
            await asyncio.sleep(0)
        now -= 1
        return [0.5]

    group = make_group(*[("q", "a")] * 6)
    new = await StepRewards(FunctionScorer(judge, most_at_once=2), SplitByTurn())(group)
    assert (new["step_rewards"], most) == ([[0.5]] * 6, 2)
    with pytest.raises(BadArgument, match="most_at_once=0"):
        FunctionScorer(judge, most_at_once=0)


async def test_an_error_of_a_function_is_said_with_its_cause(make_group: Any) -> None:
    def judge(row: StepRow) -> list[float]:
        raise LookupError("no such judge")

    with pytest.raises(RewardsFailed, match="FunctionScorer failed: LookupError") as failed:
        await StepRewards(FunctionScorer(judge), SplitByTurn())(make_group(*ROWS))
    assert isinstance(failed.value.__cause__, LookupError)
    assert failed.value.code == "SB420"


@pytest.mark.parametrize("error", [StopIteration("empty"), SystemExit(3)], ids=repr)
@pytest.mark.parametrize("place", ["function", "splitter"])
async def test_no_error_of_a_function_stops_the_event_loop(
    make_group: Any, error: BaseException, place: str
) -> None:
    """StopIteration, as of next() without a default, would leave the group waiting for ever."""

    def broken(*_: Any) -> list[Any]:
        raise error

    given = (FunctionScorer(broken), SplitByTurn()) if place == "function" else (FunctionScorer(len), broken)
    with pytest.raises((RewardsFailed, RuntimeError), match=f"the {place} ended with {type(error).__name__}"):
        await asyncio.wait_for(StepRewards(*given)(make_group(*ROWS)), 20)


async def test_a_scorer_that_cancels_itself_has_failed(make_group: Any) -> None:
    async def broken(row: StepRow) -> list[float]:
        raise asyncio.CancelledError("a timeout of its own")

    with pytest.raises(RewardsFailed, match="CancelledError"):
        await StepRewards(FunctionScorer(broken), SplitByTurn())(make_group(*ROWS))
    task = asyncio.create_task(StepRewards(FunctionScorer(lambda row: asyncio.sleep(9)), SplitByTurn())(
        make_group(*ROWS)
    ))  # fmt: skip
    await asyncio.sleep(0.1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


@pytest.mark.parametrize(
    ("said", "why"),
    [
        ([0.5, 0.5], "row 0 2 values for 1 steps"),
        ([math.nan], "row 0 a value that is not finite"),
        (["good"], "row 0 something other than numbers"),
        (None, "row 0 something other than numbers"),
    ],
)
async def test_what_is_no_value_per_step_is_refused(said: Any, why: str, make_group: Any) -> None:
    with pytest.raises(RewardsFailed, match=why):
        await StepRewards(FunctionScorer(lambda row: said), SplitByTurn())(make_group(("q", "a")))


async def test_step_rewards_that_are_there_are_not_overwritten(make_group: Any) -> None:
    stage = StepRewards(FunctionScorer(lambda row: [1.0]), SplitByTurn())
    with pytest.raises(RewardsFailed, match="has step_rewards already"):
        await stage(make_group(("q", "a"), step_rewards=[[0.0]]))
    with pytest.raises(RewardsFailed, match="no tokenizer decodes"):
        await StepRewards(FunctionScorer(lambda row: [len(row.step_texts)]), SplitByTurn())(
            make_group(("q", "a"))
        )
    with pytest.raises(RewardsFailed, match="a list cannot be given rewards"):
        await stage([])  # type: ignore[arg-type]


# --- an endpoint of one's own -------------------------------------------------------------------------------


async def test_an_endpoint_gets_tokens_and_text(make_group: Any, policy: Any) -> None:
    asked: list[Any] = []

    def answer(body: Any) -> Any:
        asked.append(body)
        return {"step_rewards": [[len(step) / 8 for step in row["steps"]] for row in body["rows"]]}

    group = make_group(*ROWS)
    async with serving("/judge", answer) as url:
        stage = StepRewards(
            EndpointScorer(f"{url}/judge", text=True), split_by_blank_line(policy), tokenizer=policy
        )
        new = await stage(group)
    assert new["step_rewards"] == [[3 / 8, 4 / 8, 1 / 8], [3 / 8]]
    assert asked == [
        {
            "rows": [
                {
                    "tokens": group["tokens"][0],
                    "step_starts": [5, 8, 12],
                    "step_ends": [8, 12, 13],
                    "prompt": "what?",
                    "steps": ["a\n\n", "bc\n\n", "d"],
                },
                {
                    "tokens": group["tokens"][1],
                    "step_starts": [4],
                    "step_ends": [7],
                    "prompt": "who?",
                    "steps": ["xyz"],
                },
            ]
        }
    ]


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (lambda _: web.Response(status=503, text="busy"), "answers 503: busy"),
        (lambda _: web.Response(text="<html>"), "does the reward server run"),
        (lambda _: {"rewards": []}, 'without "step_rewards"'),
        (lambda _: {"step_rewards": [[1.0]]}, "scored 1 rows of 2"),
    ],
)
async def test_an_endpoint_that_answers_something_else(answer: Any, why: str, make_group: Any) -> None:
    async with serving("/", answer) as url:
        with pytest.raises(RewardsFailed, match=why):
            await StepRewards(EndpointScorer(url), SplitByTurn())(make_group(*ROWS))


async def test_no_server_and_a_slow_one(make_group: Any, unused_tcp_port: int) -> None:
    nobody = EndpointScorer(f"http://127.0.0.1:{unused_tcp_port}")
    with pytest.raises(RewardsFailed, match="does the reward server run"):
        await StepRewards(nobody, SplitByTurn())(make_group(*ROWS))

    async def for_ever(request: web.Request) -> web.Response:
        await asyncio.Event().wait()
        raise AssertionError

    application = web.Application()
    application.router.add_post("/", for_ever)
    async with TestServer(application) as server:
        slow = EndpointScorer(f"http://127.0.0.1:{server.port}", timeout_s=0.2)
        with pytest.raises(RewardsFailed, match=r"did not answer within 0\.2 s"):
            await StepRewards(slow, SplitByTurn())(make_group(*ROWS))


# --- vLLM's pooling API -------------------------------------------------------------------------------------


class Pooling:
    """Answers as vLLM 0.32 does for a token classification model: an output per token, or per separator."""

    def __init__(self, folder: Path, separator: int | None) -> None:
        self.model = AutoModelForTokenClassification.from_pretrained(folder).eval()
        self.separator = separator
        self.asked: list[Any] = []

    def __call__(self, body: Any) -> Any:
        self.asked.append({name: value for name, value in body.items() if name != "input"})
        data = [
            {"index": at, "object": "pooling", "data": self._outputs(ids)}
            for at, ids in enumerate(body["input"])
        ]
        return {"id": "pool-1", "object": "list", "model": body["model"], "data": data[::-1], "usage": {}}

    def _outputs(self, ids: list[int]) -> list[list[float]]:
        with torch.inference_mode():
            outputs = self.model(input_ids=torch.tensor([ids])).logits[0].softmax(-1)
        return [
            output
            for token, output in zip(ids, outputs.tolist(), strict=True)
            if self.separator in (None, token)
        ]


@pytest.mark.parametrize("pooling_type", ["ALL", "STEP"])
async def test_vllm_is_asked_in_token_ids(
    pooling_type: str, classifier_folder: Path, make_group: Any, policy: Any
) -> None:
    separator = policy.convert_tokens_to_ids("<extra_0>")
    server = Pooling(classifier_folder, separator if pooling_type == "STEP" else None)
    # a separator in the prompt has an output of its own, which is no step's
    group = make_group(("a<extra_0>?", "b\n\nc"), *ROWS)
    group["tokens"].append([5])
    group["loss_mask"].append([0])
    async with serving("/pooling", server) as url:
        scorer = PoolingScorer(f"{url}/", "prm", OwnTokens([separator]), separator=separator)
        new = await StepRewards(scorer, split_by_blank_line(policy))(group)
    assert server.asked == [
        {"model": "prm", "add_special_tokens": False, "encoding_format": "float", "task": "token_classify"}
    ]
    assert [len(row) for row in new["step_rewards"]] == [2, 3, 1, 0]
    for tokens, ends, rewards in zip(group["tokens"], new["step_ends"], new["step_rewards"], strict=True):
        ids, before = [], 0
        for end, reward in zip(ends, rewards, strict=True):
            ids += [*tokens[before:end], separator]
            before = end
            with torch.inference_mode():
                direct = server.model(input_ids=torch.tensor([ids])).logits[0, -1].softmax(-1)[1].item()
            assert reward == pytest.approx(direct, abs=1e-5)


@pytest.mark.parametrize(
    ("data", "why"),
    [
        ([{"index": 0, "data": [[0.5, 0.5]] * 3}], "3 outputs for 8 tokens with 1 separators"),
        ([], "does not answer as vLLM's pooling API"),
        ([{"index": 0, "data": "aGVsbG8="}], "does not answer as vLLM's pooling API"),
    ],
)
async def test_other_answers_of_a_pooling_server(data: Any, why: str, make_group: Any, policy: Any) -> None:
    separator = policy.convert_tokens_to_ids("<extra_0>")
    async with serving("/pooling", lambda _: {"data": data}) as url:
        scorer = PoolingScorer(url, "prm", OwnTokens([separator]), separator=separator)
        with pytest.raises(RewardsFailed, match=why):
            await StepRewards(scorer, SplitByTurn())(make_group(("what", "abc")))


async def test_a_server_with_one_output_a_token(make_group: Any) -> None:
    async with serving(
        "/pooling",
        lambda body: {"data": [{"index": 0, "data": [[float(n)] for n, _ in enumerate(body["input"][0])]}]},
    ) as url:
        new = await StepRewards(PoolingScorer(url, "rm", OwnTokens(), task=None), SplitByTurn())(
            make_group(("wh", "abc"))
        )
    assert new["step_rewards"] == [[4.0]]
