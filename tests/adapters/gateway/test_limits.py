"""Requests that a gateway refuses or delays: none is half done, and each is counted."""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import requests
from gateway_clients import ROOT, Api, GatewayProcess, RawClient, group, marks

import shmbridge

JSON = {"content-type": "application/json"}


@pytest.fixture
def gateway(shared_gateway: Callable[..., GatewayProcess]) -> GatewayProcess:
    return shared_gateway()


def post_raw(api: Api, body: bytes | str, path: str = "/scored_data", **headers: str) -> requests.Response:
    return api.post(
        path, data=body, headers=JSON | {name.replace("_", "-"): value for name, value in headers.items()}
    )


MALFORMED = {
    "not json": ("{", "the body is not a group"),
    "a list": ("[]", "the body is not a group"),
    "empty": ("", "the body is not a group"),
    "not utf-8": (
        b'{"tokens": [[1]], "masks": [[1]], "scores": [1], "images": "\xff"}',
        "the body is not a group",
    ),
    "no scores": ('{"tokens": [[1]], "masks": [[1]]}', "no scores"),
    "nothing": ("{}", "no tokens and no masks and no scores"),
    "no rows": ('{"tokens": [], "masks": [], "scores": []}', "tokens has no rows"),
    "text for a token": ('{"tokens": [[1, "x"]], "masks": [[1]], "scores": [1]}', "tokens[0][1]"),
    "a token too large": ('{"tokens": [[1, 3000000000]], "masks": [[1]], "scores": [1]}', "tokens[0][1]"),
    "NaN": ('{"tokens": [[1]], "masks": [[1]], "scores": [NaN]}', "scores[0] is nan"),
    "infinity deep inside": (
        json.dumps(group(0) | {"overrides": [{"a": [1, float("-inf")]}]}),
        "overrides[0].a[1] is -inf",
    ),
    "a number beyond doubles": ('{"tokens": [[1]], "masks": [[1]], "scores": [1e999]}', "scores[0] is inf"),
    "beyond float32": (
        '{"tokens": [[1]], "masks": [[1]], "scores": [1], "advantages": [[1e39]]}',
        "advantages[0][0]",
    ),
    "messages without role": (
        '{"tokens": [[1]], "masks": [[1]], "scores": [1], "messages": [[{"content": "x"}]]}',
        "messages[0][0]",
    ),
    "a negative number": ('{"tokens": [[1]], "masks": [[1]], "scores": [1], "env_id": -1}', "env_id"),
    "a null row": ('{"tokens": [[1]], "masks": [null], "scores": [1]}', "masks[0]"),
    "too large for a lane": (
        json.dumps({"tokens": [[1] * 300_000], "masks": [[1] * 300_000], "scores": [1.0]}),
        "half of the lane",
    ),
}


def test_a_malformed_body_is_422_with_the_reason(gateway: GatewayProcess):
    """Alone, or as the last of a list whose other groups are good, it leaves nothing behind."""
    gateway.start(batch_size=4)
    for name, (body, reason) in MALFORMED.items():
        answer = post_raw(gateway, body)
        assert answer.status_code == 422, name
        said = answer.json()["detail"]
        assert reason in said, (name, answer.text)
        assert (said.count(" -> "), said.count("\n")) == (1, 0), said
        raw = body if isinstance(body, bytes) else body.encode()
        answer = post_raw(
            gateway, b"[" + json.dumps(group(1)).encode() + b"," + raw + b"]", "/scored_data_list"
        )
        assert answer.status_code == 422, name
    assert gateway.batch_marks() is None
    assert gateway.stats()["groups_total"] == 0
    assert gateway.stats()["refused_total"] == 2 * len(MALFORMED)
    gateway.put(7)
    assert gateway.until_batch() == [7]


def test_bodies_may_be_gzipped_both_ways(gateway: GatewayProcess):
    gateway.start(batch_size=8)
    packed = gzip.compress(json.dumps([group(0), group(1)]).encode())
    assert (
        post_raw(gateway, packed, "/scored_data_list", content_encoding="gzip").json()["groups_processed"]
        == 2
    )
    two_members = gzip.compress(json.dumps(group(2)).encode()[:50]) + gzip.compress(
        json.dumps(group(2)).encode()[50:]
    )
    assert post_raw(gateway, two_members, content_encoding="gzip").status_code == 200
    found = gateway.get("/batch", headers={"accept-encoding": "gzip"})
    assert found.headers["content-encoding"] == "gzip"
    assert marks(found.json()["batch"]) == [0, 1]
    for bad in (b"no gzip", packed[:-10], packed + b"rest"):
        answer = post_raw(gateway, bad, "/scored_data_list", content_encoding="gzip")
        assert (answer.status_code, "gzip" in answer.text) == (400, True)


