"""A batch is served again until it was read, and a post is taken once, whatever happens to the connection."""

from __future__ import annotations

import errno
import gzip
import itertools
import json
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import requests
from gateway_clients import Api, GatewayProcess, RawClient, group, marks

from shmbridge.httpd.server import Lingering

# so that a batch does not fit into the buffers of a socket
LONG = {"advantages": [[0.123456789 + at for at in range(20_000)]] * 4}
MODES = pytest.mark.parametrize("mode", ["default", "strict"])
JSON, GZIP, CLOSE = "content-type: application/json", "accept-encoding: gzip", "connection: close"


@pytest.fixture
def api(shared_gateway: Callable[..., GatewayProcess], mode: str) -> GatewayProcess:
    gateway = shared_gateway("--compat", mode, lane_bytes="16M")
    gateway.start(batch_size=4)
    return gateway


def ask_for_batch(api: Api, *headers: str) -> RawClient:
    client = RawClient(api)
    client.ask("/batch", *headers)
    return client


def drop_before_the_answer(api: Api) -> bytes:
    client = ask_for_batch(api)
    client.close()
    return b""


def drop_after_the_head(api: Api) -> bytes:
    client = ask_for_batch(api)
    client.read_head()
    client.close()
    return b""


def drop_in_the_middle(api: Api) -> bytes:
    client = ask_for_batch(api)
    size = client.read_head()
    while len(client.received) < size // 2:
        client._more()
    client.close()
    return client.received


def drop_one_byte_before_the_end(api: Api) -> bytes:
    client = ask_for_batch(api)
    size = client.read_head()
    while len(client.received) < size - 1:
        client.received += client.socket.recv(min(65536, size - 1 - len(client.received)))
    client.close()
    return client.received


def reset_after_the_head(api: Api) -> bytes:
    client = ask_for_batch(api)
    client.read_head()
    client.reset()
    return b""


