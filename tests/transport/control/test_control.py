"""The control plane over its real socket: its answers, its socket's place, and its resistance to garbage."""

import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest
import zmq

from shmbridge.config import Run
from shmbridge.control import messages
from shmbridge.control.messages import Register, StatusRequest
from shmbridge.control.server import ControlClient, ControlServer, RequestRefused, control_address
from shmbridge.errors import ShmPermission
from shmbridge.segments import socket_directory
from shmbridge.testing.fixtures import FakeHub

RUN = FakeHub().run


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


def test_an_environment_waits_for_a_run_and_is_then_told_it(
    client: ControlClient, hub: FakeHub, env: Callable[..., Register]
) -> None:
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
        {"group_size": 2**31},
        {"max_token_length": 2**31},
        {"env_id": -1},
        {"env_id": 2**63},
        {"min_batch_allocation": 1.5},
        {"min_batch_allocation": float("nan")},
    ],
    ids=str,
)
def test_an_environment_with_meaningless_numbers_is_refused(
    client: ControlClient, nonsense: dict, env: Callable[..., Register]
) -> None:
    with pytest.raises(RequestRefused) as caught:
        client.request(env("gsm8k", "a", **nonsense))
    assert caught.value.reason == messages.BAD_VALUE
    assert caught.value.hint


def test_an_unknown_environment_is_refused(client: ControlClient) -> None:
    with pytest.raises(RequestRefused) as caught:
        client.request(StatusRequest(77))
    assert caught.value.reason == messages.UNKNOWN_ENV


@pytest.mark.parametrize("version", [-4, 2**62, 2**63 - 1, 2**64 - 1])
def test_a_version_the_hub_will_not_take_is_refused(client: ControlClient, version: int) -> None:
    with pytest.raises(RequestRefused, match=f"version {version}") as caught:
        client.request(messages.SetPolicyVersion(version))
    assert caught.value.reason == messages.BAD_VALUE


@pytest.mark.parametrize(
    "name", ["batch_size", "max_token_len", "num_steps", "starting_step", "save_checkpoint_interval"]
)
@pytest.mark.parametrize("number", [2**31, 2**64 - 1, -(2**63)])
def test_a_run_with_meaningless_numbers_is_refused(
    client: ControlClient, hub: FakeHub, name: str, number: int
) -> None:
    with pytest.raises(RequestRefused, match=name) as caught:
        client.request(messages.AnnounceRun(Run(**{name: number})))
    assert (caught.value.reason, hub.announced) == (messages.BAD_VALUE, 0)


def test_an_answer_that_cannot_be_said_is_refused_and_not_the_end(
    client: ControlClient, hub: FakeHub
) -> None:
    hub.current_step = 2**64
    with pytest.raises(RequestRefused, match="OverflowError") as caught:
        client.request(messages.RunInfoRequest(), timeout_s=2)
    assert caught.value.reason == messages.INTERNAL
    assert isinstance(client.hello(), messages.Welcome)


def test_a_socket_that_fails_once_is_not_the_end(
    client: ControlClient, server: ControlServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    reply = server._reply

    def fail_once(*frames: object) -> None:
        monkeypatch.setattr(server, "_reply", reply)
        raise zmq.ZMQError(zmq.EFSM)

    monkeypatch.setattr(server, "_reply", fail_once)
    assert isinstance(client.hello(), messages.Welcome)  # asked again


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


def test_a_file_at_the_sockets_directory_is_not_touched(bridge: str, hub: FakeHub, tmp_path: Path) -> None:
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
