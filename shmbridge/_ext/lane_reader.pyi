from typing import Any, TypeVar

import numpy as np

from shmbridge._ext.mapping import Mapping

_L = TypeVar("_L", bound=Lease)

class Drops:
    returned: int
    dropped: int
    def take_unsaid(self) -> list[tuple[int, bool]]: ...

class LaneReader:
    lane: Mapping
    drops: Drops | None
    slot_count: int
    data_bytes: int
    data_at: int
    held: int
    untrusted: bool
    abandoned: bool
    ranks_before: bool
    about: Any
    def __init__(self, lane: Mapping, keep: object) -> None: ...
    def describe(
        self, about: object, table: bytes, names: tuple[str, ...], dtypes: tuple[np.dtype[Any], ...]
    ) -> None: ...
    @property
    def dropped(self) -> int: ...
    def take_back_dropped(self) -> int: ...
    @property
    def put_off(self) -> int: ...
    @property
    def discards_put_off(self) -> list[int]: ...
    def release_put_off(self) -> None: ...
    @property
    def waiting(self) -> int: ...
    @property
    def undelivered(self) -> int: ...
    @property
    def wanted_bytes(self) -> int: ...
    @property
    def quarantined(self) -> int: ...
    def has_room_for(self, size: int) -> bool: ...
    def take(self, cls: type[_L]) -> _L | None: ...
    def ring(self) -> None: ...
    def quarantine(self, count: int) -> None: ...

class Lease:
    _lane_reader: LaneReader
    _sequence: int
    _generation: int
    _slot: int
    _look: int
    _min_policy_version: int
    _max_policy_version: int
    _t_created_ns: int
    _t_publish_ns: int
    _extent_bytes: int
    _group_size: int
    _env_id: int
    _flags: int
    _origin_sequence: int
    _origin_waited_ns: int
    _origin_transfer_ns: int
    _redelivered: bool
    _looked_at: bool
    _handed_out_by: int
    @property
    def rows(self) -> int:
        """Trajectories in the record."""
    @property
    def token_count(self) -> int:
        """Tokens of all its rows."""
    @property
    def is_released(self) -> bool:
        """Whether release() was called."""
    def release(self) -> None:
        """Ends the lease as soon as no view of it is left. Idempotent."""
    @property
    def _slot_words(self) -> tuple[int, int, int, int, int, int, int]: ...
    @property
    def _group_id(self) -> str: ...
    def _discard(self, reason: int) -> None: ...
    def _abandon(self) -> None: ...
    def __buffer__(self, flags: int, /) -> memoryview: ...
