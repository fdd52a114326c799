"""NeMo Gym's tokens through a bridge: what its `TokenSink` and `TokenSource` promise, over deaths too."""

import asyncio
import os
import random
import signal
import sys
from contextlib import asynccontextmanager

import pytest

import shmbridge
from shmbridge.errors import BadArgument
from shmbridge.producers.nemo_gym import CaptureRefused, ShmTokenSink, ShmTokenSource
from tests.environments.sinks.conftest import only


def entry(kind: type, rollout: str, call: str, size: int = 5, **more):
    chance = random.Random(f"{rollout} {call}")
    prompt, sampled = ([chance.randrange(50_000) for _ in range(size)] for _ in range(2))
    return kind(
        rollout_id=rollout, model_call_id=call, prompt_token_ids=prompt, generation_token_ids=sampled,
        generation_log_probs=[-chance.random() for _ in sampled], model="m", created_at=chance.random(),
        output_items=[{"type": "message", "content": "\u00e9" * size}], token_item_index=0, **more,
    )  # fmt: skip


@asynccontextmanager
async def ends(bridge, folder, **sink_options):
    sink = ShmTokenSink(bridge, folder, lane_bytes="4M", **sink_options)
    source = ShmTokenSource(bridge, folder, timeout_s=2)
    try:
        yield sink, source
    finally:
        await sink.close()
        await source.close()


def calls(snapshot) -> dict:
    return {each.model_call_id: each.model_dump(mode="json") for each in snapshot.entries}


async def test_a_rollout_comes_back_as_it_was_put(bridge, tmp_path, nemo_gym):
    """Floats to the last bit; other rollouts' calls are left alone; frozen and dropped once and for all."""
    put = [entry(nemo_gym, "r-1", f"c{n}", size=n + 1) for n in range(8)]
    put.append(entry(nemo_gym, "r-1", "routes", routed_experts=[[[1, 2]], [[3, 4]]]))
    async with ends(bridge, tmp_path) as (sink, source):
        await sink.begin_call("r-1", "c0")
        await asyncio.gather(*map(sink.put, put), sink.put(entry(nemo_gym, "r-2", "c0")))
        await sink.put(put[3])  # the same again
        for _ in range(3):
            await sink.put(entry(nemo_gym, "r-3", "c0"))
        assert await source.forget("r-3", "not wanted") == 1  # stored once
        snapshot = await source.freeze("r-1")
        assert calls(snapshot) == {each.model_call_id: each.model_dump(mode="json") for each in put}
        assert (snapshot.rollout_id, snapshot.incomplete) == ("r-1", False)
        assert await source.freeze("r-1") == snapshot
        with pytest.raises(CaptureRefused, match=r"r-1.*frozen"):
            await sink.put(entry(nemo_gym, "r-1", "late"))
        with pytest.raises(CaptureRefused):
            await sink.begin_call("r-1", "late")
        known = {"snapshot_id": snapshot.snapshot_id, "version": snapshot.version}
        assert not await source.drop("r-1", **known | {"version": snapshot.version + 1})
        assert not await source.drop("r-1", **known | {"snapshot_id": "other"})
        assert await source.drop("r-1", **known)
        with pytest.raises(CaptureRefused):
            await source.freeze("r-1")
        assert len((await source.freeze("r-2")).entries) == 1
        assert await source.sweep(3600) == 0
        assert await source.sweep(0) == 2
    with shmbridge.Consumer(bridge) as consumer, consumer.get(timeout_s=1) as record:
        assert record["instance_id"] == ["r-2"]
        assert record.meta.split == "eval"
        assert not consumer.poll()