def test_bodies_have_a_limit_after_gunzip_too(start_gateway: Callable[..., GatewayProcess]):
    """A bomb is not unpacked beyond the limit; a body that says its length is refused before it is read."""
    gateway = start_gateway("--max-body", "1M")
    gateway.start()
    before = most_bytes(gateway)
    bomb = gzip.compress(b" " * (400 << 20), 9)
    assert len(bomb) < 1 << 20
    assert post_raw(gateway, bomb, content_encoding="gzip").status_code == 413
    assert post_raw(gateway, b" " * (2 << 20)).status_code == 413
    assert gateway.post("/register", data=b" " * (2 << 20), headers=JSON).status_code == 413
    client = RawClient(gateway)
    client.ask("/scored_data", "content-length: 99999999999", method="POST")
    assert b"413" in client.socket.recv(100)
    client.close()
    assert most_bytes(gateway) - before < 64 << 20
    gateway.put(0)


def most_bytes(gateway: GatewayProcess) -> int:
    """The most memory it has ever had."""
    with open(f"/proc/{gateway.pid}/status") as lines:
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM"))


def test_a_token_is_required_by_every_route(
    start_gateway: Callable[..., GatewayProcess], monkeypatch: pytest.MonkeyPatch
):
    """Every route checks it before it reads anything."""
    monkeypatch.setenv("SHMBRIDGE_GATEWAY_TOKEN", "secret\n")  # as a file may end
    gateway = start_gateway("--host", "0.0.0.0")
    assert "no token" not in gateway.output
    gateway.url = gateway.url.replace("0.0.0.0", "127.0.0.1")
    client = RawClient(gateway)
    client.ask("/scored_data", f"content-length: {4 << 20}", method="POST")
    client.read_head()
    assert client.head.startswith("http/1.1 401"), "before the body"
    client.close()
    for header in (
        {},
        {"authorization": "Bearer wrong"},
        {"authorization": "secret"},
        {"authorization": "Bearer secret2"},
    ):
        for path in ("/batch", "/stats", "/reset_data", "/docs"):
            answer = gateway.get(path, headers=header)
            assert (answer.status_code, answer.headers["www-authenticate"]) == (401, "Bearer")
        assert gateway.post("/scored_data", group(0), headers=header).status_code == 401
    assert gateway.get("/stats", headers={"authorization": "Bearer secret"}).json()["posts_total"] == 0


def test_pages_of_other_sites_are_kept_out(gateway: GatewayProcess):
    """A browser says where a request comes from; a page must not be able to reset a run that happens to be on
    this machine.
    """
    gateway.start()
    gateway.put(0)
    for site, status in (("cross-site", 403), ("same-site", 403), ("same-origin", 200), ("none", 200)):
        assert gateway.get("/info", headers={"sec-fetch-site": site}).status_code == status
    assert gateway.get("/reset_data", headers={"sec-fetch-site": "cross-site"}).status_code == 403
    assert gateway.get("/status").json()["queue_size"] == 1


def big(mark: int) -> dict[str, Any]:
    """A group of which two fill a lane of 1 MiB."""
    return {"tokens": [[mark, *[1] * 80_000]], "masks": [[-100, *[1] * 80_000]], "scores": [1.0]}


def in_thread(work: Callable[[], Any]) -> tuple[threading.Thread, list[Any]]:
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(work()))
    thread.start()
    return thread, found


def test_a_post_is_held_while_its_lane_is_full(gateway: GatewayProcess):
    """Other posts go on. The held one is answered when a batch was read, and is delivered once."""
    gateway.start(batch_size=1)
    slow, quick = (gateway.register_env(name)["env_id"] for name in ("slow", "quick"))
    sent = 0
    while gateway.stats()["posts_waiting"] == 0:
        held = in_thread(lambda mark=sent: gateway.post("/scored_data", big(mark) | {"env_id": slow}))
        sent += 1
        held[0].join(0.5)
        assert sent < 10
    assert held[0].is_alive()
    status = gateway.env_status(slow)
    assert (status["queue_size"], status["self_queue_size"]) == (sent, sent)
    gateway.put(100, rows=1, env_id=quick)
    found: list[int] = []
    while len(found) < sent + 1:
        found += gateway.until_batch()
    held[0].join()
    assert held[1][0].json() == {"status": "received"}
    assert sorted(found) == [*range(sent), 100]


