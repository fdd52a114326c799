"""The storage client: `put`, `get` and `clear` by keys, as TransferQueue asks of every backend."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from transfer_queue.storage.clients.base import StorageClientFactory, StorageKVClient
from transfer_queue.storage.simple_storage import StorageKeyNotFoundError

from shmbridge.consumers.transfer_queue.columns import Column
from shmbridge.consumers.transfer_queue.queue_lock import capacity_of, timeout_of
from shmbridge.consumers.transfer_queue.store import Cleared, OpenSegment, ValueStore, joined, runs
from shmbridge.errors import BadArgument

CLIENT = "ShmBridgeStorageClient"


@StorageClientFactory.register(CLIENT)
class ShmBridgeStorageClient(StorageKVClient):
    """Values of one bridge by keys, `number of the row@field`. Holds nothing between calls."""

    def __init__(self, config: dict[str, Any]) -> None:
        """Does not block. Reads `bridge`, `capacity` (such as "8G") and `timeout_s` of the configuration."""
        super().__init__(config)
        self.store = ValueStore(config["bridge"], capacity_of(config), timeout_of(config))

    def put(self, keys: list[str], values: list[Any]) -> list[Any]:
        """Commits one value per key, all or none, and returns the name of their segment once per key.

        Blocks while it copies. Errors as `ValueStore.put`, and InvalidRecord for what cannot be carried.
        """
        if len(keys) != len(values):
            raise BadArgument(f"{len(keys)} keys for {len(values)} values", hint="pass as many of each")
        fields: dict[str, dict[int, Any]] = {}
        for key, value in zip(keys, values, strict=True):
            owner, field = split_key(key)
            fields.setdefault(field, {})[owner] = value
        owners = list(next(iter(fields.values()), {}))
        if any(list(of_rows) != owners for of_rows in fields.values()):
            raise BadArgument("the fields have other rows than each other", hint="put each by itself")
        if not owners:
            return []
        columns = [Column(name, list(of_rows.values()), len(owners)) for name, of_rows in fields.items()]
        return [self.store.put(owners, columns)] * len(keys)

    def get(
        self, keys: list[str], shapes: Any = None, dtypes: Any = None, custom_backend_meta: Any = None
    ) -> list[Any]:
        """Returns the value of each key: views, which the caller may write to without anybody seeing it.

        Args:
            keys: as put.
            shapes: not used; the segment says them.
            dtypes: not used.
            custom_backend_meta: what `put` returned for each key.

        Raises:
            StorageKeyNotFoundError: a row was cleared, or never put.
        """
        opened = Opened(self.store)
        found = []
        for key, name in zip(keys, custom_backend_meta or [None] * len(keys), strict=True):
            owner, field = split_key(key)
            column, row = opened.find(field, owner, name)
            found.append(column.value(row))
        return found

    def get_field(self, field: str, owners: Sequence[int], names: Sequence[Any], opened: Opened) -> Any:
        """Returns one field of some rows as TransferQueue gives it; see `joined`."""
        return joined(runs(opened.find(field, *each) for each in zip(owners, names, strict=True)))

    def clear(self, keys: list[str], custom_backend_meta: Any = None) -> None:
        """Releases the rows of these keys whole: all their fields. Idempotent, never blocks.

        TransferQueue clears rows, and forgets all that it knew of them, whatever fields it names.
        """
        self.store.clear({split_key(key)[0] for key in keys})


class Opened:
    """The segments that one read has mapped, each once."""

    def __init__(self, store: ValueStore) -> None:
        self._store = store
        self._segments: dict[str, OpenSegment] = {}

    def find(self, field: str, owner: int, name: Any) -> tuple[Any, int]:
        """Returns the column and the row of a value; StorageKeyNotFoundError if it was cleared."""
        if not isinstance(name, str):
            raise StorageKeyNotFoundError(
                f"row {owner}, field {field!r}: the controller knows no segment of it"
            )
        try:
            if name not in self._segments:
                self._segments[name] = self._store.open(name)
            there = self._segments[name]
            return there.column(field), there.row(owner)
        except Cleared as gone:
            raise StorageKeyNotFoundError(f"row {owner}, field {field!r}: {gone.args[0]}") from None
        except KeyError:
            raise StorageKeyNotFoundError(f"row {owner}, field {field!r} is not in {name}") from None


def split_key(key: str) -> tuple[int, str]:
    """Returns the number of the row and the field of a key; a field may have an @ in it."""
    owner, found, field = key.partition("@")
    if not found or not owner.isdecimal():
        raise BadArgument(f"key {key!r} is not of the form 17@field", hint="use TransferQueue's own calls")
    return int(owner), field
