"""`WeightSync` and a real `AsyncLLM`: after a push it samples what Hugging Face computes with the new
weights, also in the middle of a request in flight.
"""

from __future__ import annotations

import asyncio
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

import pytest
import torch
from live_server import REPORTS_SPANS, needs_spans
from vllm.distributed.weight_transfer.base import WeightTransferInitRequest

from shmbridge.consumers.engines.vllm import VllmAsync
from shmbridge.consumers.weight_sync import EngineFailed, WeightSync

NONE = WeightTransferInitRequest(init_info={})
PROMPT = [2, 7, 9, 12, 3]
LONG = 400  # tokens of a request that is in flight when weights change
# an engine starts in half a minute on an idle machine
pytestmark = pytest.mark.timeout(300)


class Running:
    """An `AsyncLLM` in an event loop of its own thread."""

    def __init__(self, folder: Any) -> None:
        from vllm.config import WeightTransferConfig
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self.loop.run_forever, daemon=True).start()

        async def made() -> AsyncLLM:
            return AsyncLLM.from_engine_args(
                AsyncEngineArgs(
                    model=str(folder),
                    dtype="float32",
                    enforce_eager=True,
                    max_model_len=512,
                    max_num_seqs=8,
                    seed=0,
                    weight_transfer_config=WeightTransferConfig(backend="shmbridge"),
                )
            )

        self.llm = self.begin(made()).result(300)

    def begin(self, call: Any) -> Future[Any]:
        return asyncio.run_coroutine_threadsafe(call, self.loop)

    def answer(self, tokens: int = 16) -> Any:
        return self.begin(self.sample(tokens)).result(120)

    async def sample(self, tokens: int, seen: list[int] | None = None) -> Any:
        """The finished answer; `seen` gets how many tokens there are, as they come."""
        from vllm import SamplingParams

        wanted = SamplingParams(
            temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False, logprobs=0
        )
        async for output in self.llm.generate({"prompt_token_ids": PROMPT}, wanted, uuid.uuid4().hex):
            if seen is not None:
                seen.append(len(output.outputs[0].token_ids))
        return output.outputs[0]


@pytest.fixture(scope="module")
def engine(tiny_folder: Callable[..., Any]) -> Iterator[Running]:
    running = Running(tiny_folder())
    yield running
    running.llm.shutdown()
    running.loop.call_soon_threadsafe(running.loop.stop)


@pytest.fixture
def sync_of(engine: Running, bridge: str) -> Iterator[Callable[..., WeightSync]]:
    """Call it with a pause; afterwards the engine has let the bridge go."""
    made: list[WeightSync] = []

    def make(**more: Any) -> WeightSync:
        made.append(WeightSync(bridge, VllmAsync(engine.llm, engine.loop), **more))
        return made[-1]

    yield make
    made.pop().close()
    engine.begin(engine.llm.init_weight_transfer_engine(NONE)).result(60)


def test_three_pushes_are_what_hugging_face_computes_and_without_one_it_shows(
    engine, sync_of, make_model, greedy
):
    sync, said = sync_of(), []
    for seed in (1, 2, 3):
        model = make_model(seed)
        version = sync.push(model)
        answer = engine.answer()
        assert answer.token_ids == greedy(model)
        assert engine.begin(engine.llm.get_weight_version()).result(60) == str(version)
        said.append(answer.token_ids)
    assert len({tuple(each) for each in said}) == 3, "the versions say the same: nothing was tested"
    assert engine.answer().token_ids != greedy(make_model(4)), "nobody pushed that"
    assert sync.push(make_model(4)) == version + 1


def logprobs_under(model: Any, tokens: list[int]) -> torch.Tensor:
    """Returns the log-probability of each token of an answer, from one forward pass."""
    with torch.no_grad():
        logits = model(torch.tensor([PROMPT + tokens])).logits[0, len(PROMPT) - 1 : -1]
    return logits.log_softmax(-1).gather(-1, torch.tensor(tokens)[:, None])[:, 0]


def begun(engine: Running) -> Future[Any]:
    """A long request of which 20 tokens are there."""
    seen: list[int] = []
    request = engine.begin(engine.sample(LONG, seen))
    deadline = time.monotonic() + 60
    while not seen or seen[-1] < 20:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    return request


