"""Another user's bridge: refused on both sides with both users named, not listed for others, and no obstacle
to them.
"""

import os
import shutil
import socket
import stat
from pathlib import Path

import pytest

import shmbridge
from shmbridge.segments import (
    MOUNT,
    control_name,
    gateway_directory,
    lane_names,
    open_control,
    socket_directory,
    weights_name,
)
from shmbridge.weights import WeightsWriter

NOBODY = 65534


@pytest.fixture
def as_nobody(not_root, tmp_path):
    """Makes a call in a child that has become another user; returns (class, text) of its ShmBridgeError, or
    its result as text.
    """
    # import lazy modules before: the user may not be able to read the interpreter's folder
    import shmbridge.control.server

    _ = (
        shmbridge.control.server,
        shmbridge.clean,
        shmbridge.list_bridges,
        shmbridge.Consumer,
        shmbridge.Producer,
    )

    def run(action) -> str:
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                os.setgroups([])
                os.setuid(NOBODY)
                try:
                    text = f"did {action()}"
                except Exception as wrong:
                    text = f"{type(wrong).__name__}: {wrong}"
                os.write(write, text.encode())
            finally:
                os._exit(0)
        os.close(write)
        with open(read) as pipe:
            text = pipe.read()
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        return text

    return run


ROOTS = {
    "producer": lambda bridge: shmbridge.Producer(bridge, lane_bytes="64K"),
    "consumer": lambda bridge: shmbridge.Consumer(bridge),
    "weights": lambda bridge: WeightsWriter(bridge),
    "clean": lambda bridge: shmbridge.clean(bridge, dry_run=False),
}


@pytest.mark.parametrize("what", ROOTS)
def test_another_users_bridge_is_refused(what, bridge, producer, consumer, as_nobody) -> None:
    producer.put({"tokens": [[1, 2]]})
    said = as_nobody(lambda: ROOTS[what](bridge))
    assert said.startswith("ShmPermission: [SB102] segment /shmbridge."), said
    assert f"belongs to uid 0, this process is uid {NOBODY}" in said
    assert "same user" in said
    assert consumer.get(5)["tokens"].values.tolist() == [1, 2]


def test_another_user_cannot_reach_the_control_socket(bridge, consumer, as_nobody) -> None:
    (path,) = [path for path in socket_directory(bridge).iterdir() if path.is_socket()]

    def dial() -> None:
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(path))

    assert as_nobody(dial).startswith("PermissionError"), "the folder is the owner's"
    dial()


def test_another_users_bridges_are_in_nobodys_way(bridge, producer, as_nobody) -> None:
    """Listing and cleaning all bridges concerns the user's own only."""
    assert bridge in [each.name for each in shmbridge.list_bridges()]
    assert bridge not in as_nobody(shmbridge.list_bridges)
    said = as_nobody(lambda: shmbridge.clean(None, dry_run=False))
    assert said.startswith("did CleanReport"), said
    assert len(lane_names(bridge)) == 1


def test_root_does_not_lock_a_user_out_of_his_bridge(bridge, as_nobody) -> None:
    """Root may open everything, so a producer run with sudo would make a lane that the user's consumer cannot
    open.
    """

    def open_and_leave() -> None:
        control = open_control(bridge)
        control.mapping.fd  # noqa: B018
        os._exit(0)

    as_nobody(open_and_leave)
    assert MOUNT.joinpath(control_name(bridge)[1:]).stat().st_uid == NOBODY
    try:
        for attempt in (lambda: shmbridge.Producer(bridge), lambda: shmbridge.Consumer(bridge)):
            with pytest.raises(
                shmbridge.ShmPermission, match=f"belongs to uid {NOBODY}, this process is uid 0"
            ):
                attempt()
        assert lane_names(bridge) == []
    finally:
        MOUNT.joinpath(control_name(bridge)[1:]).unlink()


def test_a_foreign_lane_is_refused_and_nobody_else_suffers(not_root, bridge, consumer, make_producer) -> None:
    foreign = MOUNT / f"shmbridge.{bridge}.l.{'0' * 16}"
    foreign.write_bytes(b"\0" * 65536)
    os.chown(foreign, NOBODY, NOBODY)
    try:
        producer = make_producer()  # its start sweeps, the consumer looks for lanes
        producer.put({"tokens": [[1]]})
        assert consumer.get(5)["tokens"].values.tolist() == [1]
        assert consumer.stats()["lanes_refused"] == 1
        report = shmbridge.clean(bridge, dry_run=False)
        assert f"belongs to uid {NOBODY}" in report.kept[f"/{foreign.name}"]
        assert foreign.exists()
    finally:
        foreign.unlink()


def test_a_foreign_socket_directory(not_root, bridge) -> None:
    directory: Path = socket_directory(bridge)
    directory.mkdir()
    os.chown(directory, NOBODY, NOBODY)
    try:
        with pytest.raises(shmbridge.ShmPermission, match=f"owner {NOBODY}"):
            shmbridge.Consumer(bridge)
    finally:
        if directory.exists():
            directory.rmdir()


@pytest.mark.parametrize("ours", ["nothing", "a lane"])
def test_clean_leaves_another_users_directories(ours, not_root, bridge, make_producer) -> None:
    """Root could remove everything: folders of another user's gateway and hub are kept and named."""
    folders = [socket_directory(bridge), gateway_directory(bridge)]
    if ours == "a lane":
        make_producer().close()
    for folder in folders:
        folder.mkdir()
        folder.joinpath("state").write_text("")
        os.chown(folder, NOBODY, NOBODY)
    try:
        for dry_run in (True, False):
            report = shmbridge.clean(bridge, dry_run=dry_run)
            assert {
                f"/{folder.name}": f"belongs to uid {NOBODY}" for folder in folders
            }.items() <= report.kept.items()
            assert not {f"/{folder.name}" for folder in folders} & set(report.removed)
            assert all(folder.joinpath("state").exists() for folder in folders)
        assert not MOUNT.joinpath(control_name(bridge)[1:]).exists()
    finally:
        for folder in folders:
            shutil.rmtree(folder, ignore_errors=True)


def test_clean_leaves_another_users_weights(not_root, bridge, make_producer) -> None:
    make_producer().close()
    weights = MOUNT / weights_name(bridge)[1:]
    weights.write_bytes(b"\0" * 4096)
    os.chown(weights, NOBODY, NOBODY)
    try:
        assert shmbridge.clean(bridge, dry_run=False).kept[f"/{weights.name}"] == f"belongs to uid {NOBODY}"
        assert weights.exists()
    finally:
        weights.unlink(missing_ok=True)


def test_segments_and_sockets_are_the_owners_alone(bridge, producer, consumer) -> None:
    """They are so whatever the umask is."""
    modes = {
        path.name.split(".")[2]: stat.S_IMODE(path.stat().st_mode)
        for path in Path("/dev/shm").glob(f"shmbridge.{bridge}.*")
    }
    assert modes == {"c": 0o600, "l": 0o600, "s": 0o700}
