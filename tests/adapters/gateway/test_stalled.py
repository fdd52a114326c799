"""Posters that stop in the middle or send no length, and environments beyond the number of lanes."""

from __future__ import annotations

import asyncio
import json
import resource
import threading
import time
from collections.abc import Callable
from typing import Any
from unittest.mock import Mock

import requests
from gateway_clients import GatewayProcess, RawClient

from shmbridge.consumers.gateway.limits import IN_MEMORY, Front, GatewayOptions, Refusals
from shmbridge.consumers.gateway.posts import ProvingConnection
from shmbridge.httpd.door import Bounds
from shmbridge.httpd.gate import HeldBytes


async def test_a_body_that_stalls_is_given_up():
    """A post that stops in the middle is answered with a retry; its memory is free for others."""
    options = GatewayOptions("nobody", bounds=Bounds(body_pause_s=0.05))
    refusals, held, said = Refusals(), HeldBytes(1000), []
    begun = [{"type": "http.request", "body": b"{", "more_body": True}]

    async def receive() -> Any:
        if not begun:
            await asyncio.Event().wait()
        return begun.pop()

    async def send(message: Any) -> None:
        said.append(message)

    scope = {
        "type": "http",
        "path": "/scored_data",
        "method": "POST",
        "headers": [(b"content-length", b"900")],
        "state": {"connection": Mock(spec=ProvingConnection)},
    }
    async with asyncio.timeout(5):
        await Front(None, options, refusals, held, {"/scored_data": {"POST"}})(scope, receive, send)
    assert said[0]["status"] == 408
    assert (b"connection", b"close") in said[0]["headers"]
    assert (held.held, refusals.counts) == (0, {"stalled": 1})


def test_bodies_of_unknown_length_count_as_the_largest(start_gateway: Callable[..., GatewayProcess]):
    """However many come at one time, no more is read than may be held."""
    gateway = start_gateway("--held-bytes", "1M", "--max-body", "4M")
    gateway.start(batch_size=4)
    clients = [RawClient(gateway) for _ in range(3)]
    for client in clients:
        client.ask("/scored_data", "transfer-encoding: chunked", method="POST")
    gateway.until("held_bytes", IN_MEMORY * 4 << 20)
    part = b'{"tokens":[[1],[1],[1],[1]],"masks":[[1],[1],[1],[1]],"scores":[1,2,3,4]}'
    for client in clients:
        client.socket.sendall(b"%x\r\n%s\r\n0\r\n\r\n" % (len(part), part))
    for client in clients:
        assert b"received" in client.read_answer()
        client.close()
    gateway.until("held_bytes", 0)


def test_an_environment_beyond_the_lanes_is_refused(start_gateway: Callable[..., GatewayProcess]):
    """A lane that no consumer takes from would keep its records for ever."""
    gateway = start_gateway("--lanes", "3")
    gateway.start()
    first, _ = gateway.register_env("one"), gateway.register_env("two")
    wish = {"max_token_length": 64, "desired_name": "three", "weight": 1.0, "group_size": 4}
    refused = gateway.post("/register-env", wish)
    assert (refused.status_code, "--lanes" in refused.text) == (503, True)
    gateway.post("/disconnect-env", {"env_id": first["env_id"]})
    assert gateway.post("/register-env", wish).json()["status"] == "success"


def test_environments_beyond_the_lanes_share_one_in_strict_mode(start_gateway: Callable[..., GatewayProcess]):
    """Strict mode refuses no environment; the order is still that of the commits."""
    gateway = start_gateway("--lanes", "3", "--compat", "strict")
    gateway.start(batch_size=4)
    for mark in range(6):
        gateway.put(mark, env_id=gateway.register_env()["env_id"])
    assert sorted(mark for _ in range(6) for mark in gateway.batch_marks() or ()) == list(range(6))


def test_memory_is_bounded_while_nobody_takes(start_gateway: Callable[..., GatewayProcess]):
    """Thirty posts of 8 x 2048 before a full lane: as lists they would take some 280 MB."""
    rows = [[token % 1000 for token in range(2048)]] * 8
    floats = [[-0.123456789 * token for token in range(2048)]] * 8
    group = {
        "tokens": rows,
        "masks": rows,
        "scores": [0.5] * 8,
        "advantages": floats,
        "inference_logprobs": floats,
    }
    gateway = start_gateway("--held-bytes", "64M", "--post-deadline", "6")
    gateway.start(batch_size=8, max_token_len=4096)
    before = resident(gateway.pid)
    body = json.dumps(group)
    posts = [
        threading.Thread(target=requests.post, args=(gateway.url + "/scored_data", body), daemon=True)
        for _ in range(30)
    ]
    for post in posts:
        post.start()
    gateway.until_at_least("held_bytes", 50 << 20)
    most = 0
    while any(post.is_alive() for post in posts):
        most = max(most, resident(gateway.pid))
        time.sleep(0.05)
    assert most - before < 160 << 20
    refused = gateway.stats()
    assert refused["held_bytes"] == 0
    assert refused["refused_total"] >= 20  # answered with 503; none was dropped silently


def resident(pid: int) -> int:
    with open(f"/proc/{pid}/statm") as statm:
        return int(statm.read().split()[1]) * resource.getpagesize()
