"""Every HTTP server under peers that send nonsense, too much, too slowly, or only half of it.

None answers with a server's error, hangs, or grows; each goes on to answer the next good request.
"""

from __future__ import annotations

import contextlib
import gzip
import http.client
import json
import os
import re
import resource
import runpy
import socket
import struct
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

import shmbridge
from shmbridge.testing import wait_until

ROOT = Path(__file__).parents[3]
KINDS = ["gateway", "strict", "policy", "environments", "scrapes", "verifiers"]
NEEDED = {"gateway": "fastapi", "strict": "fastapi", "policy": "torch", "verifiers": "aiohttp"}
MIB = 1 << 20
LIMIT = 8 * MIB  # http_servers.py: bytes of a body
PAUSE_S, HEAD_S = 1.5, 2.0

GROUP = b'{"tokens":[[1,2]],"masks":[[-100,2]],"scores":[1.0]}'
# kind -> method, path, body of a good request, and its headers beside Host
GOOD = {
    "gateway": ("POST", "/scored_data", GROUP, ""),
    "strict": ("POST", "/scored_data", GROUP, ""),
    "policy": ("POST", "/generate", b'{"prompt": "1", "max_tokens": 1}', ""),
    "environments": ("POST", "/rows", b"{}", "X-Shmbridge-Secret: secret\r\n"),
    "scrapes": ("GET", "/healthz", b"", ""),
    "verifiers": ("POST", "/inference/v1/generate", b'{"token_ids": [1]}', "X-Shmbridge-Secret: secret\r\n"),
}


@dataclass
class Running:
    """One server."""

    kind: str
    process: subprocess.Popen[str]
    port: int

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=20)

    def head(self, *lines: str, method: str = "", path: str = "", host: str = "localhost") -> bytes:
        """The head of a request that would be good but for these lines."""
        own_method, own_path, _, more = GOOD[self.kind]
        first = f"{method or own_method} {path or own_path} HTTP/1.1\r\nHost: {host}\r\n{more}"
        return (first + "".join(f"{line}\r\n" for line in lines) + "\r\n").encode("latin-1")

    def good(self) -> int:
        """The status of a good request."""
        method, path, body, more = GOOD[self.kind]
        headers = dict(line.split(": ") for line in more.splitlines())
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=20)
        with contextlib.closing(connection):
            connection.request(method, path, body or None, headers | {"Content-Type": "application/json"})
            answer = connection.getresponse()
            answer.read()
            return answer.status

    def sent(self, *parts: bytes) -> list[int]:
        """The statuses of the answers to some bytes, until the server closes or answers nothing more."""
        with self.connect() as client:
            with contextlib.suppress(ConnectionError):
                for part in parts:
                    client.sendall(part)
            return statuses(client)

    @property
    def resident(self) -> int:
        with open(f"/proc/{self.process.pid}/statm") as statm:
            return int(statm.read().split()[1]) * resource.getpagesize()

    @property
    def descriptors(self) -> int:
        return len(os.listdir(f"/proc/{self.process.pid}/fd"))


def statuses(client: socket.socket, timeout_s: float = 15.0) -> list[int]:
    """The statuses that come on a connection until it is closed; one is enough if it stays open."""
    found = b""
    until = time.monotonic() + timeout_s
    while time.monotonic() < until:
        client.settimeout(0.3 if found else until - time.monotonic())
        try:
            part = client.recv(1 << 16)
        except TimeoutError:
            break
        except ConnectionError:
            part = b""
        if not part:
            return read_statuses(found)
        found += part
    assert found, "no answer, and the connection is open"
    return read_statuses(found)


