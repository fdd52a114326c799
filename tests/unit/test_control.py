"""The control plane over its real socket: answers, restarts, garbage, and who is admitted."""

import asyncio
import os
import shutil
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import zmq

from shmbridge import messages
from shmbridge.config import Run
from shmbridge.control import (
    AsyncControlClient,
    ControlClient,
    ControlServer,
    RequestRefused,
    control_address,
)
from shmbridge.environments import ENV_IDS_PER_HUB, Environments
from shmbridge.errors import Closed, NoConsumer, ShmPermission
from shmbridge.messages import Register, StatusRequest
from shmbridge.segment import socket_directory

RUN = Run(batch_size=16, max_token_len=2048, num_steps=50)


@dataclass
class FakeHub:
    """A hub that is only its words."""

    hub_epoch: int = 1
    run: Run | None = RUN
    current_step: int = 0
    policy_version: int = -1
    paused: bool = False
    draining: bool = False
    queued: dict[str, int] = field(default_factory=dict)
    live: set[str] = field(default_factory=set)
    announced: int = 0

    def announce_run(self, run: Run) -> None:
        self.run = run
        self.announced += 1

    def publish_policy_version(self, version: int) -> None:
        if version < 0:
            raise ValueError(f"version {version}")
        self.policy_version = version

    def pause(self) -> None:
        self.paused = True

    def resume(self) -> None:
        self.paused = False

    def drain(self) -> None:
        self.draining = True

    def queue_groups(self, producer_id: str | None = None) -> int:
        return sum(self.queued.values()) if producer_id is None else self.queued.get(producer_id, 0)

    def producer_live(self, producer_id: str) -> bool:
        return producer_id in self.live


def env(name: str, producer_id: str, **changes: object) -> Register:
    fields = {"max_token_length": 512, "group_size": 4, "producer_id": producer_id}
    return Register(desired_name=name, **(fields | changes))


def eventually(holds: Callable[[], bool], timeout_s: float = 10.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.01)


@pytest.fixture
def bridge() -> Iterator[str]:
    name = f"ctl-{os.getpid()}-{time.monotonic_ns()}"
    yield name
    assert not socket_directory(name).exists()


@pytest.fixture
def hub() -> FakeHub:
    return FakeHub()


@pytest.fixture
def server(bridge: str, hub: FakeHub) -> Iterator[ControlServer]:
    server = ControlServer(bridge, hub)
    yield server
    server.close()


@pytest.fixture
def client(bridge: str, server: ControlServer) -> Iterator[ControlClient]:
    with ControlClient(bridge, role="test", name="t") as client:
        yield client


# --- conversations ----------------------------------------------------------------------------------------


def test_hello_is_answered_by_the_hub(client: ControlClient, hub: FakeHub) -> None:
    hub.policy_version = 12
    assert client.hello() == messages.Welcome(os.getpid(), hub_epoch=1, policy_version=12, run=RUN)


def test_a_learner_steers_the_hub(client: ControlClient, hub: FakeHub) -> None:
    run = Run(batch_size=32, num_steps=7)
    for request in (
        messages.AnnounceRun(run),
        messages.SetPolicyVersion(3),
        messages.Pause(),
        messages.Drain(),
    ):
        assert client.request(request) == messages.Ack()
    assert (hub.run, hub.policy_version, hub.paused, hub.draining) == (run, 3, True, True)
    client.request(messages.Resume())
    assert not hub.paused
    assert client.request(messages.RunInfoRequest()) == messages.RunInfo(run, current_step=0, hub_epoch=1)


def test_an_environment_waits_for_a_run_and_is_then_told_it(client: ControlClient, hub: FakeHub) -> None:
    hub.run = None
    assert client.request(env("gsm8k", "a")) == messages.WaitForRun(hub_epoch=1)
    hub.run, hub.current_step = RUN, 5
    admitted = client.request(env("gsm8k", "a"))
    assert isinstance(admitted, messages.Registered)
    assert (admitted.env_id, admitted.wandb_name, admitted.run, admitted.current_step) == (
        0,
        "gsm8k_0",
        RUN,
        5,
    )


