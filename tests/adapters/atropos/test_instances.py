"""Environments attached one by one, from code: each to its own bridge, before it runs, and detached again."""

from __future__ import annotations

import asyncio
import copy
import gc
import logging
import pickle
import weakref
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest
from waiting import until

import shmbridge

pytest.importorskip("atroposlib")

from atroposlib.envs import base

from shmbridge.producers import atropos

RUN = shmbridge.Run(batch_size=16, max_token_len=4096, num_steps=1000)
REPLACED = (
    "setup_wandb",
    "_register_env",
    "get_server_info",
    "get_status",
    "_send_scored_data_to_api",
    "_post_json_with_compression",
    "env_manager",
    "handle_env",
)


@pytest.fixture
def other_bridge(bridge: str) -> Iterator[str]:
    name = f"{bridge[:40]}-2"
    yield name
    gc.collect()
    assert not shmbridge.clean(name, dry_run=False).kept


def tokens_of(consumer: shmbridge.Consumer, into: list[Any]) -> list[Any]:
    for record in consumer.poll():
        with record:
            into.append(record.to_scored_data()["tokens"])
    return into


def made(script: ModuleType, items: int) -> list[Any]:
    each = [script.groups_of(item) for item in range(items)]
    return [
        group["tokens"] for groups in each for group in (groups if isinstance(groups, list) else [groups])
    ]


async def test_two_environments_of_one_process_serve_two_bridges(
    make_env: Callable[..., Any], script: ModuleType, bridge: str, other_bridge: str
) -> None:
    envs = [make_env(items=6), make_env(items=9)]
    for env, name in zip(envs, (bridge, other_bridge), strict=True):
        atropos.attach(env, bridge=name, lane_bytes="1M")
    with shmbridge.Consumer(bridge, run=RUN) as one, shmbridge.Consumer(other_bridge, run=RUN) as two:
        running = [asyncio.create_task(env.env_manager()) for env in envs]
        first: list[Any] = []
        second: list[Any] = []
        await until(lambda: len(tokens_of(one, first)) == 7 and len(tokens_of(two, second)) == 10)
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
    assert sorted(first) == sorted(made(script, 6))
    assert sorted(second) == sorted(made(script, 9))


async def test_an_instance_goes_its_own_way_and_its_class_another(
    make_env: Callable[..., Any], bridge: str, other_bridge: str
) -> None:
    atropos.attach(bridge=bridge, lane_bytes="1M")
    special, usual = make_env(), make_env()
    atropos.attach(special, bridge=other_bridge, lane_bytes="1M")
    with shmbridge.Consumer(bridge, run=RUN) as one, shmbridge.Consumer(other_bridge, run=RUN) as two:
        for env in (special, usual):
            await env.register_env()
        await special._send_scored_data_to_api({"tokens": [[1]], "masks": [[1]], "scores": [1.0]})
        await usual._send_scored_data_to_api({"tokens": [[2]], "masks": [[2]], "scores": [1.0]})
        assert tokens_of(two, []) == [[[1]]]
        assert tokens_of(one, []) == [[[2]]]
        await atropos.detach(special)
        # its class is attached still
        await special._send_scored_data_to_api({"tokens": [[3]], "masks": [[3]], "scores": [1.0]})
        await usual._send_scored_data_to_api({"tokens": [[4]], "masks": [[4]], "scores": [1.0]})
        assert sorted(tokens_of(one, [])) == [[[3]], [[4]]]
        for env in (special, usual):
            await ended(env)


async def ended(env: Any) -> None:
    async def nothing(_: Any) -> None:
        pass

    await atropos._attachments._runs(nothing)(env)


@pytest.mark.parametrize("attached", ["the instance", "its class", "all"])
async def test_an_environments_own_sending_and_asking_are_kept(
    make_env: Callable[..., Any], script: ModuleType, bridge: str, attached: str
) -> None:
    class Doubling(script.SeededEnv):  # type: ignore[misc, name-defined]
        async def _send_scored_data_to_api(self, scored_data: Any) -> None:
            for group in scored_data if isinstance(scored_data, list) else [scored_data]:
                group["scores"] = [2 * score for score in group["scores"]]
            await super()._send_scored_data_to_api(scored_data)

        async def get_status(self) -> None:
            await super().get_status()
            self.asked = True

    env = make_env(Doubling)
    atropos.attach(
        {"the instance": env, "its class": Doubling, "all": None}[attached], bridge=bridge, lane_bytes="1M"
    )
    with shmbridge.Consumer(bridge, run=RUN) as consumer:
        await env.register_env()
        await env.get_status()
        await env._send_scored_data_to_api({"tokens": [[1]], "masks": [[1]], "scores": [1.5]})
        await env._send_scored_data_to_api(
            [{"tokens": [[1]], "masks": [[1]], "scores": [score]} for score in (2.5, 3.5)]
        )
        assert env.asked
        got = [record.to_scored_data() for record in consumer.poll()]
        assert [group["scores"] for group in got] == [[3.0], [5.0], [7.0]]
        assert {group["env_id"] for group in got} == {env.env_id}
        del got
        await ended(env)


