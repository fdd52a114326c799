"""Any bytes may be sent to a hub's control socket: it answers proper requests, records keep flowing, and it
counts the messages.
"""

import contextlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any, get_args

import msgspec
import pytest
import zmq
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import shmbridge
from shmbridge.control import messages
from shmbridge.control.server import ControlClient, RequestRefused, control_address
from shmbridge.testing import wait_until


def bounded(examples: int) -> settings:
    return settings(
        max_examples=examples,
        derandomize=True,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )


class Hub:
    """A consumer with a producer, and a socket that can send anything."""

    def __init__(self, bridge: str) -> None:
        self.bridge = bridge
        self.consumer = shmbridge.Consumer(bridge, run=shmbridge.Run())
        self.producer = shmbridge.Producer(bridge, lane_bytes="64K")
        self.context = zmq.Context()
        self.client = ControlClient(bridge, role="env", name="honest")
        self.sent = self.flowed = 0
        self.raw = self.dealer()

    def dealer(self) -> "zmq.Socket[bytes]":
        raw = self.context.socket(zmq.DEALER)
        raw.linger, raw.sndtimeo, raw.rcvtimeo = 0, 2000, 2000
        raw.connect(control_address(self.bridge))
        return raw

    def say(self, *frames: bytes) -> None:
        self.raw.send_multipart(frames)
        self.sent += 1

    def ask(self, *frames: bytes) -> list[bytes]:
        """Sends, and returns the answer, which must come."""
        while self.raw.poll(0):  # of messages that an earlier test sent
            self.raw.recv_multipart()
        self.say(*frames)
        return self.raw.recv_multipart()

    def goes_on(self) -> None:
        """Asserts that the hub answers an honest client, and that a record comes through."""
        assert isinstance(self.client.hello(timeout_s=5), messages.Welcome)
        self.producer.put({"tokens": [[self.flowed]]})
        assert self.consumer.get(timeout_s=5)["tokens"].values.tolist() == [self.flowed]
        self.flowed += 1

    def close(self) -> None:
        self.client.close()
        self.context.destroy(linger=0)
        self.producer.close()
        self.consumer.close()


@pytest.fixture(scope="module")
def hub() -> Iterator[Hub]:
    name = f"t-hostile-control-{os.getpid()}"
    hub = Hub(name)
    yield hub
    hub.close()
    shmbridge.clean(name, dry_run=False)


def connect_raw(bridge: str) -> socket.socket:
    """A connection that may stay silent."""
    deadline = time.monotonic() + 10
    while True:
        raw = socket.socket(socket.AF_UNIX)
        try:
            raw.connect(control_address(bridge).removeprefix("ipc://"))
        except OSError:
            raw.close()
            assert time.monotonic() < deadline, "nobody is let in any more"
            time.sleep(0.005)
        else:
            return raw


def head(number: object = 1, protocol: object = messages.PROTOCOL) -> bytes:
    return msgspec.msgpack.encode([protocol, number])


FRAMES = st.one_of(
    st.binary(max_size=64),
    st.sampled_from(
        [
            head(),
            head(2**64 - 1),
            head(-(2**63)),
            head(1, 2),
            head("1"),
            head(None),
            b"",
            b"\xc1",
            b"\x91" * 3000,
            b"\xdd\xff\xff\xff\xff",
        ]
    ),
    st.recursive(
        st.none()
        | st.booleans()
        | st.integers(-(2**63), 2**64 - 1)
        | st.floats()
        | st.text(max_size=8)
        | st.binary(max_size=8),
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
        max_leaves=12,
    ).map(msgspec.msgpack.encode),
)


@bounded(150)
@given(frames=st.lists(FRAMES, min_size=1, max_size=5))
def test_random_frames_are_answered_with_a_refusal(hub: Hub, frames: list[bytes]) -> None:
    _, answer = messages.decode_answer(hub.ask(*frames))
    assert isinstance(answer, messages.Refused)
    assert answer.code in (messages.MALFORMED, messages.OVERSIZED, messages.OTHER_PROTOCOL)