@needs_spans
def test_a_request_that_is_kept_goes_on_as_the_new_weights_alone_would(engine, sync_of, make_model):
    sync = sync_of(pause="keep")
    old, new = make_model(5), make_model(6)
    first = sync.push(old)
    request = begun(engine)
    second = sync.push(new)
    assert not request.done(), "it was over before the push: nothing was tested"
    answer = request.result(120)
    assert answer.finish_reason == "length"
    (early, late) = answer.weight_versions
    assert (early.version, early.start, late.version, late.end) == (str(first), 0, str(second), LONG)
    assert 20 <= early.end == late.start < LONG
    said = torch.tensor([next(iter(each.values())).logprob for each in answer.logprobs])
    tokens = list(answer.token_ids)
    torch.testing.assert_close(said[: early.end], logprobs_under(old, tokens)[: early.end], atol=2e-4, rtol=0)
    torch.testing.assert_close(
        said[late.start :], logprobs_under(new, tokens)[late.start :], atol=2e-4, rtol=0
    )
    assert (said[late.start :] - logprobs_under(old, tokens)[late.start :]).abs().max() > 0.1


def test_a_request_that_is_waited_for_ends_under_the_old_weights(engine, sync_of, make_model, greedy):
    sync = sync_of(pause="wait")
    old = make_model(5)
    first = sync.push(old)
    request = begun(engine)
    sync.push(make_model(6))
    answer = request.result(1)
    if REPORTS_SPANS:
        assert [(span.version, span.end) for span in answer.weight_versions] == [(str(first), LONG)]
    assert list(answer.token_ids) == greedy(old, PROMPT, LONG)
    assert engine.answer().token_ids == greedy(make_model(6))


def test_a_request_that_is_aborted_ends_where_it_is(engine, sync_of, make_model, greedy):
    sync = sync_of(pause="abort")
    old = make_model(5)
    sync.push(old)
    request = begun(engine)
    sync.push(make_model(6))
    answer = request.result(10)
    assert answer.finish_reason == "abort"
    assert 20 <= len(answer.token_ids) < LONG
    assert engine.answer().token_ids == greedy(make_model(6))


def test_around_a_rollout_from_the_engines_own_loop(engine, sync_of, make_model, greedy):
    sync = sync_of()
    model = make_model(7)

    async def rollout() -> Any:
        async with sync.updated_async(model) as given:
            assert isinstance(given, VllmAsync)
            return await engine.sample(16)

    assert engine.begin(rollout()).result(120).token_ids == greedy(model)

    async def blocks() -> None:
        sync.push(model)

    with pytest.raises(EngineFailed, match="await push_async"):
        engine.begin(blocks()).result(60)
    assert engine.answer().token_ids == greedy(model), "and it is not paused"


def test_a_model_that_does_not_fit_is_named_and_the_old_weights_serve(
    engine, sync_of, make_model, greedy, bridge
):
    sync = sync_of()
    model = make_model(1)
    tensors = {name: parameter.detach() for name, parameter in make_model(2).named_parameters()}
    tensors["model.layers.1.input_layernorm.weight"] = torch.zeros(32)
    engine_before = engine.begin(engine.llm.get_weight_version()).result(60)
    before = engine.answer().token_ids
    with pytest.raises(EngineFailed, match=r"AsyncLLM of .*model\.layers\.1\.input_layernorm\.weight"):
        sync.push(tensors)
    assert engine.answer().token_ids == before
    assert engine.begin(engine.llm.get_weight_version()).result(60) == engine_before
    sync.close()
    with WeightSync(f"{bridge}-2", VllmAsync(engine.llm, engine.loop)) as other:
        other.push(model)
        assert engine.answer().token_ids == greedy(model)
        engine.begin(engine.llm.init_weight_transfer_engine(NONE)).result(60)


def test_an_update_that_somebody_left_active_is_ended_first(engine, sync_of, make_model, greedy):
    sync = sync_of()
    engine.begin(engine.llm.pause_generation(mode="keep", clear_cache=False)).result(60)
    engine.begin(engine.llm.start_weight_update()).result(60)
    sync.push(make_model(8))
    assert engine.answer().token_ids == greedy(make_model(8))
