"""Requests in flight while a follower loads a version into a real engine, by pause mode."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from live_server import needs_spans

import shmbridge
from shmbridge.consumers.vllm.follow import Follower, FollowSettings, LiveEngine
from shmbridge.consumers.vllm.middleware import generate, question
from shmbridge.weights import WeightsReader, WeightsWriter

PATIENCE_S = 120.0
TOKENS = 480

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def loop() -> Iterator[asyncio.Runner]:
    """The one event loop that the engine lives in."""
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture(scope="module")
def bridge() -> Iterator[str]:
    name = f"vllm-pause-{os.getpid()}"
    yield name
    deadline = time.monotonic() + PATIENCE_S
    while shmbridge.clean(name, dry_run=False).kept:  # the engine's processes are about to end
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.fixture(scope="module")
def engine(loop, bridge, tiny_folder) -> Iterator[Any]:
    from vllm.config import WeightTransferConfig
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    async def make() -> Any:
        usual = {"dtype": "float32", "enforce_eager": True, "max_model_len": 512, "max_num_seqs": 8}
        return AsyncLLM.from_engine_args(
            AsyncEngineArgs(
                model=str(tiny_folder(0)),
                weight_transfer_config=WeightTransferConfig(backend="shmbridge"),
                **usual,
            )
        )

    made = loop.run(make())
    yield made
    made.shutdown()


@pytest.fixture(scope="module")
def writer(bridge) -> Iterator[WeightsWriter]:
    with WeightsWriter(bridge) as made:
        yield made


def publish(writer: WeightsWriter, model: Any) -> int:
    version = (writer.last_version or 0) + 1
    writer.publish(version, model.named_parameters())
    return version


async def has(follower: Follower, version: int) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while follower.version != version:
        assert time.monotonic() < deadline, follower.stats()
        await asyncio.sleep(0.005)


async def ask(engine: Any, tokens: int = TOKENS) -> dict[str, Any]:
    greedy = {
        "prompt": {"prompt_token_ids": [2, 7, 9, 12, 3]},
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
        "logprobs": 0,
    }
    return await generate(engine, question(json.dumps(greedy).encode(), ()))


@pytest.fixture
def over_an_update(engine, loop, writer, make_model) -> Callable[..., Any]:
    """Call it with settings for: the version before, the one after, the answer to a request in flight, the
    answer to a later one.
    """

    async def run(seeds: tuple[int, int], **settings: Any) -> tuple[str, str, Any, Any]:
        before = publish(writer, make_model(seeds[0]))
        wanted = FollowSettings(bridge=writer.bridge, **settings)
        follower = Follower(WeightsReader(writer.bridge), LiveEngine(engine, wanted))
        await follower.start()
        try:
            assert follower.version == before
            flying = asyncio.create_task(ask(engine))
            await asyncio.sleep(0.3)
            after = publish(writer, make_model(seeds[1]))
            await has(follower, after)
            return str(before), str(after), await flying, await ask(engine, 8)
        finally:
            await follower.close()

    return lambda *seeds, **settings: loop.run(run(seeds, **settings))


def versions(answer: dict[str, Any]) -> list[str]:
    return [span["version"] for span in answer["weight_versions"][0]]


def farthest(model: Any, answer: dict[str, Any], span: dict[str, Any]) -> float:
    """The largest difference between the sampler's and a model's log-probabilities of a span's tokens, in
    nats.
    """
    import torch

    prompt, tokens = answer["prompt_token_ids"], answer["token_ids"][0]
    with torch.no_grad():
        rows = torch.log_softmax(model(torch.tensor([prompt + tokens])).logits[0].float(), -1)
    said = [next(iter(entry[0].values())) for entry in answer["logprobs"][0]]
    return max(
        abs(said[at] - float(rows[len(prompt) + at - 1, tokens[at]]))
        for at in range(span["start"], span["end"])
    )


@needs_spans
def test_keep_goes_on_and_computes_its_cache_again(over_an_update, make_model):
    before, after, flying, later = over_an_update(60, 61, pause="keep")
    assert versions(flying) == [before, after]
    assert flying["finish_reasons"] == ["length"]
    first, second = flying["weight_versions"][0]
    assert farthest(make_model(60), flying, first) < 1e-4
    assert farthest(make_model(61), flying, second) < 1e-4
    assert versions(later) == [after]


@needs_spans
def test_keep_without_recompute_goes_on_over_the_old_cache(over_an_update, make_model):
    before, after, flying, later = over_an_update(62, 63, pause="keep", recompute=False)
    assert versions(flying) == [before, after]
    first, second = flying["weight_versions"][0]
    assert farthest(make_model(62), flying, first) < 1e-4
    assert farthest(make_model(63), flying, second) > 1e-3, "no version alone explains these tokens"
    assert versions(later) == [after]


@needs_spans
def test_wait_lets_requests_end_first(over_an_update):
    before, after, flying, later = over_an_update(64, 65, pause="wait")
    assert versions(flying) == [before]
    assert (flying["finish_reasons"], len(flying["token_ids"][0])) == (["length"], TOKENS)
    assert versions(later) == [after]


@needs_spans
def test_abort_ends_requests_with_what_they_have(over_an_update):
    before, after, flying, later = over_an_update(66, 67, pause="abort")
    assert flying["finish_reasons"] == ["abort"]
    assert 0 < len(flying["token_ids"][0]) < TOKENS
    assert versions(flying) == [before]
    assert versions(later) == [after]


@needs_spans
def test_update_that_somebody_began_and_left_is_no_obstacle(engine, loop, writer, over_an_update):
    loop.run(engine.start_weight_update())
    _, after, _, later = over_an_update(68, 69)
    assert versions(later) == [after]


def test_engine_paused_by_somebody_else_takes_versions_and_stays_paused(engine, loop, writer, make_model):
    async def run() -> None:
        publish(writer, make_model(70))
        follower = Follower(
            WeightsReader(writer.bridge), LiveEngine(engine, FollowSettings(bridge=writer.bridge))
        )
        await follower.start()
        await engine.pause_generation(mode="keep", clear_cache=False)
        try:
            await has(follower, publish(writer, make_model(71)))
            assert await engine.is_paused()
        finally:
            await engine.resume_generation()
            await follower.close()

    loop.run(run())