NUMBERS = st.one_of(
    st.sampled_from([0, 1, -1, 2**31, 2**32, 2**53, 2**62, 2**63 - 1, 2**63, 2**64 - 1, -(2**63)]),
    st.integers(-(2**63), 2**64 - 1),
)
TEXTS = st.one_of(
    st.sampled_from(["", "x", "\0", "x" * 20_000, "🙂" * 500, "../../etc", "\n\x1b[2J"]), st.text(max_size=20)
)
FLOATS = st.sampled_from(
    [0.0, -0.0, 1.0, -1.0, 0.5, 1e308, -1e308, 1e-300, float("inf"), float("-inf"), float("nan")]
)


def values_for(kind: Any) -> st.SearchStrategy[Any]:
    """Wild values of the right type, so that decoding lets them through."""
    options = [each for each in (get_args(kind) or (kind,)) if each is not type(None)]
    if kind is float or float in options:
        return FLOATS
    if kind is int or int in options:
        return NUMBERS
    if kind is str or str in options:
        return TEXTS
    if kind is bool:
        return st.booleans()
    if kind is shmbridge.Run:
        fields = msgspec.structs.fields(shmbridge.Run)
        return st.fixed_dictionaries({field.name: values_for(field.type) for field in fields})
    return st.lists(NUMBERS, max_size=6)


def requests() -> st.SearchStrategy[dict[str, Any]]:
    harmless = [
        kind for kind in get_args(messages.Request) if kind not in (messages.Drain, messages.Pause)
    ]  # these two are meant to stop records
    return st.one_of(
        st.fixed_dictionaries(
            {
                "kind": st.just(kind.__name__.lower()),
                **{field.name: values_for(field.type) for field in msgspec.structs.fields(kind)},
            }
        )
        for kind in harmless
    )


@bounded(250)
@given(request=requests(), number=NUMBERS)
def test_every_request_with_extreme_values_is_answered(
    hub: Hub, request: dict[str, Any], number: int
) -> None:
    if request["kind"] == "nextshare":  # may be answered later, when there is a share: on a socket of its own
        with hub.dealer() as apart:
            apart.send_multipart([head(number), msgspec.msgpack.encode(request)])
            hub.sent += 1
            if apart.poll(3):
                messages.decode_answer(apart.recv_multipart())
        return
    answer_number, answer = messages.decode_answer(hub.ask(head(number), msgspec.msgpack.encode(request)))
    assert isinstance(answer, get_args(messages.Answer))
    assert answer_number in (number, 0)


def test_the_hub_goes_on_after_all_messages(hub: Hub) -> None:
    hub.goes_on()
    with pytest.raises(RequestRefused):
        hub.client.request(messages.StatusRequest(-12345))
    assert isinstance(hub.client.request(messages.RunInfoRequest()), messages.RunInfo)
    hub.consumer.publish_policy_version(hub.consumer.policy_version)


def test_a_run_at_the_end_of_all_numbers_does_not_end_the_answers(bridge) -> None:
    """A step after the last number msgpack can write."""
    with contextlib.closing(Hub(bridge)) as hub:
        end_of_numbers(hub)


def end_of_numbers(hub: Hub) -> None:
    hub.ask(head(), msgspec.msgpack.encode({"kind": "announcerun", "run": {"starting_step": 2**64 - 1}}))
    hub.producer.put({"tokens": [[1]]})
    next(hub.consumer.batches(groups=1, prefetch=0)).release()
    for request in (messages.RunInfoRequest(), messages.Register("x", 1, 1), messages.Hello("env", "x", 1)):
        messages.decode_answer(hub.ask(*messages.encode(1, request)))
    hub.consumer.announce_run(shmbridge.Run())
    hub.goes_on()


def test_huge_messages_are_refused_or_cut_off(hub: Hub) -> None:
    _, answer = messages.decode_answer(hub.ask(head(), b"\xc4" + bytes(messages.MAX_MESSAGE_BYTES)))
    assert answer.code == messages.OVERSIZED
    for _ in range(3):
        cut = hub.dealer()
        cut.send_multipart([head(), bytes(messages.MAX_MESSAGE_BYTES * 20)])
        cut.close()
    hub.goes_on()


