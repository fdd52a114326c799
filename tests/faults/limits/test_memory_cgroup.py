"""A memory cgroup with less than is asked for: an error beforehand, not the kernel's killer.

Version 1 for real, version 2 as it looks.
"""

import contextlib
from pathlib import Path

import pytest

V1 = Path("/sys/fs/cgroup/memory")
V2 = Path("/sys/fs/cgroup")


def make_cgroup(name: str, limit: int) -> tuple[Path, Path]:
    """A cgroup with this limit, and the file in it that counts kills; skips where none can be made."""
    if (V1 / "memory.limit_in_bytes").exists():
        folder, limit_file, events = V1 / name, "memory.limit_in_bytes", "memory.oom_control"
    elif (V2 / "cgroup.controllers").exists() and "memory" in (V2 / "cgroup.subtree_control").read_text():
        folder, limit_file, events = V2 / name, "memory.max", "memory.events"
    else:
        pytest.skip("no memory controller is mounted here")
    try:
        folder.mkdir()
        (folder / limit_file).write_text(str(limit))
    except OSError as wrong:
        with contextlib.suppress(OSError):
            folder.rmdir()
        pytest.skip(f"no cgroup can be made here: {wrong}")
    return folder, folder / events


def kills(events: Path) -> int:
    return sum(
        int(line.split()[1]) for line in events.read_text().splitlines() if line.startswith("oom_kill ")
    )


@pytest.fixture
def cgroup(bridge, until):
    made = []

    def make(limit: int) -> tuple[Path, Path]:
        made.append(make_cgroup(f"shmbridge-{bridge}", limit))
        return made[-1]

    yield make
    for folder, _ in made:

        def removed(folder=folder) -> bool:
            with contextlib.suppress(OSError):
                folder.rmdir()
            return not folder.exists()

        until(removed, 5.0)


@pytest.mark.parametrize(("lane_bytes", "opened"), [("64M", 0), ("8M", (2, 7))])
def test_a_cgroup_of_64_mib(start, cgroup, lane_bytes, opened) -> None:
    """A page of the mount is charged to the cgroup of the process that first touches it: the producer, which
    touches all at its start.
    """
    folder, events = cgroup(64 << 20)
    child = start("in_cgroup", folder, lane_bytes)
    said = child.rest()
    failed = said[-2]
    assert failed["error"] == "ShmTooSmall"
    assert "the memory cgroup (64 MiB) has" in failed["message"]
    assert failed["hint"]
    low, high = opened if isinstance(opened, tuple) else (opened, opened)
    assert low <= said[-1]["count"] <= high
    assert said[-1]["lanes"] == said[-1]["count"], "the one that failed left nothing"
    assert kills(events) == 0


def test_many_producers_start_in_the_same_instant(start, cgroup) -> None:
    """Each checks the memory left and then takes it; no other may come in between."""
    folder, events = cgroup(200 << 20)
    (ended,) = start("start_together", folder, "32M", 16).rest()
    assert set(ended["statuses"]) == {0, 3}, f"a negative one was killed: {ended['statuses']}"
    assert 2 <= ended["statuses"].count(0) <= 6
    assert kills(events) == 0


def tree(folder: str, limits: dict[str, tuple[str, str]], own: str) -> str:
    """Shell commands that show a process a cgroup v2 tree: path -> (memory.max, memory.current)."""
    lines = [f"mount -t tmpfs tmpfs {folder}"]
    for path, (limit, used) in limits.items():
        lines += [
            f"mkdir -p {folder}/{path}",
            f"echo {limit} > {folder}/{path}/memory.max",
            f"echo {used} > {folder}/{path}/memory.current",
            f"printf 'anon 1\\ninactive_file {1 << 20}\\n' > {folder}/{path}/memory.stat",
        ]
    lines += [
        "mount -t tmpfs tmpfs /dev/shm",
        f"echo '0::{own}' > /mnt/cgroup",
        "mount --bind /mnt/cgroup /proc/$$/cgroup",
    ]
    return "mount -t tmpfs tmpfs /mnt; " + "; ".join(lines)


MIB = 1 << 20
TREES = {
    "its own": (
        {"pod/box": (f"{20 * MIB}", f"{10 * MIB}"), "pod": ("max", f"{10 * MIB}")},
        "/pod/box",
        "the memory cgroup (20 MiB) has 11 MiB",
    ),
    "one above": (
        {"pod/box": ("max", "0"), "pod": (f"{16 * MIB}", f"{8 * MIB}")},
        "/pod/box",
        "the memory cgroup (16 MiB) has 9 MiB",
    ),
    "the tighter of two": (
        {"pod/box": (f"{64 * MIB}", "0"), "pod": (f"{16 * MIB}", f"{12 * MIB}")},
        "/pod/box",
        "the memory cgroup (16 MiB) has 5 MiB",
    ),
    "in a container, where the path leads nowhere": (
        {".": (f"{8 * MIB}", "0")},
        "/host/path",
        "the memory cgroup (8 MiB) has 9 MiB",
    ),
}


@pytest.mark.parametrize("whose", TREES)
def test_a_limit_of_version_2(in_shm, whose) -> None:
    limits, own, message = TREES[whose]
    said = in_shm(tree("/sys/fs/cgroup", limits, own), "start_all", "12M")
    assert said[0]["error"] == "ShmTooSmall", said[0]
    assert message in said[0]["message"]
    assert said[1]["names"] == []


def test_no_limit_of_version_2(in_shm) -> None:
    said = in_shm(tree("/sys/fs/cgroup", {"box": ("max", f"{10 * MIB}")}, "/box"), "start_all", "12M")
    assert {each["error"] for each in said if "error" in each} == {None}


def test_no_cgroup_files_at_all(in_shm) -> None:
    said = in_shm(
        "mount -t tmpfs tmpfs /dev/shm; mount -t tmpfs tmpfs /sys/fs/cgroup; mount -t tmpfs tmpfs /mnt; "
        "touch /mnt/none; mount --bind /mnt/none /proc/$$/cgroup",
        "start_all",
        "12M",
    )
    assert {each["error"] for each in said if "error" in each} == {None}
