"""A tap: gets every record of a hub before anybody else sees it, so that what is released has passed it."""

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

from shmbridge._ext.lane import LanePoller
from shmbridge.errors import BadArgument
from shmbridge.record.leases import abandon
from shmbridge.record.record import Record

if TYPE_CHECKING:
    _Poller = LanePoller[Record]
else:
    _Poller = LanePoller


class Tap(Protocol):
    """What `Consumer(tap=)` takes. Its calls come from the thread that takes records, one at a time."""

    def take(self, records: Sequence[Record]) -> None:
        """Gets records in the order in which they are handed out next. May block: the consumer waits.

        An exception ends the call that was to hand them out. They stay un-released and come to the tap again,
        before all others, so a tap may get a record twice. Keep no view of a record: copy.
        """

    def close(self) -> None:
        """Ends the tap, at the end of its consumer. Idempotent."""


def check_tap(tap: Tap | None) -> Tap | None:
    """Returns it, or raises BadArgument for what has no `take` and `close`."""
    if tap is None or all(callable(getattr(tap, name, None)) for name in ("take", "close")):
        return tap
    raise BadArgument(
        f"tap={tap!r} has no take() and close()", hint="tap=shmbridge.archive.recorder.Recorder(folder)"
    )


class TappedPoller(_Poller):
    """The lanes of a hub in turn, through a tap: what the tap has not taken is handed out to nobody."""

    tap: Tap

    def begin(self, tap: Tap, note_wait: Callable[[int], None]) -> None:
        """Sets the tap, once, before anything is taken; `note_wait` is told the nanoseconds of each call."""
        self.tap, self._note_wait = tap, note_wait
        self._untapped: list[Record] = []
        self._wait_s, self._since_s = 0.0, 0.0

    def take(self, anyway: bool = False, by: int = 0) -> Record | None:
        """Returns the next record, as LanePoller.take, once the tap has it."""
        if not self._untapped:
            record = super().take(anyway, by)
            if record is None:
                return None
            self._untapped = [record]
        return self._through_tap(1, by)[0]

    def poll(self, most: int, anyway: bool = False, by: int = 1) -> list[Record]:
        """Returns up to `most` records, as LanePoller.poll, once the tap has them."""
        if len(self._untapped) < most:
            self._untapped += super().poll(most - len(self._untapped), anyway, by)
        return self._through_tap(most, by) if self._untapped and most > 0 else []

    def _through_tap(self, most: int, by: int) -> list[Record]:
        records = self._untapped[:most]
        self._since_s = time.monotonic()
        try:
            self.tap.take(records)
        finally:
            took_s = time.monotonic() - self._since_s
            self._wait_s, self._since_s = self._wait_s + took_s, 0.0
            self._note_wait(int(took_s * 1e9))
            for record in records:  # a tap's look is not the user's
                record._looked_at, record._handed_out_by = False, by
        del self._untapped[:most]
        return records

    def stats(self) -> dict[str, float]:
        """Returns `tap_wait_s`, seconds spent in the tap, and `tap_busy`, 1 during a call. Any thread."""
        since_s = self._since_s
        running_s = time.monotonic() - since_s if since_s else 0.0
        return {"tap_wait_s": self._wait_s + running_s, "tap_busy": float(since_s > 0)}

    def close(self) -> None:
        """Lets go of everything; records that the tap has not taken go to the next hub."""
        abandon(self._untapped)
        self._untapped = []
        super().close()
