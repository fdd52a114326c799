"""An attached environment in this process: what makes it hold, what is stamped, what is counted."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest
from waiting import until

import shmbridge
from shmbridge.control.messages import RunInfoRequest
from shmbridge.control.server import ControlClient

pytest.importorskip("atroposlib")

from atroposlib.envs import base

from shmbridge.producers import atropos
from shmbridge.producers.atropos import control_link, patches

RUN = shmbridge.Run(batch_size=16, max_token_len=4096, num_steps=1000, wandb_group="g", wandb_project="p")


@pytest.fixture
def make_env(
    bridge: str, script: ModuleType, tokenizer: str, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., Any]]:
    monkeypatch.setattr(control_link, "ASK_S", 0.3)

    def make(env_class: type | None = None, **config: Any) -> Any:
        defaults, servers = script.SeededEnv.config_init()
        settings = defaults.model_dump() | {"tokenizer_name": tokenizer} | config
        return (env_class or script.SeededEnv)(script.SeededConfig(**settings), servers)

    atropos.attach(bridge=bridge, lane_bytes="256K")
    yield make
    atropos.detach()


@pytest.fixture
def env(make_env: Callable[..., Any]) -> Any:
    return make_env()


@pytest.fixture
def consumer(bridge: str) -> Iterator[shmbridge.Consumer]:
    with shmbridge.Consumer(bridge, run=RUN) as consumer:
        yield consumer


async def started(env: Any) -> None:
    """Does the steps of env_manager before its loop."""
    await env.setup()
    await env.register_env()
    await env.get_server_info()
    await env.get_status()


async def left(env: Any) -> None:
    """Does the steps of env_manager at its end."""

    async def nothing(_: Any) -> None:
        pass

    await atropos._attachments._runs(nothing)(env)


def work_on(env: Any, item: int) -> asyncio.Task[Any]:
    """A worker as add_train_workers makes it."""
    env.running_items[str(item)] = {"item": item, "worker": None, "start_time": 0}
    return asyncio.create_task(env.handle_env(str(item)))


def good_group(script: ModuleType, item: int, **changes: Any) -> dict[str, Any]:
    return {**script.groups_of(item), **changes}


# --- registration and steering ----------------------------------------------------------------------------


async def test_base_env_learns_all_it_asks_the_rollout_server(env: Any, consumer: shmbridge.Consumer) -> None:
    await started(env)
    assert (env.env_id, env.wandb_prepend, env.curr_step) == (0, "seeded_0", 0)
    assert (env.config.batch_size, env.max_token_len) == (16, 4096)
    assert env.status_dict == {
        "current_step": 0,
        "queue_size": 0,
        "unallocated_fraction": 1.0,
        "self_queue_size": 0,
        "max_group_size": 1,
        "env_weight": 1.0,
    }
    await left(env)


async def test_wandb_is_set_up_with_the_run_of_the_consumer(
    make_env: Callable[..., Any], bridge: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    began: list[dict[str, Any]] = []
    monkeypatch.setattr(base.wandb, "init", lambda **settings: began.append(settings))
    env = make_env(use_wandb=True)
    waiting = asyncio.create_task(env.setup_wandb())
    await asyncio.sleep(0)
    with shmbridge.Consumer(bridge, run=RUN):
        await waiting
    assert [(settings["group"], settings["project"]) for settings in began] == [("g", "p")]
    await left(env)


async def test_the_name_falls_back_to_that_of_the_class(make_env: Callable[..., Any], consumer: Any) -> None:
    env = make_env(wandb_name="mine")
    other = make_env()
    await started(env)
    await started(other)
    assert (env.wandb_prepend, other.wandb_prepend) == ("mine_0", "seeded_0")
    await left(env)
    await left(other)


async def test_the_name_may_be_the_instances(
    make_env: Callable[..., Any], consumer: Any, script: ModuleType
) -> None:
    class Named(script.SeededEnv):  # type: ignore[misc, name-defined]
        @property
        def name(self) -> str:
            return f"of {self.config.group_size}"

    env = make_env(Named)
    await started(env)
    await env.handle_send_to_api(script.groups_of(10))
    with consumer.get(5) as record:
        assert record.meta.env_name == "of 4"
    await left(env)


async def test_queued_groups_and_those_without_room_throttle(
    env: Any, consumer: shmbridge.Consumer, script: ModuleType
) -> None:
    await started(env)
    big = script.groups_of(10, longest=1500)
    sends = [asyncio.create_task(env._send_scored_data_to_api(dict(big))) for _ in range(12)]
    with await consumer.get_async(5):
        await env.get_status()
        assert 1 < consumer.stats()["records_total"] < 12
        assert env.status_dict["queue_size"] == env.status_dict["self_queue_size"] == 11
    for _ in range(11):
        (await consumer.get_async(5)).release()
    await asyncio.gather(*sends)
    await env.get_status()
    assert env.status_dict["queue_size"] == 0
    await left(env)


# --- a consumer that is missing, pauses, or is another one ------------------------------------------------


async def test_workers_hold_without_a_consumer_and_the_last_numbers_stay(
    env: Any, bridge: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "shmbridge")
    with shmbridge.Consumer(bridge, run=RUN):
        await started(env)
        allowed = env.max_num_workers
        assert allowed > 0
        numbers = env.status_dict
    for _ in range(3):
        await env.get_status()
        assert env.max_num_workers == 0
        assert env.status_dict == numbers
    with shmbridge.Consumer(bridge, run=RUN):
        await until(lambda: True)
        await env.get_status()
        await env.get_status()
        assert env.max_num_workers == allowed
    said = [record.getMessage() for record in caplog.records]
    assert sum("no consumer answers" in message for message in said) == 1
    assert sum("going on after" in message for message in said) == 1
    await left(env)


async def test_an_environment_near_its_last_step_is_not_ended_by_a_missing_consumer(
    make_env: Callable[..., Any], bridge: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(base.asyncio, "sleep", _hasty(asyncio.sleep))
    env = make_env(total_steps=4, items=0)
    with shmbridge.Consumer(bridge, run=shmbridge.Run(batch_size=16, starting_step=4)):
        running = asyncio.create_task(env.env_manager())
        await until(lambda: hasattr(env, "status_dict"))
    await until(lambda: env.max_num_workers == 0)
    await asyncio.sleep(0.5)
    assert not running.done()
    with shmbridge.Consumer(bridge, run=shmbridge.Run(batch_size=16, starting_step=5)):
        await asyncio.wait_for(running, 20)


def _hasty(sleep: Callable[..., Any]) -> Callable[..., Any]:
    """BaseEnv sleeps five seconds before it starts."""
    return lambda seconds, *rest: sleep(min(seconds, 0.05), *rest)


@pytest.mark.parametrize("how", ["pause", "drain"])
async def test_a_consumer_that_pauses_or_drains_holds_the_workers(
    env: Any, consumer: shmbridge.Consumer, how: str
) -> None:
    await started(env)
    getattr(consumer, how)()
    await env.get_status()
    assert env.max_num_workers == 0
    if how == "pause":
        consumer.resume()
        await env.get_status()
        assert env.max_num_workers > 0
    await left(env)


async def test_the_run_of_another_consumer_is_taken_over(env: Any, bridge: str) -> None:
    with shmbridge.Consumer(bridge, run=RUN):
        await started(env)
    with shmbridge.Consumer(bridge, run=shmbridge.Run(batch_size=32, max_token_len=99, starting_step=7)):
        await until(lambda: True)
        await env.get_status()
        await env.get_status()
        assert (env.config.batch_size, env.max_token_len, env.status_dict["current_step"]) == (32, 99, 7)
        assert env.env_id == 0
    await left(env)


async def test_a_run_that_does_not_suit_is_said_and_not_fatal(
    env: Any, bridge: str, caplog: pytest.LogCaptureFixture
) -> None:
    with shmbridge.Consumer(bridge, run=RUN):
        await started(env)
    with shmbridge.Consumer(bridge, run=shmbridge.Run(batch_size=2)):
        await until(lambda: True)
        await env.get_status()
        await env.get_status()
    assert "does not suit this environment" in caplog.text
    await left(env)


# --- groups -----------------------------------------------------------------------------------------------


async def test_versions_are_those_when_generation_began_and_when_it_was_sent(
    make_env: Callable[..., Any], consumer: shmbridge.Consumer, script: ModuleType
) -> None:
    gates = {item: asyncio.Event() for item in range(3)}

    class Gated(script.SeededEnv):
        async def collect_trajectories(self, item: int) -> Any:
            await gates[item].wait()
            return script.groups_of(item), []

        async def handle_env(self, item_uuid: str) -> Any:  # some environments have their own
            return await super().handle_env(item_uuid)

    env = make_env(Gated)
    await started(env)
    workers = []
    for item in range(3):
        consumer.publish_policy_version(10 + item)
        workers.append(work_on(env, item))
        await asyncio.sleep(0)
    stamped = {}
    for item in (2, 0, 1):
        gates[item].set()
        await workers[item]
        with consumer.get(5) as record:
            meta = record.meta
            stamped[item] = (meta.min_policy_version, meta.max_policy_version)
        consumer.publish_policy_version(consumer.policy_version + 10)
    assert stamped == {2: (12, 12), 0: (10, 22), 1: (11, 32)}
    await left(env)


async def test_a_cancelled_worker_loses_no_group_of_its_list(
    env: Any, consumer: shmbridge.Consumer, script: ModuleType
) -> None:
    await started(env)
    groups = [script.groups_of(10 * number, longest=1500) for number in range(1, 13)]
    worker = asyncio.create_task(env.handle_send_to_api(groups))
    got = []
    with await consumer.get_async(5) as record:
        got.append(record.to_scored_data()["tokens"])
        assert consumer.stats()["records_total"] < 12
        worker.cancel()
        with pytest.raises(asyncio.CancelledError):
            await worker
    for _ in groups[1:]:
        with await consumer.get_async(5) as record:
            got.append(record.to_scored_data()["tokens"])
    assert got == [group["tokens"] for group in groups]
    await left(env)


async def test_groups_that_wait_for_room_at_the_end_are_delivered_or_counted(
    env: Any, consumer: shmbridge.Consumer, script: ModuleType, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    caplog.set_level(logging.INFO, "shmbridge")
    monkeypatch.setattr(patches, "FLUSH_S", 0.2)
    await started(env)
    groups = [script.groups_of(10 * number, longest=1500) for number in range(1, 13)]
    sending = asyncio.create_task(env.handle_send_to_api(groups))
    with await consumer.get_async(5):
        await left(env)
        await sending
    stats = consumer.stats()
    in_lane = int(stats["records_total"])
    assert 1 < in_lane < 12
    assert f"{in_lane} groups delivered, not delivered: {12 - in_lane} Closed" in caplog.text
    assert stats["dropped_total{cancelled}"] == 1


@pytest.mark.parametrize(
    ("fault", "named"),
    [
        ({"advantages": [[float("nan")] * 3] * 4}, "advantages"),
        ({"scores": [1.0, float("inf"), 2.0, 3.0]}, "score"),
        ({"inference_logprobs": [["x"]] * 4}, "inference_logprobs"),
        ({"messages": [[{"role": "user", "content": object()}]] * 4}, "JSON"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else value,
)
async def test_a_group_that_cannot_be_carried_is_said_once_and_counted(
    env: Any, consumer: shmbridge.Consumer, script: ModuleType, caplog: Any, fault: dict[str, Any], named: str
) -> None:
    await started(env)
    for item in (10, 20, 30):
        await env.handle_send_to_api(good_group(script, item, **fault))
    await env.handle_send_to_api(good_group(script, 40))
    errors = [
        record.getMessage()
        for record in caplog.records
        if record.name.startswith("shmbridge.") and record.levelname == "ERROR"
    ]
    assert len(errors) == 1
    assert named in errors[0]
    with consumer.get(5) as record:
        assert record.to_scored_data()["tokens"] == script.groups_of(40)["tokens"]
    assert consumer.stats()["dropped_total{invalid}"] == 3
    assert consumer.stats()["records_total"] == 1
    await left(env)


async def test_filters_of_base_env_stay_before_the_lane(
    env: Any, consumer: shmbridge.Consumer, script: ModuleType
) -> None:
    await started(env)
    env.max_token_len = 100
    await env.handle_send_to_api(good_group(script, 10, scores=[1.0] * 4))
    await env.handle_send_to_api(script.groups_of(20, longest=500) | {"tokens": [[1] * 200] * 4})
    await env.handle_send_to_api({**script.groups_of(30), "tokens": [[1, 2]]})
    await env.handle_send_to_api([None, script.groups_of(40)])
    with consumer.get(5) as record:
        assert record.to_scored_data()["tokens"] == script.groups_of(40)["tokens"]
    assert consumer.stats()["records_total"] == 1
    await left(env)


# --- attach and detach ------------------------------------------------------------------------------------


def test_detach_puts_everything_back(bridge: str, script: ModuleType) -> None:
    before = dict(vars(base.BaseEnv)), dict(vars(script.SeededEnv)), base.aiohttp
    for env_class in (None, script.SeededEnv):
        atropos.attach(env_class, bridge=bridge)
        with pytest.raises(RuntimeError, match="attached already"):
            atropos.attach(bridge=bridge)
        atropos.detach()
        atropos.detach()
        assert (dict(vars(base.BaseEnv)), dict(vars(script.SeededEnv)), base.aiohttp) == before


async def test_attaching_one_class_leaves_others_alone(bridge: str, script: ModuleType) -> None:
    get_status = base.BaseEnv.get_status
    atropos.attach(script.SeededEnv, bridge=bridge)
    try:
        assert base.BaseEnv.get_status is get_status
        async with base.aiohttp.ClientSession() as session:
            assert type(session).__module__.startswith("aiohttp")
    finally:
        atropos.detach()


async def test_leaving_says_goodbye(make_env: Callable[..., Any], consumer: Any, bridge: str) -> None:
    env, other = make_env(), make_env()
    await started(env)
    await started(other)
    await env.get_status()
    assert env.status_dict["env_weight"] == 0.5
    await left(other)
    await env.get_status()
    assert env.status_dict["env_weight"] == 1.0
    with ControlClient(bridge, role="test", name="t") as client:
        assert client.request(RunInfoRequest()).run == RUN
    await left(env)
