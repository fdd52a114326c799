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
    reader: LaneReader
    index: bytes
    sequence: int
    generation: int
    slot: int
    look: int
    min_policy_version: int
    max_policy_version: int
    t_created_ns: int
    t_publish_ns: int
    token_count: int
    extent_bytes: int
    rows: int
    column_entries: int
    group_size: int
    env_id: int
    flags: int
    origin_sequence: int
    origin_waited_ns: int
    origin_transfer_ns: int
    redelivered: bool
    looked_at: bool
    handed_out_by: int
    @property
    def group_id(self) -> str: ...
    @property
    def slot_words(self) -> tuple[int, int, int, int, int, int, int]: ...
    @property
    def is_released(self) -> bool: ...
    def release(self) -> None: ...
    def discard(self, reason: int) -> None: ...
    def abandon(self) -> None: ...
    def __buffer__(self, flags: int, /) -> memoryview: ...