def test_a_list_past_the_deadline_is_503_and_counted_and_goes_on_when_sent_again(
    start_gateway: Callable[..., GatewayProcess],
):
    """A list that went in by half goes on where it was, when the client sends it again."""
    gateway = start_gateway("--post-deadline", "0.3")
    gateway.register(batch_size=1)
    posted = [big(mark) for mark in range(5)]
    answer = gateway.post("/scored_data_list", posted)
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
    assert "SB" in answer.json()["detail"]
    first = gateway.stats()
    assert first["posts_timed_out_total"] == 1
    assert first["refused_total{lane full}"] == 1
    assert 0 < first["groups_total"] < 5
    assert first["bridge_dropped_total{timeout}"] in (0, 1)  # once the consumer has seen the lane
    found: list[int] = []
    while len(found) < first["groups_total"]:
        found += gateway.until_batch()
    deadline = time.monotonic() + 30
    while (again := gateway.post("/scored_data_list", posted)).status_code == 503:
        assert time.monotonic() < deadline
        found += gateway.batch_marks() or []
    assert again.json() == {"status": "received", "groups_processed": 5}
    while len(found) < 5:
        found += gateway.until_batch()
    assert found == list(range(5))
    assert gateway.batch_marks() is None


def test_a_poster_that_goes_while_it_waits_has_posted(gateway: GatewayProcess):
    """Its group goes in when there is room. The same body sent again before that counts as the same post."""
    gateway.start(batch_size=1)
    sent = 0
    while gateway.stats()["posts_waiting"] == 0:
        client = RawClient(gateway)
        client.ask(
            "/scored_data",
            "content-type: application/json",
            body=json.dumps(big(sent)).encode(),
            method="POST",
        )
        gateway.until("posts_total", sent + 1)
        settled = time.monotonic() + 0.5
        while time.monotonic() < settled and gateway.stats()["groups_total"] != sent + 1:
            time.sleep(0.01)
        client.reset() if gateway.stats()["posts_waiting"] else client.close()
        sent += 1
    again, answer = in_thread(lambda: gateway.post("/scored_data", big(sent - 1)))
    gateway.until("posts_repeated_total", 1)
    found: list[int] = []
    while len(found) < sent:
        found += gateway.until_batch()
    again.join()
    assert answer[0].json() == {"status": "received"}
    assert found == list(range(sent))
    assert gateway.batch_marks() is None


def test_a_batch_that_the_lanes_cannot_hold_is_said(gateway: GatewayProcess):
    """Posts would wait for a batch, and the batch for posts: the trainer gets an error with the numbers
    instead.
    """
    gateway.register(batch_size=64)
    with requests.Session() as session:
        held = [in_thread(lambda mark=mark: session_post(gateway, mark)) for mark in range(4)]
        deadline = time.monotonic() + 30
        while (answer := session.get(gateway.url + "/batch")).status_code == 200:
            assert answer.json() == {"batch": None}
            assert time.monotonic() < deadline
            time.sleep(0.2)
    assert answer.status_code == 507
    assert "lane_bytes" in answer.json()["detail"]
    gateway.end(signal.SIGTERM)
    for thread, _ in held:
        thread.join()


def session_post(gateway: Api, mark: int) -> None:
    with contextlib.suppress(requests.ConnectionError):
        gateway.post("/scored_data", big(mark), timeout=60)


def test_a_signal_ends_the_gateway_in_order(start_gateway: Callable[..., GatewayProcess], bridge: str):
    """Posts that wait are answered, what is in the lanes stays, the code is 0."""
    gateway = start_gateway()
    gateway.register(batch_size=64)
    held = [in_thread(lambda mark=mark: gateway.post("/scored_data", big(mark))) for mark in range(4)]
    deadline = time.monotonic() + 20
    while gateway.stats()["posts_waiting"] == 0 or gateway.stats()["posts_total"] < 4:
        assert time.monotonic() < deadline
    half = RawClient(gateway)
    half.ask("/scored_data", "content-length: 9", method="POST")
    half.socket.sendall(b"{")
    assert gateway.end(signal.SIGTERM) == 0
    half.read_head()
    assert half.head.startswith("http/1.1 503")
    half.close()
    assert "Traceback" not in gateway.output
    statuses = [answers[0].status_code for thread, answers in held if not thread.join()]
    assert set(statuses) <= {200, 503}
    assert 503 in statuses
    with shmbridge.Consumer(bridge) as consumer:
        assert sum(1 for record in consumer.poll() if not record.release()) == statuses.count(200)


