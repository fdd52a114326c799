"""The calls that hand records out, and the warning about a record that was handed out and never released."""

import logging
import queue
import threading
import warnings
from enum import IntEnum

from shmbridge.segments import start_apart

log = logging.getLogger(__name__)

_LOG_S = 1.0


class Call(IntEnum):
    """The call that handed a record out. `_ext.lane.LanePoller` sets the first two itself."""

    GET = 0
    POLL = 1
    GET_ASYNC = 2
    FOR = 3
    ASYNC_FOR = 4
    BATCHES = 5
    TAKE_GROUPS = 6
    RANK = 7


_INSTEAD = {
    Call.GET: ("get()", "write `with consumer.get() as record:`, or call record.release() once it is used"),
    Call.POLL: (
        "poll()",
        "write `with record:` for each record of the list, or call record.release() once it is used",
    ),
    Call.GET_ASYNC: (
        "get_async()",
        "write `with await consumer.get_async() as record:`, or call record.release() once it is used",
    ),
    Call.FOR: (
        "`for record in consumer`",
        "call record.release() before a `break`; the next step of the loop releases by itself",
    ),
    Call.ASYNC_FOR: (
        "`async for record in consumer`",
        "call record.release() before a `break`; the next step releases by itself",
    ),
    Call.BATCHES: (
        "batches()",
        "write `with batch:`, or call batch.release() before a `break` and under hold='caller'",
    ),
    Call.TAKE_GROUPS: (
        "take_groups()",
        "call release() on each group's records, or return the groups by put_back()",
    ),
    Call.RANK: (
        "a Rank's batches() or next_share()",
        "write `with batch:` or `with share:`, or call its release() before a `break`",
    ),
}


def say_lost(where: str, number: int, looked_at: bool) -> None:
    """Warns of the first lease dropped without release, by log and ResourceWarning (raised if an error)."""
    call, instead = _INSTEAD[Call(number)]
    if looked_at:
        what = (
            "it stays un-released and keeps its room in the lane: take_back_dropped() hands it out again, "
            "else the next consumer gets it"
        )
    else:
        what = "it was not read: it is handed out again"
    said = f"a record that {call} handed out was dropped without release ({where}); {what} -> {instead}"
    _log_apart(said)
    warnings.warn(said, ResourceWarning, stacklevel=3)


def _log_apart(said: str) -> None:
    """Logs a warning in another thread, and waits a moment for it.

    Interrupts are what leaves records un-released, and before Python 3.13 an interrupt of logging may keep
    its locks for good. A call in this thread could do that to every other thread; and if the program's own
    logging has already done it, this thread must not hang.
    """
    done: queue.SimpleQueue[bool] = queue.SimpleQueue()

    def run() -> None:
        log.warning("%s", said)
        done.put(True)

    try:
        start_apart(
            threading.Thread(target=run, name="shmbridge-log", daemon=True), lambda _: done.put(False)
        )
        logged = done.get(timeout=_LOG_S)
    except queue.Empty:
        return
    except RuntimeError:  # not even the starting thread can be had
        logged = False
    if not logged:
        log.warning("%s", said)
