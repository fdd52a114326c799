"""The shm mount: too small, full, read-only, not there.

Every failure is an error with numbers and a hint, and leaves nothing.
"""

import re

import pytest

SMALL = "mount -t tmpfs -o size=64m tmpfs /dev/shm"


def of(said, step):
    return [each for each in said if each["step"] == step]


def outcome(said):
    return {each["step"]: each["error"] for each in said if "error" in each}


def test_a_lane_of_default_size_does_not_fit_the_default_of_docker(in_shm) -> None:
    said = in_shm(SMALL, "start_all", "64M")
    failed = of(said, "producer")[0]
    assert failed["error"] == "ShmTooSmall"
    assert "MemoryError" in failed["also"]
    assert re.search(r"needs 65\.\d MiB, /dev/shm has 64 MiB free of 64 MiB", failed["message"])
    assert "--shm-size" in failed["hint"]
    assert of(said, "left by producer")[0]["names"] == []
    assert outcome(said) == {
        "producer": "ShmTooSmall",
        "consumer": None,
        "weights": None,
        "publish": None,
        "list": None,
        "clean": None,
    }


def test_four_lanes_of_8_mib_work_in_64_mib(in_shm) -> None:
    said = in_shm(SMALL, "lanes_until_full", "8M", 4)
    assert of(said, "opened")[0] == {"step": "opened", "count": 4, "lanes": 4}
    assert of(said, "batch")[0] == {"step": "batch", "tokens": 400_000, "first": [0, 1, 2, 3]}
    assert of(said, "end")[0]["names"] == []


@pytest.mark.parametrize("huge_pages", ["wanted", "never"])
def test_lanes_until_the_mount_is_full(in_shm, huge_pages) -> None:
    """The one too many fails and takes nothing from the others, every page of which may then be written."""
    said = in_shm(f"{SMALL}; export SHMBRIDGE_HUGE_PAGES={huge_pages}", "lanes_until_full", "8M", 100)
    assert [each["error"] for each in of(said, "producer")] == [None] * 7 + ["ShmTooSmall"]
    assert of(said, "opened")[0] == {"step": "opened", "count": 7, "lanes": 7}
    assert of(said, "batch")[0]["tokens"] == 700_000
    assert of(said, "end")[0]["names"] == []


# What is free -> what can still be started.
FULL = {
    0: dict.fromkeys(["producer", "consumer", "weights", "publish"], "ShmTooSmall"),
    64 << 10: {"producer": "ShmTooSmall", "consumer": None, "weights": None, "publish": "ShmTooSmall"},
    1 << 20: {"producer": "ShmTooSmall", "consumer": None, "weights": None, "publish": "ShmTooSmall"},
    2 << 20: {"producer": None, "consumer": None, "weights": None, "publish": "ShmTooSmall"},
    3 << 20: dict.fromkeys(["producer", "consumer", "weights", "publish"]),
}


def test_a_mount_filled_by_others(in_shm, runs) -> None:
    all_said = in_shm("mount -t tmpfs -o size=16m tmpfs /dev/shm", "fill", *FULL)
    for (spare, wanted), said in zip(FULL.items(), runs(all_said), strict=True):
        assert outcome(said) == {**wanted, "list": None, "clean": None}, f"{spare} bytes free"
        for each in said:
            if each["step"].startswith("left by "):
                assert each["names"] == [], each
            elif each["error"]:
                assert re.search(r"needs .*iB, /dev/shm has .*B free of 16 MiB", each["message"])
                assert "--shm-size" in each["hint"]
                assert ("smaller types" in each["hint"]) == ("the weights segment" in each["message"])


@pytest.mark.parametrize("inodes", [1, 2])
def test_a_mount_without_inodes(in_shm, inodes) -> None:
    """The mount's root is an inode too: with 2 there may be a control segment, and no lane."""
    said = in_shm(f"mount -t tmpfs -o size=16m,nr_inodes={inodes} tmpfs /dev/shm", "start_all")
    failed = of(said, "producer")[0]
    assert failed["error"] == "ShmTooSmall"
    assert f"no inode left of {inodes}" in failed["message"]
    assert of(said, "left by producer")[0]["names"] == []


UNAVAILABLE = {
    "read-only": ("mount -t tmpfs -o ro tmpfs /dev/shm", "read-only"),
    "read-only with remains": (
        "mount -t tmpfs tmpfs /dev/shm; touch /dev/shm/shmbridge.x.c; mount -o remount,ro /dev/shm",
        "read-only",
    ),
    "not there": ("mount -t tmpfs tmpfs /dev; mknod /dev/null c 1 3; mknod /dev/urandom c 1 9", "not there"),
}


@pytest.mark.parametrize("how", UNAVAILABLE)
def test_a_mount_that_cannot_be_used(in_shm, how) -> None:
    setup, why = UNAVAILABLE[how]
    said = in_shm(setup, "start_all")
    for step in ("producer", "consumer", "weights", "publish"):
        failed = of(said, step)[0]
        assert failed["error"] == "ShmUnavailable", failed
        assert "OSError" in failed["also"]
        assert why in failed["message"]
        assert failed["hint"]
    assert outcome(said)["clean"] is None
