"""The HTTP server for scrapes, under clients that are wrong, slow, many or gone."""

import http.client
import os
import re
import signal
import socket
import struct
import subprocess
import sys
import threading
import urllib.request

import pytest

from shmbridge.cli.bridges import _address
from shmbridge.testing import wait_until
from shmbridge.watch.exporter import Exporter, ScrapeServer


@pytest.fixture
def serve():
    """Starts a server on an address; ends it after the test."""
    started = []

    def start(exporter, host="127.0.0.1", **options):
        server = ScrapeServer((host, 0), exporter, **options)
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        started.append((server, thread))
        return server

    yield start
    for server, thread in started:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.fixture
def server(serve, bridge):
    return serve(Exporter(lambda: [bridge]))


def asked(server, text):
    """What comes back for some bytes."""
    with socket.create_connection(("127.0.0.1", server.server_port), timeout=10) as client:
        client.sendall(text)
        with client.makefile("rb") as answer:
            return answer.read()


def test_head_has_the_length_and_no_body(server, make_producer):
    make_producer()
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=10)
    connection.request("HEAD", "/metrics")
    answer = connection.getresponse()
    assert (answer.status, answer.read()) == (200, b"")
    assert int(answer.headers["content-length"]) > 100
    connection.close()


@pytest.mark.parametrize(
    ("request_", "says"),
    [
        (b"POST /metrics HTTP/1.1\r\nContent-Length: 3\r\n\r\nabc", "POST is not taken here -> send GET"),
        (b"GET /" + b"a" * 70_000 + b" HTTP/1.1\r\n\r\n", "414"),
        (b"\x00\xff\xfe nonsense\r\n\r\n", "400"),
        (b"GET /metrics/ HTTP/1.1\r\n\r\n", "/metrics or /healthz"),
    ],
)
def test_a_wrong_request_gets_a_plain_sentence(server, request_, says):
    answer = asked(server, request_).decode("latin-1")
    assert says in answer
    assert "<html" not in answer


def test_clients_that_go_away_leave_no_traceback(server, make_producer, capfd):
    make_producer()
    for _ in range(10):
        with socket.create_connection(("127.0.0.1", server.server_port), timeout=10) as client:
            client.sendall(b"GET /metrics HTTP/1.1\r\n\r\n")
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # a reset
    assert b"shmbridge_" in asked(server, b"GET /metrics HTTP/1.1\r\n\r\n")
    wait_until(lambda: threading.active_count() < 5)
    assert capfd.readouterr().err == ""


def test_a_look_that_fails_is_said(serve, capfd):
    def broken():
        raise OSError(24, "Too many open files")

    answer = asked(serve(Exporter(broken)), b"GET /metrics HTTP/1.1\r\n\r\n")
    assert answer.startswith(b"HTTP/1.0 500")
    assert b"Too many open files" in answer
    assert "Traceback" not in capfd.readouterr().err


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("127.0.0.1:9400", ("127.0.0.1", 9400)),
        (":9400", ("127.0.0.1", 9400)),
        ("[::1]:9400", ("::1", 9400)),
        ("[::]:0", ("::", 0)),
    ],
)
def test_addresses(text, address):
    assert _address(text) == address


@pytest.mark.parametrize(
    "text", ["9400", "host", "::1:9400", "[::1]9400", "h:-1", "h:65536", "h:²", "[::1:9"]
)
def test_what_is_no_address(text):
    with pytest.raises(Exception, match="is not HOST:PORT"):
        _address(text)


def has_ipv6():
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


def test_ipv6(bridge, make_producer):
    if not has_ipv6():
        _refused_without_ipv6(bridge)
        return
    make_producer(env_name="math").put({"tokens": [[1]]})
    command = [sys.executable, "-m", "shmbridge.cli", "inspect", bridge, "--listen", "[::1]:0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as serving:
        url = re.search(r"http://\S+", serving.stdout.readline())[0]
        assert url.startswith("http://[::1]:")
        with urllib.request.urlopen(url, timeout=10) as answer:
            assert b'environment="math"' in answer.read()
        os.kill(serving.pid, signal.SIGINT)
        assert serving.wait(10) == 0


def _refused_without_ipv6(bridge):
    done = subprocess.run(
        [sys.executable, "-m", "shmbridge.cli", "inspect", bridge, "--listen", "[::1]:0"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert done.stderr.startswith("cannot listen on [::1]:0: ")
