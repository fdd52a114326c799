"""Segments of values: bytes and owners come back, rows are released one by one, garbage is refused."""

import os
import threading

import numpy as np
import pytest

import shmbridge
from shmbridge.segments import (
    MOUNT,
    LockByte,
    lock_exclusive,
    open_control,
    read_values_head,
    release_values,
    remove_values,
    segment,
    unlock_all,
    value_names,
    write_values,
)


@pytest.fixture
def put(bridge):
    made = []

    def write(rows: int = 3, data: bytes = b"0123456789") -> str:
        made.append(
            write_values(bridge, np.arange(100, 100 + rows), b"a table", [(0, [data]), (64, [b"x", b"yz"])])
        )
        return made[-1]

    yield write
    for name in made:
        remove_values(name, with_records=True)


def path_of(name: str):
    return MOUNT / name[1:]


def test_what_was_written_comes_back(put):
    name = put()
    head = read_values_head(name)
    assert head.owners.tolist() == [100, 101, 102]
    assert (head.table, head.data_at % 64) == (b"a table", 0)
    raw = path_of(name).read_bytes()[head.data_at : head.size]
    assert raw[:10] == b"0123456789"
    assert raw[64:] == b"xyz"
    assert path_of(name).stat().st_mode & 0o777 == 0o600


def test_more_buffers_than_one_call_writes(bridge):
    name = write_values(bridge, np.arange(1), b"", [(0, [bytes([n % 256]) for n in range(3000)])])
    head = read_values_head(name)
    assert path_of(name).read_bytes()[head.data_at :] == bytes(n % 256 for n in range(3000))
    assert release_values(name, [0])


def test_the_last_release_removes_the_name(put):
    name = put()
    assert not release_values(name, [0])
    assert not release_values(name, [0, 2, 7, -1])
    with open(path_of(name), "rb") as still_open:
        assert release_values(name, [1])
        assert read_values_head(name) is None
        assert b"0123456789" in still_open.read()
    assert release_values(name, [1]), "again, for nothing"


def release_each(name: str, rows: range) -> None:
    for row in rows:
        release_values(name, [row])


def test_threads_that_release_row_by_row_leave_nothing(bridge):
    """Of those that release the last rows, at least one removes the name."""
    for _ in range(20):
        name = write_values(bridge, np.arange(64), b"", [])
        threads = [
            threading.Thread(target=release_each, args=(name, range(start, 64, 4))) for start in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert value_names(bridge) == []


def test_an_empty_put_has_rows(bridge):
    name = write_values(bridge, np.arange(2), b"t", [])
    assert len(read_values_head(name).owners) == 2
    assert release_values(name, [0, 1])


def test_another_layout_is_refused_with_both_numbers(put):
    name = put()
    with open(path_of(name), "r+b") as file:
        os.pwrite(file.fileno(), (9).to_bytes(4, "little"), 8)
    with pytest.raises(shmbridge.LayoutMismatch, match=r"layout 9 of values, this build has 1"):
        read_values_head(name)


@pytest.mark.parametrize("place", [12, 16, 24, 32])
def test_garbage_in_a_header_is_refused(put, place):
    name = put()
    with open(path_of(name), "r+b") as file:
        os.pwrite(file.fileno(), b"\xff\xff\xff\x7f", place)
    with pytest.raises(shmbridge.ShmBridgeError, match="bytes"):
        read_values_head(name)
    assert not remove_values(name)[0], "kept, for a person to look at"
    assert remove_values(name, with_records=True)[0]


def test_clean_takes_what_was_not_cleared_only_when_the_queue_is_over(bridge, put):
    control = open_control(bridge)
    assert lock_exclusive(control.mapping.fd, LockByte.VALUES)
    name = put()
    report = shmbridge.clean(bridge, dry_run=False)
    assert report.kept[name] == "holds 3 rows that nobody has cleared; its queue is alive"
    unlock_all(control.mapping.fd)
    assert shmbridge.clean(bridge).undelivered == {name: 3}
    report = shmbridge.clean(bridge, dry_run=False)
    assert name in report.removed
    assert report.undelivered == {name: 3}
    assert bridge not in [each.name for each in shmbridge.list_bridges()]


def test_too_little_memory_commits_nothing(bridge, monkeypatch):
    monkeypatch.setattr(segment.locks, "memory_headroom", lambda: (1 << 20, "the test"))
    with pytest.raises(shmbridge.ShmTooSmall, match=r"the test has 1 MiB left"):
        write_values(bridge, np.arange(1), b"", [(0, [bytes(4 << 20)])])
    assert value_names(bridge) == []
