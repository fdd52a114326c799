"""The lock around reserving memory: processes of one user take turns, and no other user can delay them."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import shmbridge
from shmbridge.segments import segment


def test_a_lock_on_the_mount_delays_nobody(make_producer: Callable[..., shmbridge.Producer]):
    """Any user may lock the directory."""
    directory = os.open("/dev/shm", os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(directory, fcntl.LOCK_EX)
        begun = time.monotonic()
        make_producer()
        assert time.monotonic() - begun < 5
    finally:
        os.close(directory)


def test_processes_of_one_user_take_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The file is private; a link put in its place by another user is not followed, and not waited for."""
    monkeypatch.setattr(segment, "MOUNT", tmp_path)
    monkeypatch.setattr(segment, "_TURN_TIMEOUT_S", 0.2)
    with segment._one_at_a_time():
        (turn,) = tmp_path.iterdir()
        assert turn.stat().st_mode & 0o777 == 0o600
        begun = time.monotonic()
        with segment._one_at_a_time():
            assert time.monotonic() - begun >= 0.2
    turn.unlink()
    turn.symlink_to("elsewhere")
    with segment._one_at_a_time():
        assert not (tmp_path / "elsewhere").exists()
