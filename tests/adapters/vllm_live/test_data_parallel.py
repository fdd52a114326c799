"""Two data-parallel engines behind one client: both take each version; where only one could, no token is
stamped with one.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
from live_server import needs_spans
from vllm.distributed.weight_transfer.base import WeightTransferInitRequest

from shmbridge.consumers.engines.vllm import VllmAsync
from shmbridge.consumers.vllm.follow import Follower, FollowSettings, LiveEngine
from shmbridge.consumers.vllm.middleware import generate, question
from shmbridge.consumers.weight_sync import EngineFailed, WeightSync
from shmbridge.weights import WeightsReader, WeightsWriter

PATIENCE_S = 120.0
NONE = WeightTransferInitRequest(init_info={})
PROMPT = [2, 7, 9, 12, 3]
QUESTION = {"prompt": {"prompt_token_ids": PROMPT}, "max_tokens": 16, "temperature": 0, "ignore_eos": True}

pytestmark = [pytest.mark.timeout(300), needs_spans]  # which tell the answers of the engines apart


class Fleet:
    """An `AsyncLLM` of two engines, in an event loop of its own thread."""

    def __init__(self, folder: Path) -> None:
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
                    max_model_len=256,
                    max_num_seqs=8,
                    seed=0,
                    data_parallel_size=2,
                    worker_extension_cls="failing_worker.Extension",
                    weight_transfer_config=WeightTransferConfig(backend="shmbridge"),
                )
            )

        self.llm = self.begin(made()).result(300)

    def begin(self, call: Any) -> Future[Any]:
        return asyncio.run_coroutine_threadsafe(call, self.loop)

    def answers(self) -> list[tuple[list[int], int | None]]:
        """Tokens and version of an answer of each engine: the client deals requests of one moment out."""

        async def ask() -> list[Any]:
            asked = question(json.dumps(QUESTION).encode(), ())
            return await asyncio.gather(*[generate(self.llm, asked) for _ in range(4)])

        return [
            (answer["token_ids"][0], answer["weight_version"]) for answer in self.begin(ask()).result(120)
        ]


@pytest.fixture(scope="module")
def failing(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """While this file is there the second engine takes no version."""
    return tmp_path_factory.mktemp("second") / "fails"


@pytest.fixture(scope="module")
def fleet(tiny_folder: Any, failing: Path) -> Iterator[Fleet]:
    here = str(Path(__file__).parent)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")  # the engines share what cores there are
        patch.setenv("SHMBRIDGE_TEST_FAIL", str(failing))
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [here, os.environ.get("PYTHONPATH")])))
        patch.setattr(sys, "path", [here, *sys.path])
        running = Fleet(tiny_folder())
    yield running
    running.llm.shutdown()
    running.loop.call_soon_threadsafe(running.loop.stop)


def let_go(fleet: Fleet) -> None:
    fleet.begin(fleet.llm.init_weight_transfer_engine(NONE)).result(60)


def test_a_follower_brings_both_to_a_version_or_says_that_it_does_not_know(
    fleet, failing, bridge, make_model, greedy, monkeypatch
):
    monkeypatch.setattr("shmbridge.consumers.vllm.follow._FIRST_RETRY_S", 0.05)

    async def begun() -> Follower:
        follower = Follower(
            WeightsReader(bridge), LiveEngine(fleet.llm, FollowSettings(bridge=bridge), engines=2)
        )
        await follower.start()
        return follower

    def until(condition: Any) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not condition():
            assert time.monotonic() < deadline, follower.stats()
            time.sleep(0.01)

    with WeightsWriter(bridge) as writer:
        follower = fleet.begin(begun()).result(60)
        try:
            for version in (1, 2):
                writer.publish(version, make_model(version).named_parameters())
                until(lambda: follower.version == version)  # noqa: B023
                assert fleet.answers() == [(greedy(make_model(version)), version)] * 4
            failing.touch()
            writer.publish(3, make_model(3).named_parameters())
            until(lambda: follower.stats().refused_version == 3)
            said = fleet.answers()
            assert sorted(tokens for tokens, _ in said) == sorted(
                [greedy(make_model(2)), greedy(make_model(3))] * 2
            )
            assert {version for _, version in said} == {None} == {follower.version}
            assert "data-parallel engines" in str(follower.stats().last_error)
            failing.unlink()
            writer.publish(4, make_model(4).named_parameters())
            until(lambda: follower.version == 4)
            assert fleet.answers() == [(greedy(make_model(4)), 4)] * 4
        finally:
            failing.unlink(missing_ok=True)
            fleet.begin(follower.close()).result(60)
    let_go(fleet)


def test_a_push_brings_both_to_a_version_or_says_that_it_does_not_know(
    fleet, failing, bridge, make_model, greedy
):
    with WeightSync(bridge, VllmAsync(fleet.llm, fleet.loop)) as sync:
        first = sync.push(make_model(1))
        assert fleet.answers() == [(greedy(make_model(1)), first)] * 4
        failing.touch()
        with pytest.raises(EngineFailed, match="2 data-parallel engines"):
            sync.push(make_model(2))
        failing.unlink()
        assert {version for _, version in fleet.answers()} == {None}
        last = sync.push(make_model(3))
        assert fleet.answers() == [(greedy(make_model(3)), last)] * 4
    let_go(fleet)


class FleetClient:
    """vLLM has clients of its trainer interface for HTTP and Ray; an `AsyncLLM` is called itself."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    def __getattr__(self, name: str) -> Any:
        return lambda *args: self._fleet.begin(getattr(self._fleet.llm, name)(*args)).result(60)

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest

        self.__getattr__("init_weight_transfer_engine")(WeightTransferInitRequest(init_info=init_info))

    def update_weights(self, update_info: Any) -> None:
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        self.__getattr__("update_weights")(WeightTransferUpdateRequest(update_info=update_info))


def test_the_trainer_interface_says_that_it_does_not_know(fleet, failing, bridge, make_model, greedy):
    from vllm.distributed.weight_transfer.base import ModuleSource

    from shmbridge.consumers.vllm.backend import (
        ShmBridgeTrainerInitInfo,
        ShmBridgeTrainerWeightTransferEngine,
    )

    model = make_model(1)
    trainer = ShmBridgeTrainerWeightTransferEngine.trainer_init(
        ShmBridgeTrainerInitInfo(rank=0, bridge=bridge), client=FleetClient(fleet), source=ModuleSource(model)
    )

    def send(seed: int) -> None:
        model.load_state_dict(make_model(seed).state_dict())
        trainer.send_weights()
        fleet.begin(fleet.llm.reset_prefix_cache()).result(60)

    try:
        send(1)
        assert fleet.answers() == [(greedy(make_model(1)), 1)] * 4
        failing.touch()
        with pytest.raises(Exception, match="no room in the second engine") as failed:
            send(2)
        assert {version for _, version in fleet.answers()} == {None}
        assert failed.value.__notes__ == [
            "vLLM may have taken it, whole or in part: samples are of version 'unknown' until it takes one"
        ]
        failing.unlink()
        send(3)
        assert fleet.answers() == [(greedy(make_model(3)), 3)] * 4
        fleet.begin(fleet.llm.start_weight_update()).result(60)  # a trainer that died then left this
        send(4)
        assert fleet.answers() == [(greedy(make_model(4)), 4)] * 4
    finally:
        failing.unlink(missing_ok=True)
        trainer.shutdown()
    let_go(fleet)