def read_statuses(found: bytes) -> list[int]:
    return [int(each) for each in re.findall(rb"^HTTP/1\.[01] (\d{3}) ", found, re.MULTILINE)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("served")
    (path / "skyrl_gym.py").write_text('"""Stands in for the package."""\n')
    (path / "rows.jsonl").write_text('{"a": 1}\n{"a": 2}\n')
    return path


@pytest.fixture(scope="module", params=KINDS)
def server(request: pytest.FixtureRequest, folder: Path) -> Iterator[Running]:
    kind = request.param
    if kind in NEEDED:
        pytest.importorskip(NEEDED[kind])
    if kind == "policy":
        runpy.run_path(str(ROOT / "examples/tiny_model.py"))["build"](folder / "model", seed=1)
    bridge = f"doors-{kind}-{os.getpid()}"
    log = (folder / f"{kind}.log").open("w")
    process = subprocess.Popen(
        [sys.executable, str(Path(__file__).with_name("http_servers.py")), kind, bridge, str(folder)],
        stdout=subprocess.PIPE,
        stderr=log,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line.strip().isdecimal(), (line, (folder / f"{kind}.log").read_text())
        running = Running(kind, process, int(line))
        if kind in ("gateway", "strict"):
            register(running)
        yield running
        assert process.poll() is None, (folder / f"{kind}.log").read_text()
    finally:
        process.terminate()
        process.wait(30)
        assert process.stdout is not None
        process.stdout.close()
        log.close()
        shmbridge.clean(bridge, dry_run=False)


def register(running: Running) -> None:
    run = {"wandb_group": "g", "wandb_project": "p", "batch_size": 2, "max_token_len": 64}
    run |= {"checkpoint_dir": "", "save_checkpoint_interval": 0, "starting_step": 0, "num_steps": 10}
    body = json.dumps(run).encode()
    assert running.sent(
        running.head(
            "Content-Type: application/json", f"Content-Length: {len(body)}", path="/register", method="POST"
        ),
        body,
    ) == [200]


@pytest.fixture(autouse=True)
def _goes_on(server: Running) -> Iterator[None]:
    """Whatever a test did: the next good request is answered."""
    yield
    assert server.good() == 200


REFUSALS = {400, 403, 404, 405, 408, 411, 413, 414, 415, 417, 422, 431, 501, 505}
HARMLESS = REFUSALS | {200}

HEADS = {
    "length -1": ["Content-Length: -1"],
    "length +5": ["Content-Length: +5"],
    "length abc": ["Content-Length: abc"],
    "length hex": ["Content-Length: 0x10"],
    "length 1e3": ["Content-Length: 1e3"],
    "length with a blank": ["Content-Length: 1 2"],
    "length of other digits": ["Content-Length: ²"],
    "length of 30 digits": ["Content-Length: " + "9" * 30],
    "length of 5000 digits": ["Content-Length: " + "9" * 5000],
    "two lengths": ["Content-Length: 2", "Content-Length: 3"],
    "chunks beside a size": ["Content-Length: 2", "Transfer-Encoding: chunked"],
    "unknown encoding": ["Transfer-Encoding: gzip"],
    "encodings": ["Transfer-Encoding: chunked, identity"],
    "header without a colon": ["nonsense"],
    "header with a NUL": ["X: a\0b"],
    "large header": ["X: " + "y" * 200_000],
    "many headers": [f"X-{number}: y" for number in range(20_000)],
}

BODIES = {
    "brackets": b"[" * 100_000,
    "objects": b'{"tokens":' * 20_000,
    "brackets in a value": b'{"tokens":[[1]],"masks":[[1]],"scores":[1],"x":'
    + b"[" * 50_000
    + b"]" * 50_000
    + b"}",
    "brackets in a list": b"[" + b'{"tokens":' + b"[" * 50_000,
    "whole number": b'{"tokens":[[1,' + b"9" * 5000 + b']],"masks":[[1,2]],"scores":[1.0]}',
    "number of an unknown key": b'{"row": ' + b"8" * 20_000 + b"}",
    "huge number": b'{"temperature": 1e400, "episode": 1e999, "scores": [1e999]}',
    "NaN": b'{"scores": [NaN], "prompt": Infinity}',
    "not UTF-8": b'{"prompt": "\xff\xfe"}',
    "half a surrogate": b'{"prompt": "\\ud800", "env_class": "\\udfff"}',
    "text": b"hello",
    "null": b"null",
    "list": b"[1]",
    "two": b"{}{}",
    "a key of brackets": b'{"$[0].[": {"tokens[0]": 1}, "tokens": {"[": 1}}',
}


@pytest.mark.parametrize("what", HEADS)
def test_a_hostile_head(server: Running, what: str) -> None:
    found = server.sent(server.head(*HEADS[what]), b"{}")
    if "length" in what:
        assert found[0] in (400, 411, 413), found
    assert set(found) <= HARMLESS, found


PATHS = {
    "gateway": ["/scored_data", "/scored_data_list", "/register", "/register-env", "/disconnect-env"],
    "strict": ["/scored_data", "/scored_data_list", "/register", "/register-env", "/disconnect-env"],
    "policy": ["/generate", "/v1/completions", "/v1/chat/completions"],
    "environments": ["/row", "/init", "/step", "/metrics", "/close"],
    "scrapes": ["/metrics", "/healthz"],
    "verifiers": ["/inference/v1/generate"],
}


@pytest.mark.parametrize("what", BODIES)
def test_a_hostile_body(server: Running, what: str) -> None:
    body = BODIES[what]
    for path in PATHS[server.kind]:
        length = f"Content-Length: {len(body)}"
        head = server.head("Content-Type: application/json", length, path=path, method="POST")
        found = server.sent(head, body)
        assert found, path
        assert set(found) <= REFUSALS, (path, found)


@pytest.mark.parametrize(
    "first",
    [
        b"GET / HTTP/9.9\r\n\r\n",
        b"GET / HTTP/1.x\r\n\r\n",
        b"get /x HTTP/1.1\r\nHost: a\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"GET http://evil.example.com/ HTTP/1.1\r\nHost: evil.example.com\r\n\r\n",
        b"GET /%00%ff/../../etc HTTP/1.1\r\nHost: a\r\n\r\n",
        b"GET /\xff\xfe HTTP/1.1\r\nHost: a\r\n\r\n",
        b"GET /" + b"a" * 200_000 + b" HTTP/1.1\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\xaa" * 300 + b"\r\n\r\n",
        b"\r\n\r\n\r\n\r\nDELETE / HTTP/1.1\r\nHost: a\r\n\r\n",
        b"OPTIONS * HTTP/1.1\r\nHost: a\r\n\r\n",
        b"CONNECT evil.example.com:443 HTTP/1.1\r\nHost: a\r\n\r\n",
        b"\0" * 5000 + b"\r\n\r\n",
    ],
    ids=range(13),
)
def test_a_hostile_first_line(server: Running, first: bytes) -> None:
    found = server.sent(first)
    assert set(found) <= HARMLESS, found


@pytest.mark.parametrize(
    ("first", "refused"),
    [
        ("PATCH {} HTTP/1.1\r\nHost: a", {405}),
        ("GET {} HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: gzip", {400, 405, 411}),
        ("POST {} HTTP/1.1\r\nHost: a\r\nContent-Length: 1_0", {400, 403, 405}),
        ("GET {} HTTP/11", {400}),
        ("hello {}", {400}),
    ],
)
def test_a_wrong_request_is_told_what_to_send(server: Running, first: str, refused: set[int]) -> None:
    """With a head and one next action, also where the library of the server refuses it."""
    with server.connect() as client:
        _, path, _, more = GOOD[server.kind]
        client.sendall(f"{first.format(path)}\r\n{more}\r\n".encode())
        client.shutdown(socket.SHUT_WR)
        found = b"".join(iter(lambda: client.recv(1 << 16), b""))
    (status,) = read_statuses(found)
    assert status in refused
    as_upstream = server.kind == "strict" and status == 405
    assert as_upstream or status == 403 or found.count(b" -> ") == 1, found


@pytest.mark.parametrize(
    "lines",
    [
        {"host": "evil.example.com"},
        {"host": "127.0.0.1.evil.example.com"},
        {"host": "[::1"},
        {"host": "a@evil.example.com:80"},
        {"host": "evil.example.com@127.0.0.1"},
        {"host": "[fe80::1].evil.example.com:80"},
        {"host": "[evil]"},
        {"host": "127.0.0.1:x"},
        {"host": "localhost, evil.example.com"},
        {"host": "evil.example.com", "lines": ["Host: localhost"]},
        {"lines": ["Origin: http://evil.example.com"]},
        {"lines": ["Origin: null"]},
        {"lines": ["Sec-Fetch-Site: cross-site"]},
        {"lines": ["Sec-Fetch-Site: same-site"]},
    ],
    ids=str,
)
def test_another_sites_page_is_kept_out(server: Running, lines: dict) -> None:
    """Where no secret is asked for, with which a page could not come."""
    body = GOOD[server.kind][2]
    length = [f"Content-Length: {len(body)}", "Content-Type: application/json"] if body else []
    head = server.head(*lines.get("lines", []), *length, host=lines.get("host", "localhost"))
    refused = {403, 400} if len(lines) == 2 else {403}  # two hosts are no request for some servers
    assert server.sent(head, body)[0] in ({200} if server.kind == "environments" else refused)


def test_a_form_of_another_site_is_not_a_request(server: Running) -> None:
    """The policy server takes what a page cannot send without asking."""
    if server.kind != "policy":
        return
    body = GOOD["policy"][2]
    for kind, status in (
        ("text/plain", 415),
        ("Multipart/Form-data; boundary=x", 415),
        ("application/x-www-form-urlencoded", 200),  # as curl calls it
        ("application/json; charset=utf-8", 200),
    ):
        head = server.head(f"Content-Length: {len(body)}", f"Content-Type: {kind}")
        assert server.sent(head, body) == [status]


CHUNKS = {
    "no number": b"zz\r\nab\r\n0\r\n\r\n",
    "negative": b"-5\r\nab\r\n0\r\n\r\n",
    "longer than it says": b"1\r\nabcdef\r\n0\r\n\r\n",
    "size without end": b"f" * 100_000,
    "extension without end": b"1;" + b"x" * 200_000,
    "trailers without end": b"2\r\n{}\r\n0\r\n" + b"X: y\r\n" * 50_000,
    "more than is taken": (b"100000\r\n" + b" " * MIB + b"\r\n") * 12,
}


@pytest.mark.parametrize("what", CHUNKS)
def test_hostile_chunks(server: Running, what: str) -> None:
    before = server.resident
    found = server.sent(
        server.head("Transfer-Encoding: chunked", "Content-Type: application/json"), CHUNKS[what]
    )
    assert found[:1] == [] or found[0] in REFUSALS, found
    assert server.resident - before < 40 * MIB


def test_a_gzip_bomb(server: Running) -> None:
    """200 MiB of blanks in 200 KB, and what is not gzip."""
    before = server.resident
    for body in (gzip.compress(b" " * (200 * MIB), 9), b"\x1f\x8b" + b"x" * 1000, gzip.compress(b"{}")[:-4]):
        head = server.head(
            f"Content-Length: {len(body)}", "Content-Encoding: gzip", "Content-Type: application/json"
        )
        found = server.sent(head, body)
        # the Atropos server says so, too, of what is broken off; that is not an error of the gateway
        assert found[0] in REFUSALS | ({500} if server.kind == "strict" else set()), found
    assert server.resident - before < 60 * MIB


# --- too slowly ---------------------------------------------------------------------------------------------


def test_bodies_that_stop_half_way(server: Running) -> None:
    """24 at once: memory is that of two bodies, and each is ended by the limit of a pause, or of room."""
    length = LIMIT - 1000
    if server.kind == "policy":
        length = 7 * MIB  # of 128 tokens
    before, part = server.resident, b" " * (length * 3 // 4)
    clients = [server.connect() for _ in range(24)]
    head = server.head(f"Content-Length: {length}", "Content-Type: application/json")
    answers: list[list[int] | None] = [None] * len(clients)

    def post(number: int) -> None:
        with contextlib.suppress(OSError):
            clients[number].sendall(head + part)
        answers[number] = statuses(clients[number], 40.0)

    posting = [threading.Thread(target=post, args=(number,)) for number in range(len(clients))]
    most, began = before, time.monotonic()
    try:
        for thread in posting:
            thread.start()
        while any(thread.is_alive() for thread in posting):
            most = max(most, server.resident)
            time.sleep(0.01)
    finally:
        for client in clients:
            client.close()
    assert None not in answers, "neither answered nor closed"
    found = Counter(each for answer in answers for each in answer)
    grown, took_s = (most - before) >> 20, time.monotonic() - began
    print(f"{server.kind}: 24 x {length >> 20} MiB, +{grown} MiB in {took_s:.1f} s, {dict(found)}")
    assert most - before < 100 * MIB
    assert set(found) <= {408, 413, 503}
    wait_until(lambda: server.descriptors < 60, timeout_s=20)


def test_a_body_that_drips_has_an_end(server: Running) -> None:
    """Each byte comes in time; the whole does not."""
    with server.connect() as client:
        client.sendall(server.head("Content-Length: 1000", "Content-Type: application/json"))
        began = time.monotonic()
        with contextlib.suppress(OSError):
            while time.monotonic() - began < 12:
                client.sendall(b" ")
                client.settimeout(0.3)
                with contextlib.suppress(TimeoutError):
                    if client.recv(1000):
                        break
        assert time.monotonic() - began < 12


def test_an_answered_body_that_goes_on_has_an_end(server: Running) -> None:
    """A path that is not there: its body is not read, and its sender is let go."""
    with server.connect() as client:
        client.sendall(server.head("Content-Length: 900000", path="/nowhere", method="POST"))
        assert statuses(client)[0] in REFUSALS
        began = time.monotonic()
        with contextlib.suppress(OSError):
            while time.monotonic() - began < 15:
                client.sendall(b" ")
                time.sleep(0.2)
        assert time.monotonic() - began < 15


def test_a_refusal_reaches_a_client_that_wants_the_connection_closed(server: Running) -> None:
    """As urllib does: its body is read on, for a close before its end would reset the connection."""
    length = "Content-Length: 12000000"
    for lines in ([length], ["Content-Length: x"], [length, "X: " + "y" * 100_000]):
        with server.connect() as client:
            client.sendall(server.head("Connection: close", *lines, path="/nowhere", method="POST"))
            client.sendall(b"x" * 12_000_000)
            assert set(statuses(client)) <= REFUSALS


def test_an_answer_that_is_not_read_has_an_end(server: Running) -> None:
    """Its connection and its memory are free after a pause, though the client keeps the connection."""
    if server.kind == "scrapes":
        return  # one short answer a connection
    some = {"policy": ("/health", b""), "environments": ("/rows", b"{}"), "verifiers": ("/came", b"")}
    path, body = some.get(server.kind, ("/stats", b""))
    head = server.head(f"Content-Length: {len(body)}", path=path, method="POST" if body else "GET")
    before = server.descriptors
    with contextlib.ExitStack() as clients:
        for _ in range(5):
            client = clients.enter_context(socket.socket())
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.connect(("127.0.0.1", server.port))
            client.sendall((head + body) * 300)
        wait_until(lambda: server.descriptors > before, timeout_s=20)
        wait_until(lambda: server.descriptors <= before, timeout_s=20)


def test_half_sent_heads_are_closed(server: Running) -> None:
    """1,500 at once, and a good request among them is answered."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 8192), hard))
    clients = []
    try:
        for number in range(1500):
            client = server.connect()
            clients.append(client)
            client.sendall(b"POST /register HTTP/1.1\r\nX-%d: " % number)
        began = time.monotonic()
        assert server.good() == 200
        print(f"{server.kind}: a good request beside 1,500 half heads took {time.monotonic() - began:.2f} s")
        closed = 0
        for client in clients:
            client.settimeout(20)
            with contextlib.suppress(ConnectionError):
                while client.recv(1000):
                    pass
            closed += 1
        assert closed == 1500
        print(f"{server.kind}: all closed {time.monotonic() - began:.1f} s later")
    finally:
        for client in clients:
            client.close()
    wait_until(lambda: server.descriptors < 60, timeout_s=20)


def test_a_head_that_drips_has_an_end(server: Running) -> None:
    with server.connect() as client:
        began = time.monotonic()
        with contextlib.suppress(OSError):
            client.sendall(b"GET /x HTTP/1.1\r\n")
            while time.monotonic() - began < 10:
                client.sendall(b"X: y\r\n")
                time.sleep(0.1)
        assert time.monotonic() - began < 10


def test_connections_that_reset(server: Running) -> None:
    for number in range(50):
        with server.connect() as client:
            client.sendall(server.head("Content-Length: 100") + b"x" * number)
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    wait_until(lambda: server.descriptors < 60, timeout_s=20)


def test_a_wrong_secret_comes_before_the_body(server: Running) -> None:
    """The refusal is there before a byte of the body is sent, and none is read."""
    if "secret" not in GOOD[server.kind][3]:
        return
    before, path = server.resident, GOOD[server.kind][1]
    for secret in ("", "X-Shmbridge-Secret: secreT\r\n", "X-Shmbridge-Secret: \xff\r\n"):
        with server.connect() as client:
            head = f"POST {path} HTTP/1.1\r\nHost: a\r\n{secret}Content-Length: 400000000\r\n\r\n"
            client.sendall(head.encode("latin-1"))
            assert statuses(client) == [403]
    assert server.resident - before < 10 * MIB


def test_a_refused_body_is_named_and_not_passed_on(server: Running) -> None:
    """verifiers' door: too large, of another site or without the secret, it does not reach the model."""
    if server.kind != "verifiers":
        return

    def came() -> dict[str, int]:
        with contextlib.closing(http.client.HTTPConnection("127.0.0.1", server.port, timeout=20)) as asking:
            asking.request("GET", "/came", headers={"X-Shmbridge-Secret": "secret"})
            return json.loads(asking.getresponse().read())

    before = came()
    _, path, body, _ = GOOD["verifiers"]
    own = {"X-Shmbridge-Secret": "secret"}
    for status, headers, sent, said in (
        (413, own, b" " * (LIMIT + 1), f"has {LIMIT + 1} bytes, at most {LIMIT} are taken"),
        (413, own | {"Transfer-Encoding": "chunked"}, b" " * (LIMIT + 1), f"has more than {LIMIT} bytes"),
        (413, own | {"Content-Encoding": "gzip"}, gzip.compress(b" " * 9 * LIMIT), "once gunzipped"),
        (403, own | {"Host": "evil.example.com"}, body, "evil.example.com"),
        (403, own | {"Origin": "http://evil.example.com"}, body, "Origin"),
        (403, {}, body, "x-shmbridge-secret"),
        (403, {"Authorization": "Bearer secret"}, body, "x-shmbridge-secret"),
    ):
        with contextlib.closing(http.client.HTTPConnection("127.0.0.1", server.port, timeout=20)) as asking:
            chunks = iter([sent]) if "Transfer-Encoding" in headers else sent
            asking.request("POST", path, chunks, headers, encode_chunked="Transfer-Encoding" in headers)
            answer = asking.getresponse()
            error = json.loads(answer.read())["error"]
            assert (answer.status, error["code"]) == (status, status)
            assert said in error["message"]
    assert came() == before
    assert before["most"] <= LIMIT
    assert server.good() == 200
    assert came()["came"] == before["came"] + 1