@pytest.mark.parametrize(
    "nonsense",
    [
        {"group_size": 0},
        {"max_token_length": -1},
        {"weight": float("nan")},
        {"weight": float("inf")},
        {"min_batch_allocation": 1.5},
        {"min_batch_allocation": float("nan")},
    ],
    ids=str,
)
def test_an_environment_with_meaningless_numbers_is_refused(client: ControlClient, nonsense: dict) -> None:
    with pytest.raises(RequestRefused) as caught:
        client.request(env("gsm8k", "a", **nonsense))
    assert caught.value.reason == messages.BAD_VALUE
    assert caught.value.hint


def test_an_unknown_environment_is_refused(client: ControlClient) -> None:
    with pytest.raises(RequestRefused) as caught:
        client.request(StatusRequest(77))
    assert caught.value.reason == messages.UNKNOWN_ENV


def test_a_value_the_hub_will_not_take_is_refused(client: ControlClient) -> None:
    with pytest.raises(RequestRefused, match="version -4") as caught:
        client.request(messages.SetPolicyVersion(-4))
    assert caught.value.reason == messages.BAD_VALUE


def test_a_run_announced_again_does_not_begin_again(client: ControlClient, hub: FakeHub) -> None:
    client.request(messages.AnnounceRun(Run(batch_size=32)))
    client.request(messages.AnnounceRun(Run(batch_size=32)))
    assert hub.announced == 1


