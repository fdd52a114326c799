"""The mount and the memory behind it: what is found here, and each shortage, planted."""

import os
from types import SimpleNamespace

import pytest

from shmbridge.doctor import probe_file, shared_memory

MIB = 1 << 20
HERE = probe_file.MOUNT


@pytest.fixture
def size(monkeypatch):
    """Gives every mount so many MiB, so many of them free, and so many inodes."""

    def plant(total: int, free: int, files: int = 1000, files_free: int = 1000, flags: int = 0) -> None:
        about = SimpleNamespace(
            f_flag=flags, f_blocks=total, f_bavail=free, f_frsize=MIB, f_files=files, f_favail=files_free
        )
        monkeypatch.setattr(os, "statvfs", lambda path: about)

    return plant


def test_the_mount_is_large_enough_here() -> None:
    found = shared_memory.mount()
    assert (found.name, found.state) == ("shared memory", "ok")
    assert "lanes of 64 MiB" in found.text
    assert found.fix == ""


def test_the_default_of_containers_is_recognised(size) -> None:
    size(64, 64)
    found = shared_memory.mount()
    assert found.state == "fail"
    assert found.text == (
        "64 MiB free of 64 MiB: no room for a lane of 64 MiB; 64 MiB is what a container gets by default"
    )
    assert found.fix.startswith("docker run --shm-size=16g (Kubernetes: emptyDir with medium Memory)")


@pytest.mark.parametrize(
    ("total", "free", "state", "text", "fix"),
    [
        (2048, 2048, "ok", "2 GiB free of 2 GiB: room for 31 lanes of 64 MiB", ""),
        (512, 512, "warn", "512 MiB free of 512 MiB: room for 7 lanes of 64 MiB", "--shm-size"),
        (4096, 100, "warn", "100 MiB free of 4 GiB: room for one lane of 64 MiB", "others fill it"),
        (4096, 10, "fail", "10 MiB free of 4 GiB: no room for a lane of 64 MiB", "others fill it"),
        (0, 0, "ok", "/dev/shm has no limit of its own", ""),
    ],
)
def test_room_is_counted_in_lanes(size, total, free, state, text, fix) -> None:
    size(total, free)
    found = shared_memory.mount()
    assert (found.state, found.text) == (state, text)
    assert fix in found.fix
    assert bool(fix) == bool(found.fix)


def test_a_mount_that_cannot_be_used(size, tmp_path, monkeypatch) -> None:
    found = shared_memory.mount(tmp_path / "none")
    assert found.state == "fail"
    assert found.text.endswith("none is not there")
    assert "--ipc=host" in found.fix
    size(100, 100, flags=os.ST_RDONLY)
    found = shared_memory.mount()
    assert (found.state, found.text) == ("fail", "/dev/shm is mounted read-only")
    assert found.fix
    size(4096, 4096)
    tmp_path.chmod(0o500)
    monkeypatch.setattr(os, "access", lambda path, how: False)
    found = shared_memory.mount(tmp_path)
    assert found.state == "fail"
    assert f"has mode 0500: uid {os.geteuid()} may not create there" in found.text
    assert found.fix == f"chmod 1777 {tmp_path}"


def test_a_folder_on_a_disk_is_told(tmp_path) -> None:
    mounts = tmp_path / "mounts"
    mounts.write_text(f"/dev/vda / ext4 rw 0 0\ntmpfs {HERE}2 tmpfs rw 0 0\n")
    found = shared_memory.mount(HERE, mounts)
    assert found.state == "warn"
    assert found.text == "/dev/shm lies on ext4, which is no tmpfs: lanes may be written to a disk"
    assert found.fix == "mount -t tmpfs tmpfs /dev/shm"


def test_inodes(size) -> None:
    assert shared_memory.inodes().state == "ok"
    for left, state in ((64, "ok"), (5, "warn"), (1, "fail"), (0, "fail")):
        size(100, 100, files=100, files_free=left)
        found = shared_memory.inodes()
        assert (found.name, found.state) == ("inodes", state)
        assert found.text.startswith(f"{left} of 100 left")
        assert ("shmbridge clean" in found.fix) == (state != "ok")
    size(100, 100, files=0, files_free=0)
    assert shared_memory.inodes().text == "/dev/shm has no limit of inodes"


@pytest.fixture
def machine(tmp_path):
    """A root with /proc and /sys of a machine with 64 GiB, and a memory cgroup of either version."""

    def plant(version: int, limit: int, used: int):
        (tmp_path / "proc/self").mkdir(parents=True)
        (tmp_path / "proc/meminfo").write_text(f"MemAvailable: {64 << 20} kB\nSwapFree: 0 kB\n")
        line = "0::/box\n" if version == 2 else "4:memory:/box\n"
        (tmp_path / "proc/self/cgroup").write_text(line)
        folder = tmp_path / "sys/fs/cgroup" / ("box" if version == 2 else "memory/box")
        folder.mkdir(parents=True)
        names = {2: ("memory.max", "memory.current"), 1: ("memory.limit_in_bytes", "memory.usage_in_bytes")}
        for name, count in zip(names[version], (limit, used), strict=True):
            (folder / name).write_text(f"{count}\n")
        (folder / "memory.stat").write_text("anon 1\n")
        return tmp_path

    return plant


def test_memory_is_enough_here() -> None:
    found = shared_memory.memory()
    assert (found.name, found.state, found.fix) == ("memory", "ok", "")


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize(
    ("left", "state", "room"),
    [(8192, "ok", "124 lanes"), (300, "warn", "4 lanes"), (40, "fail", "no room for a lane")],
)
def test_a_cgroup_below_the_mount_is_told(machine, size, version, left, state, room) -> None:
    size(16384, 16384)
    found = shared_memory.memory(machine(version, 16384 * MIB, (16384 - left) * MIB))
    assert found.state == state
    assert found.text.startswith("the memory cgroup (16 GiB) has ")
    assert room in found.text
    assert found.text.endswith("less than /dev/shm has, whose size is 16 GiB")
    assert ("more memory" in found.fix) == (state != "ok")


def test_a_mapping_is_written_and_leaves_nothing(tmp_path, monkeypatch) -> None:
    found = shared_memory.mapped_writes()
    assert (found.name, found.state) == ("mapped writes", "ok")
    assert found.text == "64 KiB reserved and written through a mapping"
    really = os.open

    def without_nameless(path, how, mode=0o777):
        if how & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(95, "Operation not supported")
        return really(path, how, mode)

    monkeypatch.setattr(os, "open", without_nameless)
    with probe_file.probe_file(tmp_path) as fd:
        assert os.fstat(fd).st_nlink == 0
        assert list(tmp_path.iterdir()) == []
    assert shared_memory.mapped_writes().state == "ok"


def test_a_mount_without_room_for_a_page(monkeypatch) -> None:
    def full(fd, at, size):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    found = shared_memory.mapped_writes()
    assert found.state == "fail"
    assert found.text == "64 KiB could not be reserved and written: No space left on device"
    assert "--shm-size" in found.fix


def test_a_write_that_others_do_not_see(monkeypatch) -> None:
    monkeypatch.setattr(os, "pread", lambda fd, size, at: b"\0" * size)
    found = shared_memory.mapped_writes()
    assert found.state == "fail"
    assert "was not seen in the file" in found.text
    assert found.fix
