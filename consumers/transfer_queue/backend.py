"""TransferQueue's backend `shmbridge`: `register` it, begin a queue, and its storage manager.

Whole fields of a put go in, whole fields of a read come out; no row is taken apart.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from typing import Any

import torch
import transfer_queue
from tensordict import TensorDict
from transfer_queue.metadata import BatchMeta
from transfer_queue.storage.bootstrap.provider import StorageBootstrapProvider
from transfer_queue.storage.managers.base import StorageManager, StorageManagerFactory
from transfer_queue.storage.simple_storage import StorageKeyNotFoundError

from shmbridge.consumers.feed import warn_if_untested
from shmbridge.consumers.transfer_queue.columns import Column
from shmbridge.consumers.transfer_queue.store import (
    Cleared,
    OpenSegment,
    Queue,
    ValueStore,
    begin,
    capacity_of,
    join,
    joined,
    runs,
    timeout_of,
)
from shmbridge.errors import InvalidRecord

log = logging.getLogger(__name__)


def register() -> None:
    """Makes the backend known in this process, and warns if TransferQueue is none of the tested releases.

    Idempotent.
    """
    if StorageBootstrapProvider.get_provider(BACKEND) is None:
        warn_if_untested("TransferQueue", "0.1.11", "0.1.12")
        StorageBootstrapProvider.register_provider(BACKEND)(begin_queue)


def begin_queue(conf: Any) -> Queue:
    """What `init()` calls in the process that begins a queue; TransferQueue keeps what it returns until
    `close()`.

    Args:
        conf: the whole configuration; `backend.shmbridge` gets what the clients of the queue need.

    Raises:
        QueueTaken: a living process has a queue on that bridge.
        BadConfig, BadBridgeName: a setting is none, or has no such value.

    An error also ends the controller that `init()` made before it: a later `init()` makes another,
    instead of waiting for ever for that controller's configuration.
    """
    try:
        queue, conf.backend[BACKEND] = begin(conf.backend.get(BACKEND) or {})
    except BaseException:
        transfer_queue.close()
        raise
    return queue


class Opened:
    """The segments that one read has mapped, each once."""

    def __init__(self, store: ValueStore) -> None:
        self._store = store
        self._segments: dict[str, OpenSegment] = {}

    def find(self, field: str, owner: int, name: Any) -> tuple[Any, int]:
        """Returns the column and the row of a value; StorageKeyNotFoundError if it was cleared."""
        if not isinstance(name, str):
            raise StorageKeyNotFoundError(f"row {owner}, field {field!r}: no segment of it is known")
        try:
            if name not in self._segments:
                self._segments[name] = self._store.open(name)
            there = self._segments[name]
            return there.column(field), there.row(owner)
        except Cleared as gone:
            raise StorageKeyNotFoundError(f"row {owner}, field {field!r}: {gone.args[0]}") from None
        except KeyError:
            raise StorageKeyNotFoundError(f"row {owner}, field {field!r} is not in {name}") from None


BACKEND = "shmbridge"


@StorageManagerFactory.register(BACKEND)
class ShmBridgeStorageManager(StorageManager):
    """Storage of one TransferQueue client, in shared memory. TransferQueue makes it in `init()`.

    Its calls copy in threads of the event loop's executor, so that the loop goes on. A put that waits for
    room takes no thread: reads and clears go on, and a clear is what makes room.
    """

    def __init__(self, controller_info: Any, config: Mapping[str, Any], zmq_context: Any = None) -> None:
        """Joins the bridge of the queue; blocks for the handshake with the controller.

        Raises:
            BadConfig: this process shares no memory with the one that began the queue.
        """
        self._membership = join(config)
        super().__init__(controller_info, config)  # with a context of its own, as every key-value backend
        self.store = ValueStore(config["bridge"], capacity_of(config), timeout_of(config))

    async def put_data(
        self, data: TensorDict, metadata: BatchMeta, data_parser: Callable[[Any], Any] | None = None
    ) -> None:
        """Commits all fields of some rows in one segment, then tells the controller where they are.

        Raises:
            InvalidRecord: a value cannot be carried, or a field has another number of rows; nothing was
                committed.
            LaneFull, ShmTooSmall: there is no room; nothing was committed.
        """
        if data_parser is not None:
            raise NotImplementedError("backend shmbridge takes no data_parser -> parse before the put")
        owners = metadata.global_indexes
        if data.batch_size[0] != len(owners):
            raise InvalidRecord(
                f"the put has {data.batch_size[0]} rows, its metadata {len(owners)}",
                hint="put as many rows as keys",
            )
        if not owners:
            log.warning("a put of no rows was left out")
            return
        columns = {name: Column(name, data[name], len(owners)) for name in sorted(data.keys())}
        schema = {name: _schema(data[name], column) for name, column in columns.items()}
        listed = list(columns.values())
        for pause_s in self.store.waits(listed):
            await asyncio.sleep(pause_s)
        name = await asyncio.get_running_loop().run_in_executor(None, self.store.write, owners, listed)
        for known in metadata._custom_backend_meta:  # as every backend of TransferQueue does
            known.update(dict.fromkeys(columns, name))
        told = {owner: dict.fromkeys(columns, name) for owner in owners}
        try:
            await self.notify_data_update(metadata.partition_ids[0], owners, schema, told)
        except Exception:  # raised before anything was sent
            self.store.discard(name)
            raise

    async def get_data(self, metadata: BatchMeta) -> TensorDict:
        """Returns the fields of some rows: views, or one copy where rows of several puts are joined.

        Writing to what it returns changes nothing for anybody else. Raises StorageKeyNotFoundError if a row
        was cleared.
        """
        if not metadata.field_names:
            log.warning("a read of no fields returned nothing")
            return TensorDict({}, batch_size=len(metadata))
        return await asyncio.get_running_loop().run_in_executor(None, self._get, metadata)

    def _get(self, metadata: BatchMeta) -> TensorDict:
        opened, owners = Opened(self.store), metadata.global_indexes
        rows = list(zip(owners, metadata._custom_backend_meta, strict=True))
        fields = {
            field: joined(runs(opened.find(field, owner, names.get(field)) for owner, names in rows))
            for field in sorted(metadata.field_names)
        }
        return TensorDict(fields, batch_size=len(owners))

    async def clear_data(self, metadata: BatchMeta) -> None:
        """Releases all values of these rows, of whatever fields. Idempotent."""
        owners = list(metadata.global_indexes)
        await asyncio.get_running_loop().run_in_executor(None, self.store.clear, owners)

    def close(self) -> None:
        """Leaves the bridge; what was put stays. Idempotent."""
        super().close()
        if (membership := getattr(self, "_membership", None)) is not None:
            membership.leave()


def _schema(given: Any, column: Column) -> dict[str, Any]:
    """What TransferQueue's `extract_field_schema` says of a field, without taking its rows apart."""
    if not isinstance(given, torch.Tensor):
        return {"dtype": None, "shape": None, "is_nested": False, "is_non_tensor": True}
    shape = column.shapes[0] or [1]  # TransferQueue counts a number as one value
    schema = {
        "dtype": given.dtype,
        "shape": torch.Size(shape),
        "is_nested": column.is_nested,
        "is_non_tensor": False,
    }
    if column.is_nested:
        schema["per_sample_shapes"] = [tuple(shape) for shape in column.shapes]
    return schema
