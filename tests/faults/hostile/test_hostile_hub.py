"""A false hub answers on the control socket: clients raise a typed error within their timeout, whatever it
sends or omits.
"""

import asyncio
import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator

import msgspec
import pytest
import zmq
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import shmbridge
from shmbridge.control import messages
from shmbridge.control.server import AsyncControlClient, ControlClient, control_address
from shmbridge.segments import socket_directory

TIMEOUT_S = 0.3
SLACK_S = 1.0
# peer's request -> what is sent back, message by message
Say = Callable[[bytes, list[bytes]], list[list[bytes]]]


class FalseHub:
    """A ROUTER at the bridge's address that sends scripted answers."""

    def __init__(self, bridge: str) -> None:
        self.bridge = bridge
        socket_directory(bridge).mkdir(mode=0o700)
        self.say: Say = lambda _, __: []
        self._context = zmq.Context()
        self._router = self._context.socket(zmq.ROUTER)
        self._router.linger = 0
        self._router.bind(control_address(bridge))
        self._ending, self.answered = False, 0
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        while not self._ending:
            if self._router.poll(20):
                peer, *frames = self._router.recv_multipart()
                for message in self.say(peer, frames):
                    with contextlib.suppress(zmq.Again):
                        self._router.send_multipart([peer, *message], zmq.NOBLOCK)
                self.answered += 1

    def close(self) -> None:
        self._ending = True
        self._thread.join()
        self._context.destroy(linger=0)
        os.unlink(control_address(self.bridge).removeprefix("ipc://"))
        socket_directory(self.bridge).rmdir()


@pytest.fixture(scope="module")
def false_hub() -> Iterator[FalseHub]:
    hub = FalseHub(f"t-hostile-hub-{os.getpid()}")
    yield hub
    hub.close()


@pytest.fixture(scope="module")
def clients(false_hub: FalseHub) -> Iterator[list[Callable[[messages.Request], object]]]:
    """Both clients, as calls with TIMEOUT_S."""
    client = ControlClient(false_hub.bridge, role="env", name="x")
    loop = asyncio.new_event_loop()

    async def make() -> AsyncControlClient:
        return AsyncControlClient(false_hub.bridge, role="env", name="y")

    later = loop.run_until_complete(make())
    yield [
        lambda request: client.request(request, TIMEOUT_S),
        lambda request: loop.run_until_complete(later.request(request, TIMEOUT_S)),
    ]
    client.close()
    later.close()
    loop.close()


def ask(client: Callable[[messages.Request], object], request: messages.Request) -> object:
    """The answer, or the typed error; within the timeout."""
    began = time.monotonic()
    try:
        return client(request)
    except shmbridge.ShmBridgeError as error:
        return error
    finally:
        took = time.monotonic() - began
        assert took < TIMEOUT_S + SLACK_S, f"{took:.2f} s for a timeout of {TIMEOUT_S} s"


def head(number: object) -> bytes:
    return msgspec.msgpack.encode([messages.PROTOCOL, number])


ANSWERS = st.lists(
    st.one_of(
        st.lists(st.binary(max_size=40), min_size=1, max_size=4),
        st.tuples(st.just(b"ECHO"), st.binary(max_size=60)).map(list),
        st.tuples(
            st.just(b"ECHO"),
            st.sampled_from(
                [
                    *(
                        msgspec.msgpack.encode({"kind": kind})
                        for kind in ("ack", "status", "registered", "refused")
                    ),
                    b"\x91" * 4000,
                ]
            ),
        ).map(list),
    ),
    max_size=4,
)


@settings(
    derandomize=True, database=None, max_examples=40, deadline=None, suppress_health_check=list(HealthCheck)
)
@given(answers=ANSWERS)
def test_garbage_is_a_typed_error(false_hub: FalseHub, clients, answers: list[list[bytes]]) -> None:
    """ECHO stands for the request's own header."""
    false_hub.say = lambda _, frames: [
        [frames[0] if frame == b"ECHO" else frame for frame in answer] for answer in answers
    ]
    for client in clients:
        found = ask(client, messages.Hello("env", "x", 1))
        assert isinstance(found, messages.Welcome | shmbridge.ShmBridgeError), found


@pytest.mark.parametrize("what", ["silence", "other numbers", "huge", "many frames", "empty frames"])
def test_no_client_waits_beyond_its_timeout(false_hub: FalseHub, clients, what: str) -> None:
    ack = msgspec.msgpack.encode({"kind": "ack"})
    false_hub.say = {
        "silence": lambda _, __: [],
        "other numbers": lambda _, __: [[head(2**64 - 1 - number), ack] for number in range(500)],
        "huge": lambda _, frames: [[frames[0], bytes(8 << 20)]],
        "many frames": lambda _, frames: [[*frames, *[b"x"] * 2000]],
        "empty frames": lambda _, __: [[b""], [b"", b""]],
    }[what]
    for client in clients:
        assert isinstance(ask(client, messages.RunInfoRequest()), shmbridge.ShmBridgeError)


WRONG_KIND = [
    (messages.Register("x", 1, 1), messages.Ack()),
    (messages.StatusRequest(1), messages.Ack()),
    (messages.RunInfoRequest(), messages.WaitForRun(1)),
    (messages.Hello("env", "x", 1), messages.RunInfo(None, 0, 1)),
    (messages.Pause(), messages.RunInfo(None, 0, 1)),
]


@pytest.mark.parametrize(("request_", "answer"), WRONG_KIND, ids=lambda each: type(each).__name__)
def test_an_answer_to_another_question_is_a_typed_error(
    false_hub: FalseHub, clients, request_, answer
) -> None:
    """The caller never gets an answer without `env_id`."""
    false_hub.say = lambda _, frames: [[frames[0], msgspec.msgpack.encode(answer)]]
    for client in clients:
        found, answered = ask(client, request_), false_hub.answered
        assert isinstance(found, shmbridge.ShmBridgeError), found
        assert not isinstance(found, shmbridge.NoConsumer), (
            f"it was not heard, though {answered} were answered"
        )


def test_a_hub_that_vanishes_between_question_and_sending(false_hub: FalseHub, monkeypatch) -> None:
    """The socket can send, and then the hub is gone: the client must not wait for ever."""
    client = ControlClient(f"{false_hub.bridge}-gone", role="env", name="x")
    socket = client._socket

    class Optimist:
        def __getattr__(self, name: str) -> object:
            return getattr(socket, name)

        def poll(self, timeout_ms: int, events: int) -> int:
            return events if events == zmq.POLLOUT else socket.poll(timeout_ms, events)

    monkeypatch.setattr(client, "_socket", Optimist())
    ended = threading.Event()

    def request() -> None:
        try:
            client.request(messages.RunInfoRequest(), TIMEOUT_S)
        except shmbridge.ShmBridgeError:
            ended.set()

    thread = threading.Thread(target=request, daemon=True)
    thread.start()
    thread.join(TIMEOUT_S + SLACK_S)
    assert ended.is_set(), "it still waits"
    client.close()