def test_one_request_a_thousand_times_changes_nothing_more(hub: Hub) -> None:
    frames = messages.encode(7, messages.Register("again", 10, 2, producer_id="the-same"))
    answers = {msgspec.msgpack.encode(messages.decode_answer(hub.ask(*frames))[1].env_id) for _ in range(200)}
    assert len(answers) == 1
    hub.goes_on()


def test_answers_that_nobody_reads(hub: Hub) -> None:
    """The asker never receives: its answers are dropped once the pipe is full, and no other client waits."""
    deaf = hub.dealer()
    deaf.rcvhwm, deaf.sndtimeo = 1, 0
    frames = messages.encode(1, messages.RunInfoRequest())
    for _ in range(6000):
        try:
            deaf.send_multipart(frames)
        except zmq.Again:
            break
    hub.goes_on()
    deaf.close()


def test_raw_bytes_that_are_no_zeromq(hub: Hub) -> None:
    for garbage in (
        b"",
        b"\0",
        b"GET / HTTP/1.1\r\n\r\n",
        b"\xff" * 9,
        b"\xff\0\0\0\0\0\0\0\x01\x7f",
        b"\xff" + b"\0" * 8 + b"\x7f\x03" + os.urandom(400),
    ):
        with connect_raw(hub.bridge) as raw:
            raw.sendall(garbage)
    hub.goes_on()


def test_many_connections_that_say_nothing_and_vanish(hub: Hub) -> None:
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        silent = [connect_raw(hub.bridge) for _ in range(100)]
        for each in silent:
            each.close()
    hub.goes_on()
    wait_until(lambda: len(os.listdir("/proc/self/fd")) <= before + 4, timeout_s=10)


LEAK = """
import os, resource, subprocess, sys
import shmbridge
from shmbridge.control.server import control_address
resource.setrlimit(resource.RLIMIT_NOFILE, (256, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
leaker = '''
import resource, socket, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
held = []
while True:
    one = socket.socket(socket.AF_UNIX)
    try: one.connect(sys.argv[1])
    except OSError: break
    held.append(one)
    if len(held) == 240: break
print(len(held), flush=True); sys.stdin.readline()
'''
producer = shmbridge.Producer(bridge, lane_bytes="64K")
with shmbridge.Consumer(bridge, lanes=4) as consumer, producer:
    for _ in range(2):
        command = [sys.executable, "-c", leaker, control_address(bridge)[6:]]
        child = subprocess.Popen(command, stdin=-1, stdout=-1)
        assert int(child.stdout.readline()) == 240
        producer.put({"tokens": [[1]]})
        assert consumer.get(5)["tokens"].values.tolist() == [1]
        child.communicate(b"end\\n")
print("survived", flush=True)
"""


def test_a_peer_that_leaks_connections_does_not_end_the_learner(bridge) -> None:
    """libzmq aborts a process that has no descriptor left for a connection it accepts, so the hub must have
    more than one peer can use up.
    """
    ended = subprocess.run(
        [sys.executable, "-c", f"bridge = {bridge!r}\n{LEAK}"], capture_output=True, text=True, timeout=60
    )
    assert ended.stdout == "survived\n", f"the hub ended with {ended.returncode}: {ended.stderr[-300:]}"


def test_messages_that_were_sent_were_counted(bridge) -> None:
    with contextlib.closing(Hub(bridge)) as hub:
        for frames in ([b""], [b"x", b"y"], [head(), b"\xc1"], [head(1, 99), b""]):
            hub.ask(*frames)
        hub.ask(head(), bytes(messages.MAX_MESSAGE_BYTES + 1))
        hub.ask(*messages.encode(1, messages.StatusRequest(1)))
        server = hub.consumer._hub.server
        assert server.stats()["malformed_total"] == 4
        assert server.stats()["oversized_total"] == 1
        assert server.stats()["refused_total"] == 1
        assert server.stats()["requests_total"] == hub.sent
