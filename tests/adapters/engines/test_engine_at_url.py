"""The kind of engine at an address, found by its responses, also when a response is an error."""

from __future__ import annotations

import numpy as np
import pytest

from shmbridge.consumers.engines.engine import EngineFailed, Update
from shmbridge.consumers.engines.fleet import Following, engine_at
from shmbridge.consumers.engines.sglang import SglangHttp
from shmbridge.consumers.engines.vllm import VllmHttp
from shmbridge.consumers.weight_sync import WeightSync

KINDS = {
    "/policy_version": ({"version": 3}, Following),
    "/get_world_size": ({"world_size": 1}, VllmHttp),
    "/model_info": ({"model_path": "/some/model", "weight_version": "3"}, SglangHttp),
    "/health": ({"status": "ok", "weight_version": 3}, Following),
}


class Answering:
    """A server with these routes; all others are not there."""

    def __init__(self, **routes):
        self.routes, self.asked = {f"/{name}": said for name, said in routes.items()}, []

    def __call__(self, method, path, query, body):
        self.asked.append(path)
        return self.routes.get(path, (404, {"detail": "Not Found"}))


@pytest.mark.parametrize("path", KINDS)
def test_each_kind_of_engine_is_known_by_its_route(serving, path):
    said, kind = KINDS[path]
    server = Answering(**{path[1:]: (200, said)})
    assert type(engine_at(serving(server))) is kind


def test_a_follower_is_not_pushed_to_and_sglang_is_not_asked_for_health(serving):
    routes = {path[1:]: (200, said) for path, (said, _) in KINDS.items()}
    assert type(engine_at(serving(Answering(**routes)))) is Following
    routes.pop("policy_version"), routes.pop("get_world_size")
    server = Answering(**routes | {"health": (503, "")})  # SGLang's, which samples for it, while it is paused
    assert type(engine_at(serving(server))) is SglangHttp
    assert "/health" not in server.asked


@pytest.mark.parametrize("status", [401, 500, 503])
@pytest.mark.parametrize("path", KINDS)
def test_a_server_in_trouble_is_not_taken_for_another_kind(bridge, serving, path, status):
    """A follower in trouble answers 503 and has vLLM's own routes too: it would be pushed to while it
    follows.
    """
    later = list(KINDS)[list(KINDS).index(path) + 1 :]
    routes = {each[1:]: (200, KINDS[each][0]) for each in later}
    server = Answering(**routes, **{path[1:]: (status, {"error": {"message": "the engine is dead"}})})
    url = serving(server)
    with (
        WeightSync(bridge, url) as sync,
        pytest.raises(EngineFailed, match=f"{url}: {path} answered {status}: the engine is dead"),
    ):
        sync.push({"a": np.zeros(2)}, version=0)
    assert server.asked[-1] == path


@pytest.mark.parametrize("path", ["/policy_version", "/health"])
def test_a_follower_in_trouble_is_said_at_once(bridge, serving, path):
    server = Answering(**{path[1:]: (500, "Internal Server Error")})
    with pytest.raises(EngineFailed, match=f"{path} answered 500: Internal Server Error"):
        Following(serving(server)).update(Update(bridge, 1, timeout_s=600))
    assert server.asked.count(path) == 1