async def test_a_hole_is_there_for_good(bridge, tmp_path, nemo_gym):
    async with ends(bridge, tmp_path) as (sink, source):
        for rollout in ("marked", "begun", "changed", "after"):
            await sink.put(entry(nemo_gym, rollout, "c0"))
        await sink.mark_incomplete("marked", "c1")
        await sink.begin_call("begun", "c1")
        with pytest.raises(CaptureRefused, match=r"c0.*other content"):
            await sink.put(entry(nemo_gym, "changed", "c0", size=6))
        for rollout in ("marked", "begun", "changed"):
            snapshot = await source.freeze(rollout)
            assert snapshot.incomplete, rollout
            assert len(snapshot.entries) == 1
        before = await source.freeze("after")
        assert not before.incomplete
        await sink.mark_incomplete("after")
        known = {"snapshot_id": before.snapshot_id, "version": before.version}
        assert not await source.drop("after", **known)
        assert (await source.freeze("after")).incomplete
        assert await source.forget("after") == 1
        assert source.forgotten == {"masked": 1}
        with pytest.raises(BadArgument, match="rollout id"):
            await sink.put(entry(nemo_gym, "../outside", "c0"))


PUTS = """
import asyncio, sys
sys.path[:0] = {path!r}
from shmbridge.producers.nemo_gym import ShmTokenSink
from tests.environments.sinks.conftest import TokenEntry
from tests.environments.sinks.test_nemo_gym import entry
async def main():
    sink = ShmTokenSink({bridge!r}, {folder!r}, lane_bytes="8M")
    for n in range(100_000):
        await sink.begin_call("r", str(n))
        await sink.put(entry(TokenEntry, "r", str(n), size=50))
        print(n, flush=True)
asyncio.run(main())
"""


@pytest.mark.parametrize("seed", range(4))
async def test_a_killed_model_server_loses_no_call_that_it_stored(bridge, tmp_path, nemo_gym, seed):
    """kill -9 at any moment: all that `put` has returned for is there, whole; one begun is a hole."""
    code = PUTS.format(path=sys.path, bridge=bridge, folder=str(tmp_path))
    child = await asyncio.create_subprocess_exec(sys.executable, "-c", code, stdout=asyncio.subprocess.PIPE)
    stored = -1
    while stored < 20 + 7 * seed:
        stored = int(await child.stdout.readline())
    child.send_signal(signal.SIGKILL)
    await child.wait()
    stored = max([stored, *map(int, (await child.stdout.read()).split())])
    source = ShmTokenSource(bridge, tmp_path)
    try:
        snapshot = await source.freeze("r")
        found = calls(snapshot)
        assert [str(n) for n in range(stored + 1)] == sorted(found, key=int)[: stored + 1]
        assert len(found) <= stored + 2
        for call, fields in found.items():
            assert fields == entry(nemo_gym, "r", call, size=50).model_dump(mode="json")
    finally:
        await source.close()


FREEZES = """
import asyncio, os, signal, sys
sys.path[:0] = {path!r}
import tests.environments.sinks.conftest as fake
from types import ModuleType
package = "nemo_gym.token_id_capture"
for name in ("nemo_gym", package, package + ".protocols", package + ".records"):
    sys.modules[name] = ModuleType(name)
sys.modules[package + ".protocols"].TokenCaptureSnapshot = fake.TokenCaptureSnapshot
sys.modules[package + ".records"].TokenEntry = fake.TokenEntry
from shmbridge.producers.nemo_gym import ShmTokenSource
async def main():
    source = ShmTokenSource({bridge!r}, {folder!r})
    print((await source.freeze("r")).snapshot_id, flush=True)
    await asyncio.sleep(100)
asyncio.run(main())
"""


async def test_a_killed_trainer_finds_all_again(bridge, tmp_path, nemo_gym):
    sink = ShmTokenSink(bridge, tmp_path, lane_bytes="4M")
    put = [entry(nemo_gym, "r", str(n)) for n in range(5)]
    for each in put:
        await sink.put(each)
    code = FREEZES.format(path=sys.path, bridge=bridge, folder=str(tmp_path))
    child = await asyncio.create_subprocess_exec(sys.executable, "-c", code, stdout=asyncio.subprocess.PIPE)
    first = (await child.stdout.readline()).decode().strip()
    child.send_signal(signal.SIGKILL)
    await child.wait()
    source = ShmTokenSource(bridge, tmp_path)
    try:
        snapshot = await source.freeze("r")
        assert (snapshot.snapshot_id, snapshot.incomplete) == (first, False)
        assert calls(snapshot) == {each.model_call_id: each.model_dump(mode="json") for each in put}
        assert await source.drop("r", snapshot_id=first, version=snapshot.version)
    finally:
        await source.close()
        await sink.close()


