"""An attached environment survives a consumer that is away for seconds and a bridge that is removed under it;
some errors end it.
"""

from __future__ import annotations

import asyncio
import copy
import logging
import math
import re
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from waiting import until

import shmbridge
from shmbridge.segments import MOUNT, lane_names, open_mapping

pytest.importorskip("atroposlib")

from shmbridge.producers import atropos
from shmbridge.producers.atropos import control_link
from shmbridge.producers.atropos.lane import EnvLane, GroupsRefused, LinkOptions
from shmbridge.producers.atropos.versions import Stamp

RUN = shmbridge.Run(batch_size=16, max_token_len=4096, num_steps=1000)
ENVS = Path(__file__).parent / "envs"


async def stopped(running: asyncio.Task[None]) -> None:
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


def remove_by_force(bridge: str) -> None:
    for path in Path("/dev/shm").glob(f"shmbridge.{bridge}.*"):
        if path.is_file():
            path.unlink()


@pytest.fixture
def attached(
    make_env: Callable[..., Any], bridge: str, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., Any]]:
    monkeypatch.setattr(control_link, "ASK_S", 0.3)

    def make(env_class: type | None = None, lane_bytes: str = "256K", **config: Any) -> Any:
        env = make_env(env_class, **config)
        atropos.attach(env, bridge=bridge, lane_bytes=lane_bytes)
        return env

    return make


async def test_environments_under_load_outlast_four_seconds_without_a_consumer(
    attached: Callable[..., Any], bridge: str
) -> None:
    env = attached(collect_s=0.01, lane_bytes="1M")
    sequences: list[int] = []

    def take(consumer: shmbridge.Consumer) -> bool:
        for record in consumer.poll():
            with record:
                sequences.append(record.meta.sequence)
                assert not record.meta.redelivered
        return len(sequences) >= 100

    with shmbridge.Consumer(bridge, run=RUN) as first:
        running = asyncio.create_task(env.env_manager())
        await until(lambda: take(first))
    away = time.monotonic()
    taken = len(sequences)
    await until(lambda: time.monotonic() - away > 4)
    assert not running.done()
    with shmbridge.Consumer(bridge, run=RUN) as second:
        await until(lambda: take(second) and len(sequences) >= taken + 100)
        await stopped(running)
        await until(lambda: second.stats()["lanes_live"] == 0)
        take(second)
        stats = second.stats()
        assert sequences == list(range(int(stats["records_total"])))
        assert (stats["held"], stats["dropped_total"]) == (0, 0)


async def test_a_bridge_removed_by_force_is_made_again_and_what_it_held_is_counted(
    attached: Callable[..., Any], bridge: str, script: ModuleType, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "shmbridge")
    env = attached()
    groups = [script.groups_of(10 * number, longest=1500) for number in range(1, 13)]
    with shmbridge.Consumer(bridge, run=RUN) as consumer:
        await env.register_env()
        await env.get_server_info()
        await env._send_scored_data_to_api(copy.deepcopy(groups[0]))
        consumer.get(5).release()
    sending = asyncio.create_task(env._send_scored_data_to_api(copy.deepcopy(groups[1:])))
    lane = next(lane for info in shmbridge.list_bridges() if info.name == bridge for lane in info.lanes)
    await until(lambda: held(bridge) > 2)
    steady = time.monotonic()
    await until(lambda: time.monotonic() - steady > 0.2)
    lost = held(bridge)
    assert 2 < lost < len(groups) - 1, "the lane is full, and some wait"
    remove_by_force(bridge)
    await env.get_status()
    said = [record.getMessage() for record in caplog.records]
    assert any(
        re.search(rf"lane {lane.producer_id} is lost.* held {lost} groups", message) for message in said
    )
    with shmbridge.Consumer(bridge, run=RUN) as consumer:
        await env.get_status()
        assert env.env_id == 0
        got = []

        def take() -> bool:
            for record in consumer.poll():
                with record:
                    assert record.meta.env_id == 0
                    got.append(record.to_scored_data()["tokens"])
            return len(got) == len(groups) - 1 - lost

        await until(take)
        await sending
        assert got == [group["tokens"] for group in groups[1 + lost :]]
        assert env.status_dict["env_weight"] == 1.0
        await env._send_scored_data_to_api(copy.deepcopy(groups[0]))
        await until(lambda: consumer.poll())
        await atropos.detach(env)
    assert (
        f"{len(groups) - lost + 1} groups delivered, not delivered: {lost} in a lane that was removed"
        in caplog.text
    )


