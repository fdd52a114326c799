"""Says so while a trainer waits for its bridge: `said`. Knows no trainer."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

log = logging.getLogger(__name__)

EVERY_S = 60.0


@contextmanager
def said(bridge: str) -> Iterator[None]:
    """Logs a warning for each minute that the block takes, in a thread of its own. Never blocks.

    Args:
        bridge: the name that the block waits for.
    """
    over = threading.Event()
    thread = threading.Thread(target=_say, args=(bridge, over), name="shmbridge-wait", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _say(bridge: str, over: threading.Event) -> None:
    began = time.monotonic()
    while not over.wait(EVERY_S):
        log.warning(
            "no batch from bridge %r for %.0f s -> do environments run on this bridge? shmbridge inspect %s",
            bridge,
            time.monotonic() - began,
            bridge,
        )
