"""A reader of these fuzzes: notes each record, compares every byte, and logs the release before making it.

Knows records and the log; knows nothing of how they came.
"""

import time
from typing import Any

import shmbridge

from .ledger import ConsumerLog, Kind, number_of
from .pattern import Pattern

_QUIET_S = 0.05


class Reader:
    """One process's."""

    def __init__(self, log: ConsumerLog, pattern: Pattern) -> None:
        self._append, self._pattern = log.append, pattern
        self._noted = (-1, -1)

    def note(self, record: Any) -> None:
        """The record was handed out; its bytes are compared."""
        meta = record.meta
        number = number_of(meta.producer_id)
        self._append(Kind.GOT_AGAIN if meta.redelivered else Kind.GOT, number, meta.sequence)
        if not self._pattern.is_whole(record, number):
            self._append(Kind.TORN, number, meta.sequence)

    def note_meta(self, meta: Any) -> None:
        """Notes a record that its batch released when it was gathered."""
        number = number_of(meta.producer_id)
        if meta.redelivered or (number, meta.sequence) != self._noted:  # once for all its rows
            self._append(Kind.GOT_AGAIN if meta.redelivered else Kind.GOT, number, meta.sequence)
            self._append(Kind.RELEASING, number, meta.sequence)
        self._noted = (number, meta.sequence)

    def compare(self, record: Any) -> None:
        """Once more, before it is given back: nothing may have changed."""
        number = number_of(record.meta.producer_id)
        if not self._pattern.is_whole(record, number):
            self._append(Kind.TORN, number, record._sequence)

    def giving_back(self, record: Any) -> None:
        """To be called before whatever releases the record."""
        self._append(Kind.RELEASING, number_of(record.meta.producer_id), record._sequence)


def take_the_rest(bridge: str, log: ConsumerLog, pattern: Pattern) -> None:
    """A plain consumer takes everything that is left, and ends orderly."""
    reader = Reader(log, pattern)
    with shmbridge.Consumer(bridge, lanes=512) as consumer:
        quiet_since = time.monotonic()
        while time.monotonic() < quiet_since + _QUIET_S:
            for record in consumer.poll():
                quiet_since = time.monotonic()
                reader.note(record)
                reader.giving_back(record)
                record.release()
                del record