def test_a_hub_that_raises_is_an_answer_and_not_the_end(
    client: ControlClient, server: ControlServer, hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(FakeHub, "pause")
    with pytest.raises(RequestRefused, match="AttributeError") as caught:
        client.request(messages.Pause())
    assert caught.value.reason == messages.INTERNAL
    assert isinstance(client.hello(), messages.Welcome)
    assert server.stats()["refused_total"] == 1


# --- who is not there, or comes back ----------------------------------------------------------------------


def test_no_consumer_is_a_timeout_with_a_hint(bridge: str) -> None:
    began = time.monotonic()
    with (
        ControlClient(bridge, role="test", name="t") as client,
        pytest.raises(NoConsumer, match=r"0\.2 s") as caught,
    ):
        client.request(messages.RunInfoRequest(), timeout_s=0.2)
    assert isinstance(caught.value, TimeoutError)
    assert bridge in caught.value.hint
    assert time.monotonic() - began >= 0.2


def test_a_client_may_be_there_before_the_hub(bridge: str, hub: FakeHub) -> None:
    with ControlClient(bridge, role="test", name="t") as client:
        starting = threading.Timer(0.3, lambda: servers.append(ControlServer(bridge, hub)))
        servers: list[ControlServer] = []
        starting.start()
        assert isinstance(client.hello(timeout_s=10), messages.Welcome)
        starting.join()
        servers[0].close()


def test_an_environment_keeps_number_and_name_across_hubs(bridge: str) -> None:
    first = ControlServer(bridge, FakeHub(hub_epoch=1))
    with (
        ControlClient(bridge, role="env", name="old") as old,
        ControlClient(bridge, role="env", name="new") as new,
    ):
        admitted = old.request(env("gsm8k", "a"))
        first.close()
        hub = FakeHub(hub_epoch=2, current_step=9, queued={"a": 3, "b": 1})
        second = ControlServer(bridge, hub)
        newcomer = new.request(env("gsm8k", "b"))
        status = old.request(StatusRequest(admitted.env_id))
        assert (newcomer.env_id, admitted.env_id) == (ENV_IDS_PER_HUB, 0)
        assert (status.current_step, status.self_queue_groups, status.hub_epoch) == (9, 3, 2)
        assert second.stats()["environments"] == 2
        second.close()


def test_a_hub_without_a_run_holds_an_environment_it_does_not_know(bridge: str) -> None:
    first = ControlServer(bridge, FakeHub(hub_epoch=1))
    with ControlClient(bridge, role="env", name="e") as client:
        env_id = client.request(env("gsm8k", "a")).env_id
        first.close()
        hub = FakeHub(hub_epoch=2, run=None)
        second = ControlServer(bridge, hub)
        assert client.request(StatusRequest(env_id)) == messages.WaitForRun(hub_epoch=2)
        hub.run = RUN
        assert client.request(StatusRequest(env_id)).hub_epoch == 2
        second.close()


HUB_PROCESS = """
import sys, time
sys.path.insert(0, {tests!r})
from test_control import FakeHub
from shmbridge.control import ControlServer
server = ControlServer({bridge!r}, FakeHub(hub_epoch={epoch}))
print("up", flush=True)
time.sleep(600)
"""


def hub_process(bridge: str, epoch: int) -> subprocess.Popen[bytes]:
    code = HUB_PROCESS.format(tests=str(Path(__file__).parent), bridge=bridge, epoch=epoch)
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"up\n"
    return process


def test_the_socket_of_a_killed_hub_is_taken_over(bridge: str) -> None:
    killed = hub_process(bridge, epoch=1)
    with ControlClient(bridge, role="test", name="t") as client:
        assert client.hello(timeout_s=10).hub_epoch == 1
        killed.send_signal(signal.SIGKILL)
        killed.wait()
        assert socket_directory(bridge).exists()
        successor = ControlServer(bridge, FakeHub(hub_epoch=2))
        assert client.hello(timeout_s=10).hub_epoch == 2
        successor.close()


def test_a_stopped_hub_is_waited_for_and_its_late_answers_are_dropped(bridge: str) -> None:
    stopped = hub_process(bridge, epoch=1)
    try:
        with ControlClient(bridge, role="test", name="t") as client:
            assert isinstance(client.hello(timeout_s=10), messages.Welcome)
            stopped.send_signal(signal.SIGSTOP)
            with pytest.raises(NoConsumer):
                client.request(messages.RunInfoRequest(), timeout_s=0.7)
            stopped.send_signal(signal.SIGCONT)
            assert isinstance(client.request(messages.Pause(), timeout_s=10), messages.Ack)
            assert isinstance(client.hello(timeout_s=10), messages.Welcome)
    finally:
        stopped.kill()
        stopped.wait()
        ControlServer(bridge, FakeHub()).close()


# --- the directory ----------------------------------------------------------------------------------------


def test_the_socket_lies_in_an_owner_only_directory(server: ControlServer, bridge: str) -> None:
    directory = socket_directory(bridge)
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    assert control_address(bridge) == f"ipc://{directory}/control.sock"
    server.close()
    server.close()
    assert not directory.exists()


def test_a_directory_that_was_open_is_closed(bridge: str, hub: FakeHub) -> None:
    socket_directory(bridge).mkdir(mode=0o777)
    server = ControlServer(bridge, hub)
    assert stat.S_IMODE(socket_directory(bridge).stat().st_mode) == 0o700
    server.close()


def test_what_is_no_directory_is_not_touched(bridge: str, hub: FakeHub, tmp_path: Path) -> None:
    socket_directory(bridge).symlink_to(tmp_path)
    with pytest.raises(ShmPermission):
        ControlServer(bridge, hub)
    socket_directory(bridge).unlink()
    assert list(tmp_path.iterdir()) == []


def test_the_longest_bridge_name_fits_a_socket_address(hub: FakeHub) -> None:
    name = f"{os.getpid():x}".ljust(48, "x")
    server = ControlServer(name, hub)
    with ControlClient(name, role="test", name="t") as client:
        assert isinstance(client.hello(), messages.Welcome)
    server.close()


# --- garbage ----------------------------------------------------------------------------------------------


@pytest.fixture
def raw(bridge: str, server: ControlServer) -> Iterator[zmq.Socket]:
    context = zmq.Context()
    socket = context.socket(zmq.DEALER)
    socket.connect(control_address(bridge))
    yield socket
    context.destroy(linger=0)


def answer_of(raw: zmq.Socket) -> messages.Answer:
    assert raw.poll(5000)
    return messages.decode_answer(raw.recv_multipart())[1]


def test_garbage_is_refused_and_counted(
    raw: zmq.Socket, client: ControlClient, server: ControlServer
) -> None:
    for frames in ([b""], [b"garbage"], [b"\xff" * 10, b"\xff" * 10], [b"a"] * 50):
        raw.send_multipart(frames)
        assert answer_of(raw).code == messages.MALFORMED
    assert server.stats()["malformed_total"] == 4
    assert isinstance(client.hello(), messages.Welcome)


def test_an_oversized_message_is_refused_and_counted(raw: zmq.Socket, server: ControlServer) -> None:
    raw.send_multipart([b"x" * (messages.MAX_MESSAGE_BYTES + 1), b"y"])
    assert answer_of(raw).code == messages.OVERSIZED
    assert server.stats()["oversized_total"] == 1


def test_a_flood_of_bytes_cuts_its_sender_off_and_nobody_else(raw: zmq.Socket, client: ControlClient) -> None:
    raw.send(b"x" * (64 * 1024 * 1024))
    assert not raw.poll(300)
    assert isinstance(client.hello(), messages.Welcome)


def test_a_peer_that_never_reads_does_not_stop_the_hub(raw: zmq.Socket, client: ControlClient) -> None:
    raw.set(zmq.RCVHWM, 1)
    for _ in range(5000):
        raw.send_multipart(messages.encode(1, messages.RunInfoRequest()))
    assert isinstance(client.hello(timeout_s=20), messages.Welcome)


def test_an_answer_from_no_hub_is_a_bad_message(bridge: str) -> None:
    directory = socket_directory(bridge)
    directory.mkdir()
    context = zmq.Context()
    impostor = context.socket(zmq.ROUTER)
    impostor.bind(control_address(bridge))

    def answer() -> None:
        peer, *_ = impostor.recv_multipart()
        impostor.send_multipart([peer, b"who", b"me"])

    thread = threading.Thread(target=answer)
    thread.start()
    with ControlClient(bridge, role="test", name="t") as client, pytest.raises(messages.BadMessage):
        client.hello()
    thread.join()
    context.destroy(linger=0)
    shutil.rmtree(directory)


# --- processes and loops ----------------------------------------------------------------------------------


def test_a_forked_child_may_not_use_the_client_nor_close_the_server(
    client: ControlClient, server: ControlServer, bridge: str
) -> None:
    child = os.fork()
    if child == 0:
        try:
            server.close()
            client.close()
            client.hello()
        except Closed:
            os._exit(0 if socket_directory(bridge).exists() else 2)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert isinstance(client.hello(), messages.Welcome)


FORGETFUL = """
import asyncio, gc
from shmbridge.control import AsyncControlClient, ControlClient
from shmbridge.errors import NoConsumer
from shmbridge.messages import Pause

async def forget(keep):
    client = AsyncControlClient("nobody", role="test", name="t")
    client.me = client
    try:
        await client.request(Pause(), timeout_s=0.05)
    except NoConsumer:
        pass
    keep.append(client)

kept = []
asyncio.run(forget(kept))
asyncio.run(forget([]))
client = ControlClient("nobody", role="test", name="t")
client.me = client
del client
gc.collect()
at_exit = ControlClient("nobody", role="test", name="t")
"""


def test_a_client_that_is_never_closed_hangs_nothing_and_says_nothing() -> None:
    done = subprocess.run([sys.executable, "-W", "error", "-c", FORGETFUL], capture_output=True, timeout=30)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")


async def test_the_async_client_never_blocks_its_loop(bridge: str, hub: FakeHub) -> None:
    client = AsyncControlClient(bridge, role="test", name="t")
    waiting = asyncio.create_task(client.request(messages.RunInfoRequest(), timeout_s=0.4))
    gaps, last = [], time.monotonic()
    while not waiting.done():
        await asyncio.sleep(0.001)
        now = time.monotonic()
        gaps.append(now - last)
        last = now
    with pytest.raises(NoConsumer):
        await waiting
    assert len(gaps) > 20
    server = ControlServer(bridge, hub)
    assert await client.request(messages.RunInfoRequest(), timeout_s=10) == messages.RunInfo(RUN, 0, 1)
    client.close()
    server.close()


async def test_concurrent_and_cancelled_async_requests_get_their_own_answers(
    server: ControlServer, bridge: str, hub: FakeHub
) -> None:
    client = AsyncControlClient(bridge, role="test", name="t")
    env_id = (await client.request(env("gsm8k", "a"))).env_id
    for _ in range(30):
        tasks = [
            asyncio.create_task(client.request(request))
            for request in (StatusRequest(env_id), messages.RunInfoRequest(), messages.Pause())
        ]
        await asyncio.sleep(0)
        tasks[0].cancel()
        answers = await asyncio.gather(*tasks, return_exceptions=True)
        assert isinstance(answers[0], asyncio.CancelledError)
        assert isinstance(answers[1], messages.RunInfo)
        assert isinstance(answers[2], messages.Ack)
    client.close()


def test_an_idle_server_uses_no_cpu(server: ControlServer, client: ControlClient) -> None:
    client.hello()
    began, used = time.monotonic(), time.process_time()
    threading.Event().wait(0.5)
    assert (time.process_time() - used) / (time.monotonic() - began) < 0.05


# --- the table --------------------------------------------------------------------------------------------


def test_asking_twice_does_not_admit_twice() -> None:
    table = Environments(FakeHub())
    first, again, other = (table.admit(env("gsm8k", producer)) for producer in ("a", "a", "b"))
    assert (first.env_id, again.env_id, other.env_id) == (0, 0, 1)
    assert (first.wandb_name, again.wandb_name, other.wandb_name) == ("gsm8k_0", "gsm8k_0", "gsm8k_1")


def test_a_dead_environment_takes_its_weight_and_share_with_it() -> None:
    hub = FakeHub(live={"a", "b"})
    table = Environments(hub)
    a = table.admit(env("gsm8k", "a", weight=1.0)).env_id
    table.admit(env("code", "b", weight=3.0, min_batch_allocation=0.5))
    assert (table.status(a).env_weight, table.status(a).unallocated_fraction) == (0.25, 0.5)
    hub.live.remove("b")
    assert (table.status(a).env_weight, table.status(a).unallocated_fraction) == (1.0, 1.0)
    assert table.admit(env("code", "c")).wandb_name == "code_0"


def test_an_environment_that_was_never_seen_alive_is_not_buried() -> None:
    table = Environments(FakeHub())
    a = table.admit(env("gsm8k", "a")).env_id
    table.admit(env("code", "b", min_batch_allocation=0.5))
    assert table.status(a).unallocated_fraction == 0.5


def test_groups_of_producers_that_never_registered_count_as_queued() -> None:
    hub = FakeHub(queued={"a": 2, "plain": 3})
    table = Environments(hub)
    status = table.status(table.admit(env("gsm8k", "a")).env_id)
    assert (status.queue_groups, status.self_queue_groups, status.max_group_size) == (5, 2, 4)


def test_a_weight_of_zero_or_less_is_not_a_division_by_zero() -> None:
    table = Environments(FakeHub())
    a = table.admit(env("gsm8k", "a", weight=-1.0)).env_id
    assert table.status(a).env_weight == 0.01
