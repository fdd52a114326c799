"""Weights pushed to engines in one line, and around a rollout; what happens when an engine, the block, or the
pusher fails.

vLLM is played by a server with its routes and its rules of order; tests/adapters/vllm_live/test_sync.py has
the real one.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch

import shmbridge
from shmbridge.consumers.engines.engine import HALF_LOADED, EngineFailed
from shmbridge.consumers.engines.vllm import VllmHttp
from shmbridge.consumers.weight_sync import WeightSync
from shmbridge.weights import WeightsReader

ROOT = Path(__file__).parents[3]


class StandInVllm:
    """The routes of vLLM 0.32 that a pusher uses, with what vLLM refuses.

    Not vLLM: it loads nothing but a copy.
    """

    def __init__(self, *, can_sleep=False, active=False, engines=1):
        self.calls, self.version, self.tensors = [], "default", {}
        self.paused = self.asleep = False
        self.active, self.can_sleep, self.engines = active, can_sleep, engines
        self.failing = {}  # path -> what it answers
        self.resumed = threading.Event()

    def __call__(self, method, path, query, body):
        self.calls.append(path)
        if path in self.failing:
            return 500, {"error": {"message": self.failing[path]}}
        match method, path:
            case "POST", "/pause":
                assert query["mode"] in ("keep", "wait", "abort")
                self.paused = True
                return 200, {"status": "paused"}
            case "POST", "/resume":
                self.paused = False
                self.resumed.set()
                return 200, {"status": "resumed"}
            case "POST", "/start_weight_update":
                if self.active:
                    return 500, {
                        "error": {
                            "message": "start_weight_update called while a weight update is already active."
                        }
                    }
                self.active = True
                return 200, {}
            case "POST", "/update_weights":
                assert self.active
                assert self.paused
                info = body["update_info"]
                assert info.keys() == {"bridge", "version"}
                with WeightsReader(info["bridge"]) as reader, reader.lease() as lease:
                    assert lease.version == info["version"]
                    self.tensors = {name: array.copy() for name, array in lease.tensors.items()}
                return 200, {}
            case "POST", "/finish_weight_update":
                if not self.active:
                    return 500, {
                        "error": {
                            "message": "finish_weight_update called without a matching start_weight_update."
                        }
                    }
                self.active = False
                self.version = body["weight_version"] if body else self.version
                return 200, {}
            case "POST", "/reset_prefix_cache":
                assert query == {"reset_running_requests": "true"}
                return 200, {"success": True}
            case "GET", "/weight_info":
                return 200, {"weight_version": self.version}
            case "GET", "/get_world_size":
                return 200, {
                    "world_size": 2 * self.engines if query.get("include_dp", "true") == "true" else 2
                }
            case "POST", "/update_weight_version":
                self.version = body["new_version"]
                return 200, {}
            case "GET", "/server_info":
                assert query == {"config_format": "json"}
                return 200, {"vllm_config": {"model_config": {"enable_sleep_mode": self.can_sleep}}}
            case "GET", "/is_sleeping":
                return 200, {"is_sleeping": self.asleep}
            case "POST", "/sleep":
                assert query["level"] == "1"
                self.asleep = True
                return 200, {}
            case "POST", "/wake_up":
                self.asleep = False
                return 200, {}
            case "GET", "/health":
                return 200, ""
        return 404, {"detail": "Not Found"}


UPDATE = [
    "/pause",
    "/start_weight_update",
    "/update_weights",
    "/finish_weight_update",
    "/reset_prefix_cache",
    "/resume",
]


@pytest.fixture
def vllm():
    return StandInVllm()


@pytest.fixture
def model(tiny_model):
    return tiny_model(3)


def has_weights_of(stand_in, model):
    expected = dict(model.named_parameters())
    assert stand_in.tensors.keys() == expected.keys()
    for name, parameter in expected.items():
        np.testing.assert_array_equal(stand_in.tensors[name], parameter.detach().numpy(), err_msg=name)
    return True


def change(model):
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.5)


@pytest.mark.parametrize(("engines", "version"), [(1, "0"), (2, "unknown")])
def test_samples_are_of_no_version_where_one_of_several_engines_may_have_it(
    bridge, serving, model, engines, version
):
    vllm = StandInVllm(engines=engines)
    with WeightSync(bridge, serving(vllm)) as sync:
        sync.push(model)
        vllm.failing["/update_weights"] = "no room"
        with pytest.raises(EngineFailed, match="no room") as failed:
            sync.push(model)
        assert (vllm.version, vllm.paused) == (version, False)
        assert ("2 data-parallel engines" in str(failed.value)) == (engines == 2)
        assert ("/reset_prefix_cache" in vllm.calls[-3:]) == (engines == 2)
        vllm.failing, vllm.active = {}, False
        assert (sync.push(model), vllm.version) == (2, "2")


def test_a_load_that_could_not_be_undone_leaves_samples_of_no_version(bridge, serving, vllm, model):
    with WeightSync(bridge, serving(vllm)) as sync:
        sync.push(model)
        vllm.failing["/update_weights"] = f"no room; {HALF_LOADED}"
        with pytest.raises(EngineFailed, match="of two versions: samples are of version 'unknown'"):
            sync.push(model)
        assert (vllm.version, vllm.paused) == ("unknown", False)


@pytest.mark.parametrize("silent", [True, False], ids=["silent", "cut"])
@pytest.mark.parametrize("path", ["/update_weights", "/finish_weight_update"])
def test_a_load_without_an_answer_leaves_samples_of_no_version(bridge, serving, vllm, model, path, silent):
    """The server goes on with the load after its caller has given up."""
    over = threading.Event()

    def answer(method, asked, query, body):
        said = vllm(method, asked, query, body)
        if asked == path and vllm.calls.count(path) == 2:
            if not silent:
                raise ConnectionAbortedError("cut")
            assert over.wait(30)
        return said

    with WeightSync(bridge, serving(answer)) as sync:
        sync.push(model)
        sync._timeout_s = 0.5 if silent else 30.0
        with pytest.raises(EngineFailed, match=rf"{path}.*taken it: samples are of version 'unknown'"):
            sync.push(model)
        over.set()
        assert (vllm.version, vllm.paused) == ("unknown", False)
        sync._timeout_s = 30.0
        assert (sync.push(model), vllm.version) == (2, "2")


def test_an_interrupted_load_leaves_samples_of_no_version(bridge, serving, vllm, model, monkeypatch):
    call = VllmHttp.call

    def interrupted(self, name, *given, **options):
        if name == "update_weights":
            raise KeyboardInterrupt
        return call(self, name, *given, **options)

    with WeightSync(bridge, serving(vllm)) as sync:
        sync.push(model)
        with monkeypatch.context() as patch:
            patch.setattr(VllmHttp, "call", interrupted)
            with pytest.raises(KeyboardInterrupt):
                sync.push(model)
        assert (vllm.version, vllm.paused) == ("unknown", False)
        assert (sync.push(model), vllm.version) == (2, "2")


@pytest.mark.parametrize("pause", ["keep", "wait", "abort"])
def test_a_push_has_the_engine_at_a_new_version_and_in_vllms_order(bridge, serving, vllm, model, pause):
    with WeightSync(bridge, serving(vllm), pause=pause) as sync:
        assert sync.version is None
        assert sync.push(model) == 0
        assert has_weights_of(vllm, model)
        assert vllm.calls[-6:] == UPDATE
        change(model)
        assert sync.push(model) == 1
        assert has_weights_of(vllm, model)
        assert sync.push(model, version=7) == 7 == sync.version
        with pytest.raises(ValueError, match="not after 7"):
            sync.push(model, version=7)
    assert (vllm.version, vllm.paused, vllm.active) == ("7", False, False)
    with WeightSync(bridge, serving(vllm)) as successor:
        assert successor.push(model) == 8


def test_names_and_arrays_will_do_for_a_model(bridge, serving, vllm):
    with WeightSync(bridge, serving(vllm)) as sync:
        sync.push([("a", np.arange(3, dtype=np.float32)), ("b", torch.ones(2))])
        sync.push({"a": np.zeros(3, np.float32), "b": torch.zeros(2)})
    assert vllm.tensors["a"].tolist() == [0.0, 0.0, 0.0]


def test_an_update_that_a_killed_pusher_left_active_is_ended_first(bridge, serving, vllm, model):
    vllm.active = True
    with WeightSync(bridge, serving(vllm)) as sync:
        sync.push(model)
    assert vllm.version == "0"
    assert vllm.calls[-8:-5] == ["/pause", "/start_weight_update", "/finish_weight_update"]


@pytest.mark.parametrize("path", UPDATE[1:5])
def test_a_failure_in_the_middle_is_said_with_the_address_and_nothing_stays_paused(
    bridge, serving, vllm, model, path
):
    url = serving(vllm)
    with WeightSync(bridge, url) as sync:
        sync.push(model)
        vllm.failing[path] = "a worker is out of memory"
        with pytest.raises(EngineFailed, match=rf"{url}: {path}\S* answered 500: a worker is out of memory"):
            sync.push(model)
        assert not vllm.paused
        vllm.failing.clear()
        assert sync.push(model) == 2
    assert vllm.version == "2"


@pytest.mark.parametrize("path", UPDATE[1:5])
def test_a_vllm_that_can_pause_and_lacks_what_comes_next_does_not_stay_paused(
    bridge, serving, vllm, model, path
):
    """One that is older, or was started without a weight transfer config."""

    def older(method, asked, query, body):
        return (404, {"detail": "Not Found"}) if asked == path else vllm(method, asked, query, body)

    url = serving(older)
    with (
        WeightSync(bridge, url) as sync,
        pytest.raises(EngineFailed, match=rf"{url} has no route {path}.*VLLM_SERVER_DEV_MODE=1"),
    ):
        sync.push(model)
    assert (vllm.paused, vllm.calls[-1]) == (False, "/resume")


def test_a_cache_that_stays_is_a_failure(bridge, serving, vllm, model):
    def held(method, path, query, body):
        return (200, {"success": False}) if path == "/reset_prefix_cache" else vllm(method, path, query, body)

    with (
        WeightSync(bridge, serving(held)) as sync,
        pytest.raises(EngineFailed, match="prefix cache is still that of an earlier one"),
    ):
        sync.push(model)
    assert not vllm.paused


def test_a_server_without_the_routes_is_told_how_to_start(bridge, serving, model):
    url = serving(lambda method, path, query, body: (404, {"detail": "Not Found"}))
    with WeightSync(bridge, url) as sync, pytest.raises(EngineFailed, match="VLLM_SERVER_DEV_MODE=1"):
        sync.push(model)
    with (
        WeightSync(bridge, VllmHttp(url)) as sync,
        pytest.raises(EngineFailed, match=r"no route /pause.*VLLM_SERVER_DEV_MODE=1"),
    ):
        sync.push(model)


def test_the_other_engines_are_at_the_version_when_one_fails(bridge, serving, model):
    left, right = StandInVllm(), StandInVllm()
    with (
        socket_without_listener() as nobody,
        WeightSync(bridge, [serving(left), nobody, serving(right)]) as sync,
    ):
        said = rf"1 of 3 engines are not at version 0: {nobody}: no server listens there"
        with pytest.raises(EngineFailed, match=said):
            sync.push(model)
    assert (left.version, right.version) == ("0", "0")
    assert has_weights_of(left, model)


class socket_without_listener:
    """An address at which no server will listen during the test."""

    def __enter__(self):
        import socket

        self.taken = socket.socket()
        self.taken.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{self.taken.getsockname()[1]}"

    def __exit__(self, *_):
        self.taken.close()


def test_an_object_that_is_no_engine_is_refused(bridge):
    with pytest.raises(EngineFailed, match="is not an engine"):
        WeightSync(bridge, "127.0.0.1:8000")
    with pytest.raises(ValueError, match="none of keep, wait, abort"):
        WeightSync(bridge, "http://127.0.0.1:1", pause="stop")
    with shmbridge.weights.WeightsWriter(bridge):  # and nothing was left open
        pass


# --- around a rollout ---------------------------------------------------------------------------------------


def test_the_engine_is_awake_with_the_weights_inside_the_block_and_asleep_afterwards(bridge, serving, model):
    vllm = StandInVllm(can_sleep=True)
    url = serving(vllm)
    with WeightSync(bridge, url) as sync:
        for version in range(3):
            change(model)
            with sync.updated(model) as engine:
                assert engine == url
                assert (vllm.asleep, vllm.version, vllm.paused) == (False, str(version), False)
                assert has_weights_of(vllm, model)
            assert vllm.asleep


def test_an_engine_that_cannot_sleep_stays_awake(bridge, serving, vllm, model):
    with WeightSync(bridge, serving(vllm)) as sync:
        with sync.updated(model):
            assert vllm.version == "0"
        assert "/sleep" not in vllm.calls


def test_a_block_that_raises_gives_the_memory_back_and_its_error_comes_through(bridge, serving, model):
    vllm = StandInVllm(can_sleep=True)
    with WeightSync(bridge, serving(vllm)) as sync:
        with pytest.raises(KeyError, match="mine"), sync.updated(model):
            raise KeyError("mine")
        assert vllm.asleep
        with sync.updated(model):
            assert not vllm.asleep
        vllm.failing["/sleep"] = "no memory to move it to"
        with pytest.raises(KeyError, match="mine") as raised, sync.updated(model):
            raise KeyError("mine")
        assert "no memory to move it to" in raised.value.__notes__[0]
        with pytest.raises(EngineFailed, match="no memory to move it to"), sync.updated(model):
            pass


def test_a_block_is_not_entered_when_the_update_fails_and_the_engine_sleeps(bridge, serving, model):
    vllm = StandInVllm(can_sleep=True)
    vllm.failing["/update_weights"] = "broken"
    with WeightSync(bridge, serving(vllm)) as sync:
        with pytest.raises(EngineFailed, match="broken"), sync.updated(model):
            pytest.fail("entered")
        assert (vllm.asleep, vllm.paused) == (True, False)


async def test_weight_sync_works_from_an_event_loop(bridge, serving, model):
    vllm = StandInVllm(can_sleep=True)
    with WeightSync(bridge, serving(vllm)) as sync:
        turns = 0

        async def turn():
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        turning = asyncio.create_task(turn())
        assert await sync.push_async(model) == 0
        assert turns > 10  # the loop went on
        async with sync.updated_async(model):
            assert (vllm.version, vllm.asleep) == ("1", False)
        assert vllm.asleep
        with pytest.raises(KeyError):
            async with sync.updated_async(model):
                raise KeyError
        assert vllm.asleep
        turning.cancel()


# --- a pusher that dies -------------------------------------------------------------------------------------

PUSHER = """
import os, sys, time
import numpy as np
from shmbridge.consumers.weight_sync import WeightSync

