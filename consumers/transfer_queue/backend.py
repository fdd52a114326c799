"""Registers the backend `shmbridge` with TransferQueue, and begins a queue where `init()` finds none."""

from __future__ import annotations

from typing import Any

import transfer_queue
from transfer_queue.storage.bootstrap.provider import StorageBootstrapProvider

from shmbridge.consumers.tested_versions import warn_if_untested
from shmbridge.consumers.transfer_queue.manager import BACKEND  # its import registers manager and client
from shmbridge.consumers.transfer_queue.queue_lock import Queue, begin


def register() -> None:
    """Makes the backend known in this process, and warns if TransferQueue is none of the tested releases.

    Idempotent.
    """
    if StorageBootstrapProvider.get_provider(BACKEND) is None:
        warn_if_untested("TransferQueue", "0.1.11", "0.1.12")
        StorageBootstrapProvider.register_provider(BACKEND)(begin_queue)


def begin_queue(conf: Any) -> Queue:
    """What `init()` calls in the process that begins a queue; TransferQueue keeps what it returns until
    `close()`.

    Args:
        conf: the whole configuration; `backend.shmbridge` gets what the clients of the queue need.

    Raises:
        QueueTaken: a living process has a queue on that bridge.
        BadConfig, BadBridgeName: a setting is none, or has no such value.

    An error also ends the controller that `init()` made before it: a later `init()` makes another,
    instead of waiting for ever for that controller's configuration.
    """
    try:
        queue, conf.backend[BACKEND] = begin(conf.backend.get(BACKEND) or {})
    except BaseException:
        transfer_queue.close()
        raise
    return queue
