"""What the live view reads: looks at bridges, and copies of records. Takes nothing and holds nothing."""

from typing import Any, Protocol

from shmbridge.record import RecordMeta
from shmbridge.segments import bridge_names
from shmbridge.watch import observer, snapshot
from shmbridge.watch.snapshot import BridgeLook


class Readable(Protocol):
    """A copy of a record, as the view reads it; see Record."""

    @property
    def meta(self) -> RecordMeta:
        """Origin of the record."""

    @property
    def columns(self) -> list[str]:
        """Names of the columns that are present."""

    def __len__(self) -> int:
        """Returns the number of rows."""

    def __getitem__(self, name: str) -> Any:
        """Returns a column."""


class Source(Protocol):
    """Where looks and records come from."""

    def bridges(self) -> list[str]:
        """Returns the names of all bridges of this user."""

    def look(self, bridge: str) -> BridgeLook | None:
        """Returns one look; None if there is no such bridge."""

    def newest(self, bridge: str, lane: str) -> Readable | None:
        """Returns a copy of the newest record that a lane holds; None if it holds none."""

    def rest(self) -> None:
        """Gives back what reading records took."""


class LiveSource:
    """The bridges of this machine. One thread at a time."""

    def __init__(self) -> None:
        self._observer: observer.Observer | None = None

    def bridges(self) -> list[str]:
        """Returns the names of all bridges of this user. Never blocks."""
        return bridge_names()

    def look(self, bridge: str) -> BridgeLook | None:
        """Returns one look; None if there is no such bridge. Never blocks."""
        return snapshot.look(bridge)

    def newest(self, bridge: str, lane: str) -> Readable | None:
        """Returns a copy of the newest record that a lane holds; None if it holds none. Never blocks."""
        if self._observer is None or self._observer.bridge != bridge:
            self.rest()
            self._observer = observer.Observer(bridge)
        return self._observer.newest(lane)

    def rest(self) -> None:
        """Unmaps the lanes, which reading records maps. Never blocks."""
        if self._observer is not None:
            self._observer.close()
            self._observer = None
