"""Limits of a process: locked memory is not needed, and the others, when low, are a ProcessLimit that names
the limit.
"""

import os
from pathlib import Path

import pytest


def outcome(said):
    return {each["step"]: each["error"] for each in said if "error" in each}


def end(said):
    assert said[-1]["step"] == "end"
    return said[-1]["names"]


def limits_named(said, name):
    return [
        each["message"]
        for each in said
        if each.get("error") == "ProcessLimit" and name in each["message"] and each["hint"]
    ]


def test_nothing_needs_locked_memory(start, runs) -> None:
    (said,) = runs(start("limited", "MEMLOCK", 0).rest())
    assert set(outcome(said).values()) == {None}
    assert end(said) == []


def test_files_may_not_be_large(start, runs) -> None:
    """posix_fallocate beyond RLIMIT_FSIZE sends SIGXFSZ: an error all the same, and not a death."""
    small, large = runs(start("limited", "FSIZE", 4096, 1_000_000).rest())
    assert set(outcome(small).values()) == {"ProcessLimit"}
    assert outcome(large) == {"producer": "ProcessLimit", "consumer": None, "weights": None, "publish": None}
    for said in (small, large):
        assert limits_named(said, "RLIMIT_FSIZE is ")
        assert end(said) == []


def test_little_address_space(start, runs) -> None:
    """Wherever memory ends, the error is a ProcessLimit; a socket library that can start no thread would
    abort the process.
    """
    least, *others = runs(start("limited", "AS", *(mib << 20 for mib in (6, 20, 40, 60, 90))).rest())
    assert outcome(least)["producer"] == outcome(least)["consumer"] == "ProcessLimit"
    assert limits_named(least, "RLIMIT_AS is ")
    for said in (least, *others):
        assert set(outcome(said).values()) <= {None, "ProcessLimit"}, said
        assert end(said) == []


@pytest.mark.parametrize("most", [1, 3, 4, 8])
def test_a_process_with_few_threads_is_told_so(start, bridge, until, most) -> None:
    pids = Path("/sys/fs/cgroup/pids")
    folder = pids / f"shmbridge-{bridge}"
    if not os.access(pids / "cgroup.procs", os.W_OK):
        pytest.skip("no pids controller of version 1 is mounted here")
    folder.mkdir()
    try:
        (folder / "pids.max").write_text(str(most))
        said = start("few_threads", folder).rest()
    finally:
        until(lambda: not (folder / "cgroup.procs").read_text(), 5.0)
        folder.rmdir()
    assert outcome(said)["consumer"] == (None if most == 8 else "ProcessLimit"), said
    assert end(said) == []


def test_few_descriptors(start, runs) -> None:
    """Without a check beforehand, 12 to 14 would let libzmq abort the process. 64 are enough for one of
    each.
    """
    limits = [3, 5, 8, 11, 12, 13, 14, 16, 20, 24, 32, 64]
    for limit, said in zip(limits, runs(start("limited", "NOFILE", *limits).rest()), strict=True):
        found = outcome(said)
        assert set(found.values()) <= {None, "ProcessLimit"}, said
        assert found["consumer"] == ("ProcessLimit" if limit < 64 else None), (limit, said)
        named = limits_named(said, f"RLIMIT_NOFILE is {limit}")
        assert len(named) == sum(error is not None for error in found.values()), said
        if 16 <= limit < 64:
            assert any("it needs 32 descriptors" in message for message in named), named
        assert end(said) == []


def test_a_lane_that_cannot_be_opened_waits_until_it_can(start, until) -> None:
    """The consumer goes on with the lanes it has, counts the one that waits, and takes it once descriptors
    are free.
    """
    first = start("produce", 1)
    first.step("put")
    consumer = start("consume_with_few_descriptors", 0)
    assert consumer.step("got")["value"] == 1
    consumer.step("short")
    second = start("produce", 2)
    second.step("put")
    first.tell(7)
    first.step("put")

    def state():
        consumer.tell("state")
        return consumer.step("state")

    consumer.tell("get")
    assert consumer.step("get")["error"] is None
    assert consumer.step("got")["value"] == 1, "the lane that is open goes on"
    until(lambda: state()["waits"], 5.0)
    assert state()["lanes"] == 1
    consumer.tell("free")
    consumer.tell("get")
    assert consumer.step("get")["error"] is None
    assert consumer.step("got")["value"] == 2
    after = state()
    assert (after["lanes"], after["waits"]) == (2, False)
    consumer.process.stdin.close()
    assert consumer.process.wait(10) == 0