bridge, url, forks = sys.argv[1:]
with WeightSync(bridge, url) as sync:
    sync.push({"a": np.zeros(4)})
    child = os.fork() if forks == "forks" else 0  # one that holds the pipe to the guard, and lives
    if forks == "forks" and child == 0:
        os.setsid()
        time.sleep(60)
        os._exit(0)
    print(child, flush=True)
    sync.push({"a": np.ones(4)})
    print("done", flush=True)
"""


@pytest.mark.parametrize("forks", ["alone", "forks"])
@pytest.mark.parametrize("at", UPDATE)
def test_an_update_that_a_killed_pusher_left_is_ended(bridge, serving, vllm, at, forks):
    """The kill comes while the server is at a route, which it finishes afterwards, as servers do."""
    arrived, killed, ended = threading.Event(), threading.Event(), []

    def hangs(method, path, query, body):
        if path == at and vllm.calls.count("/resume") and not arrived.is_set():  # of the second push
            arrived.set()
            assert killed.wait(30)
        said = vllm(method, path, query, body)
        ended.append(path)
        return said

    command = [sys.executable, "-c", PUSHER, bridge, serving(hangs), forks]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    with (
        WeightsReader(bridge),
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as pusher,
    ):
        sleeper = int(pusher.stdout.readline())
        try:
            assert arrived.wait(30)
            vllm.resumed.clear()
            pusher.kill()
            pusher.wait()
            killed.set()
            assert vllm.resumed.wait(20)
        finally:
            if sleeper:
                os.kill(sleeper, signal.SIGKILL)
        # Wait for every resume on behalf of the killed pusher: a late one would end its successor's pause.
        until(lambda: ended.count("/resume") == 2 + (at == "/resume"))
        assert not vllm.paused
        loaded = UPDATE.index(at) >= 2  # the segment had the version, and the server was told
        until(lambda: vllm.version == ("1" if loaded else "0"))
        assert vllm.tensors["a"].tolist() == [1.0 if loaded else 0.0] * 4
        assert not loaded or "/reset_prefix_cache" in vllm.calls[vllm.calls.index("/resume") :]
        with WeightSync(bridge, serving(vllm)) as successor:
            assert successor.push({"a": np.full(4, 2.0)}) == 2
        assert (vllm.version, vllm.paused, vllm.active) == ("2", False, False)


def test_the_first_pause_of_a_pusher_is_guarded_too(bridge, serving, vllm):
    paused, killed = threading.Event(), threading.Event()

    def hangs(method, path, query, body):
        said = vllm(method, path, query, body)
        if path == "/pause" and not paused.is_set():
            paused.set()
            assert killed.wait(30)
        return said

    command = [sys.executable, "-c", PUSHER, bridge, serving(hangs), "alone"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, env=os.environ | {"PYTHONPATH": str(ROOT)}
    ) as pusher:
        assert paused.wait(30)
        pusher.kill()
    killed.set()
    assert vllm.resumed.wait(20)
    assert not vllm.paused


def until(condition, within_s=10.0):
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize("path", ["/policy_version", "/health"])
def test_a_server_that_refused_a_version_for_good_is_not_waited_for(bridge, serving, model, path):
    said = {"last_error": "tensor 'w' is of another model"}

    def answer(method, asked, query, body):
        if asked != path:
            return 404, ""
        return 200, {"version" if path == "/policy_version" else "weight_version": 0, **said}

    with WeightSync(bridge, serving(answer), timeout_s=600) as sync:
        assert sync.push(model, version=0) == 0
        said["refused_version"] = 1
        with pytest.raises(EngineFailed, match="at version 0, and refused 1: tensor 'w' is of another model"):
            sync.push(model, version=1)
    with (
        WeightSync(bridge, serving(answer), timeout_s=0.1) as sync,
        pytest.raises(EngineFailed, match="at version 0, not 2, after"),
    ):
        sync.push(model, version=2)


def test_a_follower_that_is_slow_to_say_so_is_not_taken_for_one_to_push_to(
    bridge, serving, vllm, model, monkeypatch
):
    looking = "shmbridge.consumers.engines.fleet._REQUEST_TIMEOUT_S"
    monkeypatch.setattr(looking, 0.2)
    given_up = threading.Event()

    def answer(method, path, query, body):
        if path != "/policy_version":
            return vllm(method, path, query, body)
        assert given_up.wait(30)
        return 200, {"version": 0}

    with WeightSync(bridge, serving(answer)) as sync:
        with pytest.raises(EngineFailed, match="no answer to /policy_version"):
            sync.push(model, version=0)
        assert vllm.calls == [], "nothing was paused"
        given_up.set()
        monkeypatch.setattr(looking, 30.0)
        with pytest.raises(EngineFailed, match="not 1"):
            sync._timeout_s = 0.1
            sync.push(model, version=1)
    assert vllm.calls == []


def test_a_version_is_announced_once_all_engines_have_it(bridge, serving, vllm, model):
    announced = []

    def announce(version):
        announced.append((version, vllm.version, vllm.paused))

    with WeightSync(bridge, serving(vllm), announce=announce) as sync:
        assert sync.push(model) == 0
        assert sync.push(model, version=7) == 7
        assert asyncio.run(sync.push_async(model)) == 8
        with sync.updated(model):
            assert announced[-1][0] == 9
    assert announced == [(0, "0", False), (7, "7", False), (8, "8", False), (9, "9", False)]


def test_a_version_that_an_engine_refused_is_not_announced(bridge, serving, vllm, model):
    announced, whole = [], StandInVllm()
    with WeightSync(bridge, [serving(whole), serving(vllm)], announce=announced.append) as sync:
        vllm.failing["/update_weights"] = "no room"
        with pytest.raises(EngineFailed, match="no room"):
            sync.push(model)
        assert (whole.version, announced) == ("0", [])
        vllm.failing, vllm.active = {}, False
        assert (sync.push(model), announced) == (1, [1])
        with pytest.raises(ValueError):
            sync.push(model, version=1)  # was not written
        assert announced == [1]


def test_announced_versions_are_the_consumers(bridge, serving, vllm, model):
    with shmbridge.Consumer(bridge) as consumer:
        with WeightSync(bridge, serving(vllm), announce=consumer.publish_policy_version) as sync:
            sync.push(model, version=5)
            assert consumer.policy_version == 5
            consumer.publish_policy_version(9)
            with pytest.raises(ValueError):
                sync.push(model, version=6)  # the engines have it; the consumer is further
            assert (vllm.version, consumer.policy_version) == ("6", 9)
            assert sync.push(model) == 10  # a version names one set of weights, whoever published it
        assert (vllm.version, consumer.policy_version) == ("10", 10)
    with pytest.raises(TypeError, match=r"announce=consumer\.publish_policy_version"):
        WeightSync(bridge, serving(vllm), announce=5)