def held(bridge: str) -> int:
    return sum(lane.held for info in shmbridge.list_bridges() if info.name == bridge for lane in info.lanes)


@pytest.mark.parametrize("again", [True, False], ids=["at once", "after a while without memory"])
async def test_groups_that_wait_for_room_in_a_removed_lane_go_into_the_next(
    bridge: str, monkeypatch: pytest.MonkeyPatch, again: bool
) -> None:
    """Each sending worker finds the lane removed; the first one opens the next lane, or, if that fails, the
    next request for status does.
    """
    with shmbridge.Consumer(bridge) as consumer:
        lane = EnvLane(LinkOptions(bridge, lane_bytes="64K"), "env")
        groups = [
            {"tokens": [[number] * 2000], "masks": [[number] * 2000], "scores": [1.0]} for number in range(12)
        ]
        sends = [asyncio.create_task(lane.send([group], [Stamp(-1, -1)])) for group in groups]
        await until(lambda: lane.records_total > 2)
        steady = time.monotonic()
        await until(lambda: time.monotonic() - steady > 0.2)
        lost = lane.records_total
        assert 2 < lost < len(groups) - 2, "the lane is full, and some wait"
        if not again:
            monkeypatch.setattr(lane, "_open", no_memory)
        [name] = lane_names(bridge)
        (MOUNT / name[1:]).unlink()
        if not again:
            await until(lambda: not lane.is_there)
            monkeypatch.undo()
            await until_true(lane.stay)
        got: list[int] = []
        while not {*range(lost, len(groups))} <= {*got}:
            for record in consumer.poll():
                with record:
                    got.append(int(record["tokens"][0][0]))
            await asyncio.sleep(0.01)
        await asyncio.gather(*sends)
        # a consumer that had looked into the lane before it was removed has its records, too
        assert sorted(got) in ([*range(lost, len(groups))], [*range(len(groups))])
        assert +lane.not_delivered == {"in a lane that was removed": lost}
        assert (lane.records_total, lane.unsent) == (len(groups) - lost, 0)
        await lane.close()


def no_memory() -> shmbridge.Producer:
    raise shmbridge.ShmTooSmall("no room on the mount")


async def until_true(asked: Callable[[], Any], timeout_s: float = 20.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not await asked():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)


async def test_a_lane_that_the_consumer_quarantined_is_replaced(
    attached: Callable[..., Any], bridge: str, script: ModuleType, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "shmbridge")
    env = attached()
    with shmbridge.Consumer(bridge, run=RUN) as consumer:
        await env.register_env()
        await env._send_scored_data_to_api(script.groups_of(10))
        consumer.get(5).release()
        [lane] = lane_names(bridge)
        np.frombuffer(memoryview(open_mapping(lane)), "<u8", 1, 0x200)[0] = 1 << 40  # its tail
        await until(lambda: consumer.poll() or consumer.stats()["lanes_quarantined"])
        for number in (20, 30):
            await env._send_scored_data_to_api(script.groups_of(number))
        await env.get_status()
        for number in (20, 30):
            with await consumer.get_async(5) as record:
                assert record.to_scored_data()["tokens"] == script.groups_of(number)["tokens"]
        assert env.env_id == record.meta.env_id + 1 == 1, "its old number goes with its old lane"
        await atropos.detach(env)
    assert "3 groups delivered, not delivered: none" in caplog.text


