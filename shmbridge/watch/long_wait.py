"""Logs what a process waits for: the line of `inspect`, after five seconds, then every minute."""

import logging
import re
import time
from collections.abc import Callable

log = logging.getLogger(__name__)

EVERY_S = 60.0
_SOON_S = 1.0
_NUMBER = re.compile(r"\d[\d.]*")


class LongWait:
    """Logs what the waits of one consumer or rank are for; `look` is called about twice a second.

    A wait shorter than `LONG_S` is not logged. One that begins within a minute of the last line is
    logged only if its line is another one. One thread at a time.

    Args:
        bridge: name of the bridge.
        who: who waits, in front of the line; "": the bridge alone.
    """

    def __init__(self, bridge: str, who: str = "") -> None:
        self._bridge, self._who = bridge, who or f"bridge {bridge!r}"
        self._since_s: float | None = None  # of the wait that was looked at last
        self._next_s = 0.0
        self._last = ""  # the last line, without numbers

    def look(self, since_s: float | None, otherwise: Callable[[], str] = str) -> bool:
        """Logs a warning if one is due; returns whether one is due within the next second. Never blocks.

        Args:
            since_s: when the wait began, by time.monotonic(); None: nothing waits.
            otherwise: returns what is waited for where nothing is wrong with the bridge; "": nothing is
                logged.
        """
        if since_s is None:
            return False
        # Both are imported seconds before the first line is due, so that it is in time.
        from shmbridge.watch.diagnosis import LONG_S
        from shmbridge.watch.text import trouble

        now_s = time.monotonic()
        if (left_s := since_s + LONG_S - now_s) > 0:
            return left_s < _SOON_S
        is_new, self._since_s = since_s != self._since_s, since_s
        if not is_new and now_s < self._next_s:
            return False
        try:
            line = trouble(self._bridge) or otherwise()
        except Exception as wrong:  # whatever it is, the wait itself goes on
            line = f"what is waited for cannot be seen: {wrong}"
        without_numbers = _NUMBER.sub("", line)
        if line and (now_s >= self._next_s or without_numbers != self._last):
            self._last, self._next_s = without_numbers, now_s + EVERY_S
            log.warning("%s: %s", self._who, line)
        return False
