"""Weights pushed to SGLang: a stand-in for the server checks each request against what SGLang's sources take,
and does what they do.

It is not SGLang, which needs a GPU: it loads the file with safetensors, and knows the fields, their types,
the order of calls, and what ends SGLang's scheduler. Read of the sources of 0.5.6 to 0.5.23: the routes of
entrypoints/http_server.py, the requests of managers/io_struct.py, tokenizer_manager.py, and the schedulers'
weight updates, flush_cache and is_fully_idle. The table below is compared with SGLang's own definitions in
test_sglang_agrees.py.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from shmbridge.consumers.engines.engine import EngineFailed
from shmbridge.consumers.weight_sync import WeightSync

# The fields of each request's body, and their types; older ones ignore what they do not know
FIELDS = {
    "/pause_generation": {"mode": str},
    "/update_weight_version": {"new_version": str, "abort_all_requests": bool},
    "/continue_generation": {"torch_empty_cache": bool},
    "/update_weights_from_disk": {
        "model_path": str,
        "load_format": str,
        "abort_all_requests": bool,
        "weight_version": str,
        "is_async": bool,
        "torch_empty_cache": bool,
        "keep_pause": bool,
        "recapture_cuda_graph": bool,
        "token_step": int,
        "flush_cache": bool,
        "manifest": dict,
    },
    "/release_memory_occupation": {"tags": list},
    "/resume_memory_occupation": {"tags": list},
}


class StandInSglang:
    """The routes. Not SGLang."""

    def __init__(self, *, memory_saver=False, package="0.5.23"):
        self.calls, self.version, self.tensors, self.paused = [], "default", {}, None
        self.asleep, self.memory_saver, self.refuses, self.package = False, memory_saver, "", package
        self.waiting = 0  # requests in flight
        self.dead = ""  # why its scheduler ended

    def __call__(self, method, path, query, body):
        self.calls.append(path)
        if self.dead:
            return 503, ""
        if method == "GET":
            known = {
                "/model_info": {"model_path": "/some/model", "weight_version": self.version},
                "/server_info": {"enable_memory_saver": self.memory_saver, "version": self.package},
            }
            return (200, known[path]) if path in known else (404, {"detail": "Not Found"})
        if path not in FIELDS:
            return 404, {"detail": "Not Found"}
        assert {name: type(value) for name, value in body.items()}.items() <= FIELDS[path].items()
        return getattr(self, path[1:])(**body)

    def pause_generation(self, mode="abort"):
        assert mode in ("abort", "retract", "in_place")
        self.paused = mode
        if mode == "abort":
            self.waiting = 0
        return 200, {"message": "Generation paused successfully.", "status": "ok"}

    def continue_generation(self, **_):
        self.paused = None
        return 200, {"message": "Generation continued successfully.", "status": "ok"}

    def update_weights_from_disk(
        self, model_path, load_format=None, weight_version=None, flush_cache=True, **_
    ):
        if self.refuses:
            return 400, {"success": False, "message": self.refuses, "num_paused_requests": 0}
        assert flush_cache
        assert load_format in ("auto", "safetensors", None)
        if self.asleep:
            return self.dies("weights are loaded into memory that is not there")
        if self.paused is None:
            self.waiting = 0  # they end first
        if self.waiting and tuple(map(int, self.package.split(".")[:3])) < (0, 5, 21):
            return self.dies("AssertionError: Cache flush failed after updating weights")
        (file,) = Path(model_path).glob("*.safetensors")
        self.tensors = {name: tensor.clone() for name, tensor in load_file(file).items()}
        self.version = weight_version or self.version
        return 200, {
            "success": True,
            "message": "Succeeded to update model weights.",
            "num_paused_requests": 0,
        }

    def update_weight_version(self, new_version, abort_all_requests=True):
        if abort_all_requests:
            self.waiting = 0
        self.version = new_version
        return 200, {
            "success": True,
            "message": f"Weight version updated to {new_version}",
            "new_version": new_version,
        }

    def release_memory_occupation(self, **_):
        if self.waiting and self.paused != "retract":
            return self.dies(
                "AssertionError: release_memory_occupation should be called only when server is idle."
            )
        self.asleep = True
        return 200, "null"

    def resume_memory_occupation(self, **_):
        if not self.asleep:
            return self.dies("KeyError: 'kv_cache'")
        self.asleep = False
        return 200, "null"

    def dies(self, why):
        self.dead = why
        return 500, "Internal Server Error"

    def started_again(self):
        self.version, self.tensors, self.paused, self.asleep, self.waiting, self.dead = (
            "default",
            {},
            None,
            False,
            0,
            "",
        )


@pytest.fixture
def sglang():
    return StandInSglang()


def copies(bridge):
    return list(Path("/dev/shm").glob(f"shmbridge.{bridge}.e.*"))


PUSHED = ["/pause_generation", "/update_weights_from_disk", "/continue_generation"]


@pytest.mark.parametrize(("pause", "calls"), [("keep", PUSHED), ("abort", PUSHED), ("wait", PUSHED[1:2])])
def test_a_push_gives_a_path_in_memory_with_the_models_bits(
    bridge, serving, sglang, tiny_model, pause, calls
):
    model = tiny_model(3).to(torch.bfloat16)
    with WeightSync(bridge, serving(sglang), pause=pause) as sync:
        for version in range(2):
            sglang.calls.clear()
            with torch.no_grad():
                model.lm_head.weight.add_(1.0)
            assert sync.push(model) == version
            assert sglang.calls[-len(calls) :] == calls
            assert (sglang.version, sglang.paused) == (str(version), None)
            expected = dict(model.named_parameters())
            assert sglang.tensors.keys() == expected.keys()
            for name, tensor in sglang.tensors.items():
                assert torch.equal(tensor, expected[name]), name
            assert len(copies(bridge)) == 1  # the one before is gone
    assert copies(bridge) == []


def test_a_refusal_is_said_and_generation_continues(bridge, serving, sglang, tiny_model):
    url = serving(sglang)
    sglang.refuses = "Failed to get weights iterator: no such tensor"
    with WeightSync(bridge, url) as sync:
        with pytest.raises(EngineFailed, match=f"{url}.*400: Failed to get weights iterator: no such tensor"):
            sync.push(tiny_model(1))
        assert sglang.paused is None
        sglang.refuses = ""
        assert sync.push(tiny_model(1)) == 1


def test_files_that_a_killed_pusher_left_go_with_the_next_one(bridge, serving, sglang):
    url = serving(sglang)
    with WeightSync(bridge, url) as sync:
        sync.push({"a": np.ones(3, np.float16), "b": np.ones((2, 2), np.int8), "c": np.zeros(())})
        assert sglang.tensors["a"].dtype == torch.float16
        assert sglang.tensors["c"].shape == ()
        (left,) = copies(bridge)
        kept = left.with_name(left.name.rsplit(".", 1)[0] + ".left")
        left.rename(kept)
    kept.mkdir(exist_ok=True)
    with WeightSync(bridge, url) as sync:
        sync.push({"a": np.ones(3, np.float16)})
        assert not kept.exists()


def test_the_memory_of_sglang_is_given_back_where_it_can(bridge, serving, tiny_model):
    sglang = StandInSglang(memory_saver=True)
    with WeightSync(bridge, serving(sglang)) as sync:
        for _ in range(2):
            with sync.updated(tiny_model(1)):
                assert not sglang.asleep
            assert sglang.asleep
    sglang = StandInSglang()
    with WeightSync(f"{bridge}", serving(sglang)) as sync:
        with sync.updated(tiny_model(1)):
            pass
        assert not sglang.asleep


@pytest.mark.parametrize("package", ["0.5.6.post2", "0.5.10.post1", "0.5.20", "0.4.9.post6"])
def test_requests_are_not_kept_by_an_sglang_whose_scheduler_would_end_of_it(
    bridge, serving, tiny_model, package
):
    """Up to 0.5.20 it wants an empty queue for the cache to be flushed, after requests went back into that
    queue.
    """
    sglang = StandInSglang(package=package)
    sglang.waiting = 3
    url = serving(sglang)
    with WeightSync(bridge, url) as sync:
        for _ in range(2):
            with pytest.raises(
                EngineFailed, match=rf"{url} is SGLang {package}.*keep.*0\.5\.21.*pause=.wait. or .abort."
            ):
                sync.push(tiny_model(1))
        assert not {"/pause_generation", "/update_weights_from_disk"} & set(sglang.calls)
    with WeightSync(bridge, url, pause="abort") as sync:
        sync.push(tiny_model(1), version=7)
    assert (sglang.dead, sglang.paused, sglang.version) == ("", None, "7")


@pytest.mark.parametrize("package", ["0.5.21", "0.5.23", "0.6.0rc1", "1.0", "0.0.0.dev1+g1234", "unknown"])
def test_requests_are_kept_by_a_newer_server_or_one_of_unknown_release(bridge, serving, tiny_model, package):
    sglang = StandInSglang(package=package)
    with WeightSync(bridge, serving(sglang)) as sync:
        for _ in range(3):
            sync.push(tiny_model(1))
    assert sglang.version == "2"
    assert sglang.calls.count("/server_info") == 1  # it asks its schedulers for the answer: once is enough


def test_a_server_that_an_earlier_pusher_sent_to_sleep_is_woken(bridge, serving, tiny_model):
    sglang = StandInSglang(memory_saver=True)
    url = serving(sglang)
    for version in range(3):  # programs, one after the other
        with WeightSync(bridge, url) as sync:
            with sync.updated(tiny_model(1)):
                assert (sglang.asleep, sglang.dead, sglang.version) == (False, "", str(version))
            assert (sglang.asleep, sglang.dead) == (True, "")
            assert sync._fleet.newest_version() == version  # also while it sleeps


def test_a_server_that_was_started_again_while_it_slept_is_awake(bridge, serving, tiny_model):
    sglang = StandInSglang(memory_saver=True)
    with WeightSync(bridge, serving(sglang)) as sync:
        with sync.updated(tiny_model(1)):
            pass
        sglang.started_again()
        with sync.updated(tiny_model(1)):
            assert (sglang.asleep, sglang.dead, sglang.version) == (False, "", "1")
        assert sglang.asleep


def test_a_sleeping_server_is_not_sent_to_sleep_again_and_not_pushed_to(bridge, serving, tiny_model):
    sglang = StandInSglang(memory_saver=True)
    with WeightSync(bridge, serving(sglang)) as sync:
        with sync.updated(tiny_model(1)):
            pass
        with pytest.raises(EngineFailed, match=r"gave its memory back.*updated"):
            sync.push(tiny_model(1))
        assert (sglang.asleep, sglang.dead) == (True, "")
        assert sync._fleet.sleep("keep") == {}
        assert sglang.calls.count("/release_memory_occupation") == 1
        with sync.updated(tiny_model(1)):
            assert sglang.version == "2"


@pytest.mark.parametrize("pause", ["keep", "abort"])
@pytest.mark.parametrize("at", ["/pause_generation", "/update_weights_from_disk"])
def test_generation_continues_whatever_interrupts_a_push(
    bridge, serving, sglang, tiny_model, monkeypatch, at, pause
):
    """As Ctrl-C in a notebook: the process lives on, so the watchdog child does nothing."""
    import shmbridge.consumers.engines.sglang as module

    real = module.ask

    def interrupted(url, path, *more, **named):
        said = real(url, path, *more, **named)
        if path == at:
            raise KeyboardInterrupt
        return said

    with WeightSync(bridge, serving(sglang), pause=pause) as sync:
        monkeypatch.setattr(module, "ask", interrupted)
        with pytest.raises(KeyboardInterrupt):
            sync.push(tiny_model(1))
        assert (sglang.paused, sglang.calls[-1]) == (None, "/continue_generation")
        monkeypatch.setattr(module, "ask", real)
        assert sync.push(tiny_model(1)) == 1


def test_a_server_that_has_died_is_said_with_both_calls(bridge, serving, sglang, tiny_model):
    url = serving(sglang)
    with WeightSync(bridge, url) as sync:
        sync.push(tiny_model(1))
        sglang.update_weights_from_disk = lambda **_: sglang.dies("out of memory")
        said = (
            r"answered 500: Internal Server Error; and it may still be paused: .*continue_generation "
            r"answered 503"
        )
        with pytest.raises(EngineFailed, match=said):
            sync.push(tiny_model(1))
        del sglang.update_weights_from_disk
        sglang.started_again()
        assert sync.push(tiny_model(1)) == 2