def test_bodies_in_memory_have_a_limit(start_gateway: Callable[..., GatewayProcess]):
    """With that much waiting for room, further posts are not even read, and are refused past the deadline."""
    gateway = start_gateway("--held-bytes", "1K", "--post-deadline", "1")
    gateway.register(batch_size=64)
    held = [
        in_thread(lambda mark=mark: gateway.post("/scored_data", big(mark)).status_code) for mark in range(6)
    ]
    seen: list[float] = []
    while any(thread.is_alive() for thread, _ in held):
        seen.append(gateway.stats()["posts_waiting"])
    assert max(seen) == 1
    refused = gateway.stats()
    assert sorted({answers[0] for _, answers in held}) == [200, 503]
    assert (
        refused.get("refused_total{held bytes}", 0) + refused["posts_timed_out_total"]
        == refused["refused_total"]
    )
    assert refused["held_bytes"] == 0


def test_a_gateway_listens_to_this_machine_only_unless_told_otherwise(gateway: GatewayProcess):
    assert gateway.url.startswith("http://127.0.0.1:")
    port = f":{gateway.address[1]:04X}"
    with open("/proc/net/tcp") as table:
        rows = [row.split() for row in table if f"{port} " in row.split()[1] + " " and row.split()[3] == "0A"]
    assert [row[1] for row in rows] == [f"0100007F{port}"]


def test_a_gateway_that_cannot_start_says_why(
    gateway: GatewayProcess, bridge: str, make_consumer: Callable[..., shmbridge.Consumer]
):
    """The address is taken, the name is invalid, or another hub lives in strict mode."""
    make_consumer()
    for arguments, code, said in (
        (["--bridge", bridge, "--port", str(gateway.address[1])], 2, "the port is in use -> "),
        (["--bridge", bridge, "--max-body", "much"], 2, "not a size"),
        (["--bridge", bridge, "--port", "0", "--compat", "strict"], 1, f"pid {os.getpid()}"),
    ):
        done = subprocess.run(
            [sys.executable, "-m", "shmbridge.cli", "gateway", *arguments],
            capture_output=True,
            text=True,
            timeout=60,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
        )
        assert (done.returncode, said in done.stderr) == (code, True), done.stderr


def test_a_host_name_that_a_page_led_here_is_refused(start_gateway: Callable[..., GatewayProcess]):
    """A page can have its name lead to this machine; it cannot have another name, nor hide where it comes
    from.
    """
    gateway = start_gateway("--host-name", "gate.example.com")
    gateway.start()
    gateway.put(0)
    port = gateway.address[1]
    for host, status in (
        ("evil.example", 403),
        (f"evil.example:{port}", 403),
        ("127.0.0.1.evil.example", 403),
        ("[::1", 403),
        (f"127.0.0.1:{port}", 200),
        (f"localhost:{port}", 200),
        ("a.localhost", 200),
        (f"[::1]:{port}", 200),
        ("10.1.2.3", 200),
        ("gate.example.com.evil", 403),
        ("trainer", 200),
        (f"GATE.example.com:{port}", 200),
        ("evil.localhost.example", 403),
    ):
        for site in ({}, {"sec-fetch-site": "same-origin"}):
            assert gateway.get("/info", headers={"host": host} | site).status_code == status, host
    refused = gateway.get("/reset_data", headers={"host": "evil.example"})
    assert "--host-name evil.example" in refused.json()["detail"]
    for origin, status in (
        ("http://evil.example", 403),
        ("null", 403),
        ("http://localhost:1", 403),
        (gateway.url, 200),
    ):
        assert gateway.get("/status", headers={"origin": origin}).status_code == status, origin
    assert gateway.get("/reset_data", headers={"origin": "http://evil.example"}).status_code == 403
    assert gateway.get("/status").json()["queue_size"] == 1
    assert gateway.stats()["refused_total{host}"] > 0


def test_a_gateway_open_to_all_says_so(
    start_gateway: Callable[..., GatewayProcess], gateway: GatewayProcess, monkeypatch: pytest.MonkeyPatch
):
    """Bound to more than this machine and without a token: a line in the log."""
    monkeypatch.delenv("SHMBRIDGE_GATEWAY_TOKEN", raising=False)
    assert "no token" not in gateway.output
    assert "0.0.0.0 may post, poll and reset: there is no token" in start_gateway("--host", "0.0.0.0").output
