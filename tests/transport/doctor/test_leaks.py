"""Bridges whose processes are gone, living ones, and those of other users."""

import os
import signal

import pytest

import shmbridge
from shmbridge.doctor import leaks
from shmbridge.segments import membership

ABANDON = """
import shmbridge, time
producer = shmbridge.Producer(bridge, lane_bytes="64K")
for number in range(3):
    producer.put({"tokens": [[number]]})
print("ready", flush=True)
time.sleep(60)
"""


@pytest.fixture
def only(bridge, monkeypatch):
    """Other bridges of this machine are not looked at."""
    every = membership.list_bridges
    monkeypatch.setattr(
        "shmbridge.doctor.leaks.list_bridges", lambda: [each for each in every() if each.name == bridge]
    )


def test_no_bridge_and_living_ones_are_well(only, make_producer, make_consumer) -> None:
    assert leaks.dead_bridges().text == "none of 0"
    producer = make_producer()
    producer.put({"tokens": [[1]]})
    make_consumer().publish_policy_version(1)
    found = leaks.dead_bridges()
    assert (found.name, found.state, found.text, found.fix) == ("dead bridges", "ok", "none of 1", "")


def test_a_leaked_bridge_is_told_and_left(only, bridge, child, segments) -> None:
    process = child(ABANDON)
    process.send_signal(signal.SIGKILL)
    process.wait()
    before = segments()
    found = leaks.dead_bridges()
    assert found.state == "warn"
    assert found.text.startswith("1 with 100 KiB and 3 undelivered records: ")
    assert bridge in found.text
    assert "shmbridge clean" in found.fix
    assert segments() == before
    shmbridge.clean(bridge, dry_run=False)
    assert leaks.dead_bridges().state == "ok"


def test_many_are_summed_and_the_largest_named(monkeypatch) -> None:
    def dead(number: int) -> membership.BridgeInfo:
        weights = membership.WeightsInfo(1, None, number << 20)
        return membership.BridgeInfo(f"run{number}", None, False, -1, [], weights)

    monkeypatch.setattr(
        "shmbridge.doctor.leaks.list_bridges", lambda: [dead(number) for number in range(1, 6)]
    )
    assert leaks.dead_bridges().text == (
        "5 with 15 MiB and 0 undelivered records: run5 (5 MiB), run4 (4 MiB), run3 (3 MiB) and 2 more"
    )


def test_a_bridge_with_another_users_segment(monkeypatch) -> None:
    def refused():
        raise shmbridge.ShmPermission("segment /x belongs to uid 7", hint="another name")

    monkeypatch.setattr("shmbridge.doctor.leaks.list_bridges", refused)
    found = leaks.dead_bridges()
    assert (found.state, found.text, found.fix) == ("warn", "segment /x belongs to uid 7", "another name")


def test_segments_of_other_users(tmp_path) -> None:
    for name in ("shmbridge.run1.c", "shmbridge.run1.l.0123456789abcdef", "shmbridge.r\x1b[1m.c", "psm_1"):
        (tmp_path / name).write_bytes(bytes(1024))
    assert leaks.other_users(tmp_path).text == "no bridges of other users"
    found = leaks.other_users(tmp_path, uid=os.geteuid() + 1)
    assert (found.name, found.state) == ("other users", "warn")
    assert found.text == f"uid {os.geteuid()} has 2 with 3 KiB: 'r\\x1b[1m', run1"
    assert "choose another name" in found.fix
