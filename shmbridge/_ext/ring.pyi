from typing import TypeVar

from shmbridge._ext.mapping import Mapping

_L = TypeVar("_L", bound=Lease)

class LaneWriter:
    slot_count: int
    data_bytes: int
    def __init__(self, lane: Mapping, control: Mapping) -> None: ...
    def claim(self, size: int) -> bool: ...
    @property
    def claiming(self) -> bool: ...
    def claimed_memory(self) -> memoryview: ...
    def abort(self) -> None: ...
    def commit(
        self,
        *,
        rows: int,
        columns: int,
        index_bytes: int,
        group_id_bytes: int,
        flags: int,
        tokens: int,
        min_policy_version: int,
        max_policy_version: int,
        t_created_ns: int,
        group_size: int,
        env_id: int,
    ) -> int: ...
    def wait_space(self, timeout_ns: int) -> int: ...
    def count_wait(self, wait_ns: int) -> None: ...
    def count_drop(self, reason: int) -> None: ...
    @property
    def outstanding(self) -> int: ...
    @property
    def free_bytes(self) -> int: ...

class LaneReader:
    lane: Mapping
    column_count: int
    slot_count: int
    data_bytes: int
    next: int
    first_head: int
    held: int
    abandoned: bool
    def __init__(self, lane: Mapping, keep: object) -> None: ...
    @property
    def waiting(self) -> int: ...
    @property
    def space_waiting(self) -> bool: ...
    @property
    def wanted_bytes(self) -> int: ...
    def take(self, cls: type[_L]) -> _L | None: ...
    def ring(self) -> None: ...
    def count_discard(self, reason: int, count: int = 1) -> None: ...
    def quarantine(self) -> None: ...

class Lease:
    reader: LaneReader
    index: bytes
    sequence: int
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
    redelivered: bool
    @property
    def group_id(self) -> str: ...
    @property
    def is_released(self) -> bool: ...
    def release(self) -> None: ...
    def abandon(self) -> None: ...
    def __buffer__(self, flags: int, /) -> memoryview: ...