async def test_a_full_lane_refuses_a_call_and_holds_up_nobody(bridge, tmp_path, nemo_gym):
    """A `put` waits for room with its rollout locked; the source can freeze and drop another meanwhile."""
    async with ends(bridge, tmp_path, timeout_s=1.0) as (sink, source):
        stored = 0
        with pytest.raises(shmbridge.LaneFull):
            for stored in range(1000):
                await sink.put(entry(nemo_gym, f"r{stored % 2}", str(stored), size=20_000))
        full = f"r{stored % 2}"
        await sink.mark_incomplete(full, str(stored))
        assert (await source.freeze(full)).incomplete
        waiting = asyncio.create_task(sink.put(entry(nemo_gym, "r3", "c", size=20_000)))
        snapshot = await source.freeze(f"r{(stored + 1) % 2}")
        assert not snapshot.incomplete
        known = {"snapshot_id": snapshot.snapshot_id, "version": snapshot.version}
        assert await source.drop(snapshot.rollout_id, **known)
        await waiting
        assert len((await source.freeze("r3")).entries) == 1


async def test_nemo_gym_itself_builds_from_it_what_it_builds_from_its_store(bridge, tmp_path, monkeypatch):
    """Its configuration makes the sink, its middleware's context fills it, its builder reads the source."""
    only(monkeypatch, "nemo_gym", "SHMBRIDGE_NEMO_GYM")
    from nemo_gym.token_id_capture import TokenSource, trajectories_from_source
    from nemo_gym.token_id_capture.config import token_id_capture_config
    from nemo_gym.token_id_capture.sink import (
        CaptureContext,
        capture_tokens,
        register_call_intent,
        reset_token_sink,
        set_token_sink,
    )
    from nemo_gym.token_id_capture.store import TokenCaptureStore

    block = {
        "enabled": True,
        "sink": "shmbridge.producers.nemo_gym:ShmTokenSink",
        "sink_kwargs": {"bridge": bridge, "folder": str(tmp_path / "ours"), "lane_bytes": "4M"},
    }
    if sys.version_info >= (3, 12):
        sink = token_id_capture_config({"token_id_capture": block}).build_sink()
    else:  # its check of the sink wants Python 3.12
        sink = ShmTokenSink(**block["sink_kwargs"])
    source, store = ShmTokenSource(bridge, tmp_path / "ours"), TokenCaptureStore(tmp_path / "theirs")
    assert isinstance(source, TokenSource)
    try:
        for end in (sink, store):
            for rollout, last in (("whole", True), ("short", False)):
                prompt = [1, 2, 3]
                for turn in range(4):
                    said = [10 + turn, 20 + turn]
                    context = CaptureContext(rollout, f"c{turn}", end, "m")
                    token = set_token_sink(context)
                    await register_call_intent()
                    message = {"role": "assistant", "content": str(turn), "prompt_token_ids": prompt}
                    message |= {"generation_token_ids": said, "generation_log_probs": [-0.1, -1 / 3]}
                    if last or turn < 3:
                        await capture_tokens({"model": "m", "choices": [{"message": message}]})
                        assert context.committed
                    reset_token_sink(token)
                    prompt = [*prompt, *said, 99]
        for rollout, masked in (("whole", False), ("short", True)):
            ours, theirs = [await trajectories_from_source(rollout, each) for each in (source, store)]
            assert ours["mask_sample"] is theirs["mask_sample"] is masked
            assert ours["rebuilt_response"]["output"] == theirs["rebuilt_response"]["output"]
            assert ours["metrics"] == theirs["metrics"]
            assert await source.drop(rollout, **ours["_capture_snapshot"])
    finally:
        await sink.close()
        await source.close()
    assert os.listdir(tmp_path / "ours")