async def test_waiting_is_said_at_growing_intervals(
    attached: Callable[..., Any],
    bridge: str,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    caplog.set_level(logging.WARNING)
    monkeypatch.setattr(control_link, "time", SimpleNamespace(monotonic=lambda: 10 * time.monotonic()))
    env = attached()
    registering = asyncio.create_task(env.register_env())
    began = time.monotonic()
    await until(lambda: time.monotonic() - began > 2.5)  # 25 s on its clock
    said = [record.getMessage() for record in caplog.records if "still waiting after" in record.getMessage()]
    assert 2 <= len(said) <= 5, "25 s are 1, 2, 4, 8 and 16: not a line a second"
    assert not [record for record in caplog.records if "Waiting to register" in record.getMessage()]
    with shmbridge.Consumer(bridge, run=RUN):
        await asyncio.wait_for(registering, 3)  # at once, however long it has waited
        await atropos.detach(env)


# --- what ends one ----------------------------------------------------------------------------------------


async def test_an_environment_whose_every_group_is_refused_ends_and_says_why(
    attached: Callable[..., Any], bridge: str, script: ModuleType, caplog: pytest.LogCaptureFixture
) -> None:
    class Broken(script.SeededEnv):
        async def collect_trajectories(self, item: int) -> Any:
            return {**script.groups_of(10 * item), "advantages": [[math.nan]] * 4}, []

    env = attached(Broken)
    with shmbridge.Consumer(bridge, run=RUN) as consumer:
        running = asyncio.create_task(env.env_manager())
        await until(lambda: consumer.poll() or running.done())
        with pytest.raises(GroupsRefused, match=r"20 groups in a row .* column 'advantages' row 0"):
            await running
        assert consumer.stats()["dropped_total{invalid}"] >= 20
        assert consumer.stats()["records_total"] == 0


async def test_an_environment_is_not_ended_by_refusals_with_good_groups_or_other_reasons_in_between(
    attached: Callable[..., Any], bridge: str, script: ModuleType
) -> None:
    env = attached()
    good = script.groups_of(10)
    one, two = ({**good, name: [[math.inf]] * 4} for name in ("advantages", "distill_logprobs"))
    with shmbridge.Consumer(bridge, run=RUN) as consumer:
        await env.register_env()
        for pair in ((one, good), (one, two)):
            for _ in range(25):
                for group in pair:
                    await env._send_scored_data_to_api(dict(group))
                for record in consumer.poll():
                    record.release()
            await env.get_status()
        await atropos.detach(env)


def test_sigterm_ends_an_environment_that_waits_for_a_consumer(start_env: Callable[..., Any]) -> None:
    env = start_env()
    env.until(lambda: "no consumer answers" in env.output)
    assert env.end(signal.SIGTERM) == 143
    assert "Traceback" not in env.output


def test_the_second_sigterm_ends_at_once(bridge: str, start_env: Callable[..., Any], tmp_path: Path) -> None:
    patient = tmp_path / "patient.py"
    patient.write_text(
        "import runpy\nfrom shmbridge.producers.atropos import patches\n"
        "patches.FLUSH_WHEN_STOPPED_S = 1000\n"
        f"runpy.run_path({str(ENVS / 'seeded_env.py')!r}, run_name='__main__')\n"
    )
    with shmbridge.Consumer(bridge, run=RUN) as consumer:
        env = start_env("--env.tokens", "1000", script=str(patient), lane_bytes="128K")
        env.until(lambda: consumer.stats()["producer_wait_s"] > 0)
        env.send(signal.SIGTERM)
        until_no_more = time.monotonic() + 1
        env.until(lambda: time.monotonic() > until_no_more)
        assert env.end(signal.SIGTERM) == -signal.SIGTERM