async def test_detaching_puts_in_the_lane_what_waits_and_leaves_the_environment_as_it_was(
    make_env: Callable[..., Any], bridge: str, script: ModuleType
) -> None:
    env = make_env()
    before, aiohttp = dict(vars(env)), base.aiohttp
    class_before = dict(vars(base.BaseEnv)), dict(vars(type(env)))
    atropos.attach(env, bridge=bridge, lane_bytes="256K")
    assert all(name in vars(env) for name in REPLACED[:-1])
    assert (dict(vars(base.BaseEnv)), dict(vars(type(env)))) == class_before
    with shmbridge.Consumer(bridge, run=RUN) as consumer:
        await env.register_env()
        groups = [script.groups_of(10 * number, longest=1500) for number in range(1, 9)]
        sending = asyncio.create_task(env.handle_send_to_api(copy.deepcopy(groups)))
        got: list[Any] = []
        with await consumer.get_async(5) as record:
            got.append(record.to_scored_data()["tokens"])
            assert consumer.stats()["records_total"] < 8, "some wait for room"
            departure = atropos.detach(env)
            assert not set(REPLACED) & set(vars(env))
            assert base.aiohttp is aiohttp
        await until(lambda: len(tokens_of(consumer, got)) == 8)
        await departure
        await departure
        await sending
        assert got == [group["tokens"] for group in groups]
        assert consumer.stats()["dropped_total"] == 0
        await until(lambda: consumer.stats()["lanes_live"] == 0)
    assert set(vars(env)) - set(before) <= {
        "env_id",
        "wandb_prepend",
        "checkpoint_dir",
        "checkpoint_interval",
    }
    assert all(vars(env)[name] is value for name, value in before.items() if callable(value))
    with pytest.raises(Exception, match=r"RetryError|ConnectionError|Cannot connect"):
        await env._register_env()  # the rollout server again, which is not there


async def test_an_environment_runs_again_after_it_ended_or_was_attached_again(
    make_env: Callable[..., Any], bridge: str, script: ModuleType
) -> None:
    env = make_env(items=1)
    with shmbridge.Consumer(bridge, run=RUN) as consumer:
        for _ in range(2):
            atropos.attach(env, bridge=bridge, lane_bytes="256K")
            for _ in range(2):
                running = asyncio.create_task(env.env_manager())
                got: list[Any] = []
                await until(lambda got=got: tokens_of(consumer, got))
                running.cancel()
                await asyncio.gather(running, return_exceptions=True)
                assert got == made(script, 1)
            await atropos.detach(env)


def test_an_instance_is_detached_also_when_its_loop_has_ended(
    make_env: Callable[..., Any], bridge: str
) -> None:
    env = make_env()
    atropos.attach(env, bridge=bridge, lane_bytes="256K")
    with shmbridge.Consumer(bridge, run=RUN) as consumer:

        async def send() -> None:
            await env.register_env()
            await env._send_scored_data_to_api({"tokens": [[1]], "masks": [[1]], "scores": [1.0]})

        asyncio.run(send())
        atropos.detach(env)
        assert tokens_of(consumer, []) == [[[1]]]


def test_groups_that_wait_for_room_are_counted_when_the_event_loop_ends(
    make_env: Callable[..., Any], bridge: str, script: ModuleType, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "shmbridge")
    env = make_env(items=0)
    atropos.attach(env, bridge=bridge, lane_bytes="256K")
    kept = []
    with shmbridge.Consumer(bridge, run=RUN) as consumer:

        async def main() -> None:
            kept.append(asyncio.create_task(env.env_manager()))
            await until(lambda: hasattr(env, "status_dict"))
            groups = [script.groups_of(10 * number, longest=1500) for number in range(1, 13)]
            kept.append(asyncio.create_task(env.handle_send_to_api(groups)))
            await until(lambda: consumer.stats()["records_total"])

        asyncio.run(main())
        in_lane = int(consumer.stats()["records_total"])
        assert 0 < in_lane < 12
        assert (
            f"{in_lane} groups delivered, not delivered: {12 - in_lane} with the event loop ended"
            in caplog.text
        )
        tokens_of(consumer, [])


def test_an_object_that_cannot_be_attached_is_refused(
    make_env: Callable[..., Any], bridge: str, other_bridge: str
) -> None:
    env = make_env()
    with pytest.raises(TypeError, match="a str is no environment"):
        atropos.attach("env", bridge=bridge)
    atropos.attach(env, bridge=bridge)
    with pytest.raises(RuntimeError, match="attached to bridge"):
        atropos.attach(env, bridge=other_bridge)
    atropos.detach(env)
    atropos.detach(env)
    atropos.attach(env, bridge=other_bridge)
    atropos.detach()
    assert not set(REPLACED) & set(vars(env))


def test_an_attached_environment_is_not_kept_alive(make_env: Callable[..., Any], bridge: str) -> None:
    env = make_env()
    atropos.attach(env, bridge=bridge)
    gone = weakref.ref(env)
    del env
    gc.collect()
    assert gone() is None


def test_the_tokenizer_of_an_attached_environment_pickles(make_env: Callable[..., Any], bridge: str) -> None:
    env = make_env()
    atropos.attach(env, bridge=bridge)
    assert "apply_chat_template" in vars(env.tokenizer)
    assert pickle.loads(pickle.dumps(env.tokenizer)).encode("w7") == env.tokenizer.encode("w7")
    atropos.detach(env)
    assert "apply_chat_template" not in vars(env.tokenizer)