def killed_while_it_reads(api: Api) -> bytes:
    code = (
        "import socket, sys; s = socket.create_connection((sys.argv[1], int(sys.argv[2])));s.sendall(b'GET "
        "/batch HTTP/1.1\\r\\nhost: h\\r\\n\\r\\n'); s.recv(1000); print('got some', flush=True); "
        "sys.stdin.read()"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", code, *map(str, api.address)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert child.stdout.readline() == b"got some\n"
    child.send_signal(signal.SIGKILL)
    child.wait()
    return b""


WAYS = [
    drop_before_the_answer,
    drop_after_the_head,
    drop_in_the_middle,
    drop_one_byte_before_the_end,
    reset_after_the_head,
    killed_while_it_reads,
]


@MODES
def test_a_batch_that_was_not_read_is_the_next_again(api: GatewayProcess):
    """One after the other, in every way: the same bytes come again, and then everything else, once."""
    for mark in range(len(WAYS) + 1):
        api.put(mark, **LONG)
    order: list[int] = []
    for way in WAYS:
        before = api.stats()
        begun = way(api)
        client = ask_for_batch(api)
        whole = client.read_answer()
        client.close()
        assert whole.startswith(begun), way.__name__
        order += marks(json.loads(whole)["batch"])
        api.until("batches_out", 0)
        after = api.stats()
        assert after["batches_total"] - before["batches_total"] == 1, way.__name__
        again = after["batches_redelivered_total"] - before["batches_redelivered_total"]
        assert again == 1 or (again == 0 and way is drop_before_the_answer), way.__name__
        assert after["bridge_released_total"] - before["bridge_released_total"] == 1
    order += api.batch_marks()
    assert sorted(order) == list(range(len(WAYS) + 1))
    assert api.batch_marks() is None


@MODES
def test_a_batch_that_was_read_never_comes_again(api: GatewayProcess):
    """Short or long, gzipped or not, whichever side closes first."""
    ways = itertools.product([(), (GZIP,), (CLOSE,), (CLOSE, GZIP)], [{}, LONG, {}])
    for mark, (headers, long) in enumerate(ways):
        api.put(mark, **long)
        client = ask_for_batch(api, *headers)
        body = client.read_answer()
        client.close()
        packed = "content-encoding: gzip" in client.head
        assert packed == (GZIP in headers)
        assert marks(json.loads(gzip.decompress(body) if packed else body)["batch"]) == [mark]
        api.until("batches_out", 0)
    assert api.stats()["batches_redelivered_total"] == 0
    assert api.stats()["bridge_held"] == 0


@MODES
def test_closing_without_reading_after_connection_close(api: GatewayProcess):
    """The server has shut down its side by then, and still sees the client's close."""
    api.put(0)
    client = ask_for_batch(api, "connection: close")
    client.socket.recv(10)
    time.sleep(0.05)
    client.close()
    assert api.until_batch() == [0]
    assert api.stats()["batches_redelivered_total"] == 1


@pytest.mark.parametrize("mode", ["default"])
@pytest.mark.parametrize("numbers", [2_000, 100_000], ids=["in the kernel", "in the gateway"])
def test_an_orderly_end_with_bytes_under_way_is_no_proof(api: GatewayProcess, numbers: int):
    """The peer's FIN comes while bytes are not yet acknowledged, so the peer has not read them."""
    api.put(0, advantages=[[0.123456789] * numbers] * 4)
    client = RawClient(api, receive_buffer=4096)
    client.ask("/batch")
    client.socket.recv(10)
    client.socket.shutdown(socket.SHUT_WR)
    assert api.until_batch() == [0]
    client.close()
    assert api.stats()["batches_redelivered_total"] == 1


@MODES
def test_a_session_proves_each_batch_by_the_next_request(api: GatewayProcess):
    """A batch on a connection that stays open is kept: not released, and not given to another trainer."""
    for mark in range(3):
        api.put(mark)
    first, second = requests.Session(), requests.Session()
    got = marks(first.get(api.url + "/batch").json()["batch"])
    assert api.stats()["batches_out"] == 1
    got += marks(second.get(api.url + "/batch").json()["batch"])
    assert api.stats()["batches_out"] == 2
    got += marks(first.get(api.url + "/batch").json()["batch"])
    assert api.stats()["batches_out"] == 2
    assert first.get(api.url + "/batch").json()["batch"] is None
    first.close()
    second.close()
    api.until("batches_out", 0)
    assert sorted(got) == [0, 1, 2]
    assert api.stats()["batches_redelivered_total"] == 0


@MODES
def test_several_lost_batches_come_again_in_their_order(api: GatewayProcess):
    for mark in range(3):
        api.put(mark)
    clients = [ask_for_batch(api) for _ in range(3)]
    sizes = [client.read_head() for client in clients]
    assert all(sizes)
    first = [api.stats()[key] for key in ("batches_out", "batches_to_serve_again")]
    for client in reversed(clients):
        client.reset()
    api.until("batches_to_serve_again", 3)
    assert first == [3, 0]
    served = [api.batch_marks() for _ in range(3)]
    assert served == [[0], [1], [2]] or served == [[2], [1], [0]]  # strict hands the newest out first
    api.until("batches_out", 0)
    assert api.stats()["bridge_held"] == 0


def lossy_post(api: Api, path: str, body: Any, how: str) -> None:
    """Posts, and loses the answer."""
    client = RawClient(api)
    client.ask(path, JSON, body=json.dumps(body).encode(), method="POST")
    if how == "reset":
        client.read_head()
        client.reset()
    else:  # before there is one
        client.close()


@MODES
@pytest.mark.parametrize("how", ["reset", "close"])
def test_a_post_whose_answer_was_lost_is_taken_once(api: GatewayProcess, how: str):
    lossy_post(api, "/scored_data", group(0), how)
    assert api.put(0) == {"status": "received"}
    lossy_post(api, "/scored_data_list", [group(1), group(2)], how)
    assert api.post("/scored_data_list", [group(1), group(2)]).json() == {
        "status": "received",
        "groups_processed": 2,
    }
    api.put(1)  # not the same body: a new group
    assert sorted(mark for _ in range(4) for mark in api.batch_marks()) == [0, 1, 1, 2]
    assert api.batch_marks() is None
    # a client that closes at once may not have been heard at all
    assert how == "close" or api.stats()["posts_repeated_total"] == 2


@pytest.mark.parametrize("mode", ["strict"])
def test_a_repeated_post_is_answered_as_the_first_was(api: GatewayProcess):
    """A group of an unusual size is buffered, whether or not its response is read."""
    env_id = api.register_env(group_size=4)["env_id"]
    posted = group(0, 3, env_id=env_id)
    lossy_post(api, "/scored_data", posted, "reset")
    assert api.post("/scored_data", posted).json() == {"status": "buffered", "buffer_size": 3}
    both = [group(1, env_id=env_id), group(2, 2, env_id=env_id)]
    lossy_post(api, "/scored_data_list", both, "reset")
    buffered = {"status": "received", "groups_processed": 2, "buffered": 1, "last_buffer_size": 5}
    assert api.post("/scored_data_list", both).json() == buffered
    assert api.stats()["posts_repeated_total"] == 2


@MODES
def test_equal_posts_that_were_answered_are_two(api: GatewayProcess):
    """They are two also over one connection, and over two that stay open."""
    one, other = requests.Session(), requests.Session()
    for session in (one, one, other):
        assert session.post(api.url + "/scored_data", json=group(5)).json() == {"status": "received"}
    one.close()
    other.close()
    api.put(5)
    assert [api.batch_marks() for _ in range(4)] == [[5]] * 4
    assert api.stats()["posts_repeated_total"] == 0


def test_trainers_that_are_killed_all_the_time(shared_gateway: Callable[..., GatewayProcess]):
    """Six posters, a trainer that drops every second answer: every group is read once."""
    api = shared_gateway("--compat", "default", lane_bytes="16M")
    api.start(batch_size=8)
    posters = [
        threading.Thread(target=lambda n=n: [api.put(100 * n + at) for at in range(20)]) for n in range(6)
    ]
    for poster in posters:
        poster.start()
    read: list[int] = []
    deadline = time.monotonic() + 60
    for turn in itertools.count():
        assert time.monotonic() < deadline, (len(read), api.stats())
        client = ask_for_batch(api)
        if turn % 2:
            client.socket.recv(20)  # of an answer that has more
            client.reset() if turn % 4 == 1 else client.close()
            continue
        batch = json.loads(client.read_answer())["batch"]
        client.close()
        read += marks(batch or [])
        if len(read) >= 120:
            break
    for poster in posters:
        poster.join()
    assert sorted(read) == sorted(100 * n + at for n in range(6) for at in range(20))
    api.until("batches_out", 0)
    assert api.stats()["bridge_held"] == 0
    assert api.stats()["batches_redelivered_total"] > 0


def test_a_connection_that_is_reset_when_its_answer_ends_is_given_up():
    """The end of our stream cannot be sent any more: the connection is dropped, and the batch comes again."""

    class Reset:
        aborted = False

        def is_closing(self) -> bool:
            return False

        def write_eof(self) -> None:
            raise OSError(errno.ENOTCONN, "Transport endpoint is not connected")

        def abort(self) -> None:
            self.aborted = True

    class Connection:
        is_proving = True

    transport = Reset()
    Lingering(transport, Connection()).close()  # type: ignore[arg-type]
    assert transport.aborted
