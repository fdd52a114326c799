"""The control plane as its ends come and go: no hub, a killed, a stopped, another one; forks, loops, exit."""

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable

import pytest
import zmq

from shmbridge.control import messages
from shmbridge.control import server as control
from shmbridge.control.environments import ENV_IDS_PER_HUB
from shmbridge.control.messages import Register, StatusRequest
from shmbridge.control.server import AsyncControlClient, ControlClient, ControlServer
from shmbridge.errors import Closed, NoConsumer
from shmbridge.segments import socket_directory
from shmbridge.testing.fixtures import FakeHub

RUN = FakeHub().run


# --- ends that are absent, or come back -------------------------------------------------------------------


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


def test_requests_nobody_waits_for_do_not_pile_up_for_the_next_hub(bridge: str, hub: FakeHub) -> None:
    with ControlClient(bridge, role="test", name="t") as client:
        for _ in range(20):
            with pytest.raises(NoConsumer):
                client.request(messages.Pause(), timeout_s=0.01)
        server = ControlServer(bridge, hub)
        assert isinstance(client.hello(timeout_s=10), messages.Welcome)
        assert server.stats()["requests_total"] == 1
        assert not hub.paused
        server.close()


def test_an_environment_keeps_number_and_name_across_hubs(bridge: str, env: Callable[..., Register]) -> None:
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


def test_a_hub_without_a_run_holds_an_environment_it_does_not_know(
    bridge: str, env: Callable[..., Register]
) -> None:
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
import time
from shmbridge.control.server import ControlServer
from shmbridge.testing.fixtures import FakeHub
server = ControlServer({bridge!r}, FakeHub(hub_epoch={epoch}))
print("up", flush=True)
time.sleep(600)
"""


def hub_process(bridge: str, epoch: int) -> subprocess.Popen[bytes]:
    code = HUB_PROCESS.format(bridge=bridge, epoch=epoch)
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
            os.waitid(os.P_PID, stopped.pid, os.WSTOPPED | os.WNOWAIT)  # the signal itself only asks for it
            with pytest.raises(NoConsumer):
                client.request(messages.RunInfoRequest(), timeout_s=0.7)
            stopped.send_signal(signal.SIGCONT)
            assert isinstance(client.request(messages.Pause(), timeout_s=10), messages.Ack)
            assert isinstance(client.hello(timeout_s=10), messages.Welcome)
    finally:
        stopped.kill()
        stopped.wait()
        ControlServer(bridge, FakeHub()).close()


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
from shmbridge.control.server import AsyncControlClient, ControlClient
from shmbridge.errors import NoConsumer
from shmbridge.control.messages import Pause

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
    server: ControlServer, bridge: str, hub: FakeHub, env: Callable[..., Register]
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


class GoneAnswers:
    """A socket that reports an answer, which is then gone with the hub that sent it."""

    def poll(self, timeout_ms: int, flags: int) -> int:
        return flags

    def send_multipart(self, frames: list[bytes], flags: int) -> None:
        pass

    def recv_multipart(self, flags: int = 0) -> list[bytes]:
        assert flags & zmq.NOBLOCK, "this would wait for ever"
        raise zmq.Again


def test_an_answer_that_goes_with_its_hub_is_not_waited_for(bridge: str) -> None:
    """Between the report and the read a hub may end, and its connection with it: the deadline still holds."""
    with ControlClient(bridge, role="test", name="t") as client:
        client._socket = GoneAnswers()
        with pytest.raises(NoConsumer):
            client.hello(0.1)

    async def ready(flag: int, timeout_s: float) -> bool:
        await asyncio.sleep(0.01)
        return True

    async def ask() -> None:
        client = AsyncControlClient(bridge, role="test", name="t")
        client._socket, client._poll = GoneAnswers(), ready
        with pytest.raises(NoConsumer):
            await client.hello(0.1)
        client.close()

    asyncio.run(ask())


def test_an_idle_server_uses_no_cpu(server: ControlServer, client: ControlClient) -> None:
    client.hello()
    began, used = time.monotonic(), time.process_time()
    threading.Event().wait(0.5)
    assert (time.process_time() - used) / (time.monotonic() - began) < 0.05


@pytest.mark.parametrize("step", ["_thread.join", "_socket.close", "_context.term", "remove_folder"])
def test_a_close_that_is_interrupted_after_any_step_is_finished_by_the_next(
    bridge: str, hub: FakeHub, monkeypatch, step: str
) -> None:
    server = ControlServer(bridge, hub)
    descriptors = server._stop.fd, server._again.fd
    owner, _, name = step.rpartition(".")
    part = getattr(server, owner) if owner else control
    real, put = getattr(part, name), object.__setattr__ if owner else setattr  # a zmq.Context has its own

    def interrupted(*given: object, **named: object) -> None:
        put(part, name, real)
        real(*given, **named)
        raise KeyboardInterrupt

    put(part, name, interrupted)
    with pytest.raises(KeyboardInterrupt):
        server.close()
    server.close()
    for each in descriptors:
        with pytest.raises(OSError, match="Bad file"):
            os.fstat(each)
    assert not socket_directory(bridge).exists()
    server.close()
    again = ControlServer(bridge, hub)
    server.close()  # its descriptor numbers belong to other files now
    with ControlClient(bridge, role="test", name="t") as client:
        assert isinstance(client.hello(timeout_s=10), messages.Welcome)
    again.close()
