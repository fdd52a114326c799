"""Who keeps a queue alive, and who takes part in it: locks on the control segment of its bridge.

The controller of TransferQueue dies with the process that made it, and with it all that is known of the
values; so the lock of that process proves that the queue lives, and the next queue of the bridge may remove
what it left.
"""

from __future__ import annotations

import logging
import math
import os
import weakref
from collections.abc import Mapping
from typing import Any

from shmbridge.config import check_bridge_name, parse_size
from shmbridge.errors import BadConfig, QueueTaken
from shmbridge.segments import (
    MOUNT,
    LockByte,
    leave_bridge,
    lock_exclusive,
    mount_id,
    open_control,
    remove_values,
    sweep_bridge,
    value_names,
)

log = logging.getLogger(__name__)

BRIDGE = "transfer-queue"  # if the configuration names none
SETTINGS = ("bridge", "capacity", "timeout_s")


class Membership:
    """This process' part in a bridge: its lock shows it to `shmbridge clean`, and keeps the bridge."""

    def __init__(self, bridge: str) -> None:
        """Blocks while another process creates the bridge, 10 s at most."""
        self._control = open_control(bridge)
        self._leave = weakref.finalize(self, _leave, self._control, bridge, os.getpid())

    @property
    def fd(self) -> int:
        """Of the control segment, for locks."""
        return self._control.mapping.fd

    def leave(self) -> None:
        """Gives up all its locks, and removes what dead processes left. Idempotent."""
        self._leave()


class Queue:
    """The queue of a bridge, for the process that began it; its values go with it."""

    def __init__(self, bridge: str) -> None:
        """Takes the bridge, and removes what an earlier queue left there.

        Raises:
            QueueTaken: a living process has a queue on that bridge.
        """
        self._membership = Membership(bridge)
        if not lock_exclusive(self._membership.fd, LockByte.VALUES):
            self._membership.leave()
            raise QueueTaken(
                f"bridge {bridge!r} has a living queue",
                hint=f"choose another name: backend.shmbridge.bridge={bridge}2",
            )
        _remove_all(bridge, "an earlier queue of the bridge left them")
        sweep_bridge(bridge)
        self._end = weakref.finalize(self, _end, bridge, self._membership, os.getpid())

    def close(self) -> None:
        """Ends the queue: removes all its values. Idempotent; the end of the process does it, too."""
        self._end()


def join(settings: Mapping[str, Any]) -> Membership:
    """Takes part in the bridge of a queue that was begun; raises BadConfig on another node."""
    here, there = mount_id(), settings.get("mount", "")
    if here != there:
        raise BadConfig(
            f"this process has another {MOUNT} ({here or 'unknown'}) than who began the queue "
            f"({there or 'unknown'})",
            hint="keep all clients of the queue on one node, or share /dev/shm between their containers",
        )
    return Membership(settings["bridge"])


def begin(settings: Mapping[str, Any]) -> tuple[Queue, dict[str, Any]]:
    """Begins the queue that the configuration names; returns it, and the configuration for its clients.

    Raises:
        QueueTaken: a living process has a queue on that bridge.
        BadConfig, BadBridgeName: a setting is none, or has no such value; nothing began.
    """
    check_settings(settings)
    bridge = settings.get("bridge") or BRIDGE
    return Queue(bridge), {**settings, "bridge": bridge, "mount": mount_id()}


def check_settings(settings: Mapping[str, Any]) -> None:
    """Raises BadConfig or BadBridgeName for what no client of the queue could work with."""
    if unknown := sorted(set(settings) - set(SETTINGS)):
        raise BadConfig(
            f"backend.shmbridge has no setting {', '.join(unknown)}", hint=f"use one of {', '.join(SETTINGS)}"
        )
    if settings.get("bridge"):
        check_bridge_name(settings["bridge"])
    capacity_of(settings)
    timeout_of(settings)


def capacity_of(settings: Mapping[str, Any]) -> int | None:
    """Returns the bytes that all values of the queue may have, None for any; raises BadConfig."""
    capacity = settings.get("capacity")
    try:
        size = None if capacity is None else parse_size(str(capacity))
    except ValueError as wrong:
        raise BadConfig(f"backend.shmbridge.capacity: {wrong}", hint='capacity="8G", or none') from None
    if size == 0:
        raise BadConfig("backend.shmbridge.capacity is 0: no put would fit", hint='capacity="8G", or none')
    return size


def timeout_of(settings: Mapping[str, Any]) -> float:
    """Returns how many seconds a put waits for room, 60 if nothing is said; raises BadConfig."""
    timeout_s = settings.get("timeout_s", 60.0)
    try:
        seconds = math.inf if timeout_s is None else float(timeout_s)
    except (TypeError, ValueError):
        seconds = -1.0
    if not seconds >= 0:
        raise BadConfig(
            f"backend.shmbridge.timeout_s={timeout_s!r} is no number of seconds",
            hint="timeout_s=60, or null to wait for ever",
        )
    return seconds


def _remove_all(bridge: str, why: str) -> None:
    found = [remove_values(name, with_records=True) for name in value_names(bridge)]
    if rows := sum(held for removed, _, held in found if removed):
        log.warning("bridge %s: %d rows that nobody had cleared were removed: %s", bridge, rows, why)


def _leave(control: Any, bridge: str, pid: int) -> None:
    if os.getpid() == pid:
        leave_bridge(control.mapping.fd, bridge)


def _end(bridge: str, member: Membership, pid: int) -> None:
    if os.getpid() == pid:
        _remove_all(bridge, "the process that began their queue has ended it")
        member.leave()
