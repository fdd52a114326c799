"""The storage manager: whole fields of a put in, whole fields of a read out, no row taken apart."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from typing import Any

import torch
from tensordict import TensorDict
from transfer_queue.metadata import BatchMeta
from transfer_queue.storage.managers.base import KVStorageManager, StorageManagerFactory

from shmbridge.consumers.transfer_queue.client import CLIENT, Opened, ShmBridgeStorageClient
from shmbridge.consumers.transfer_queue.columns import Column
from shmbridge.consumers.transfer_queue.queue_lock import join
from shmbridge.errors import InvalidRecord

log = logging.getLogger(__name__)

BACKEND = "shmbridge"


@StorageManagerFactory.register(BACKEND)
class ShmBridgeStorageManager(KVStorageManager):
    """Storage of one TransferQueue client, in shared memory. TransferQueue makes it in `init()`.

    Its calls copy in threads of the event loop's executor, so that the loop goes on. A put that waits for
    room takes no thread: reads and clears go on, and a clear is what makes room.
    """

    storage_client: ShmBridgeStorageClient

    def __init__(self, controller_info: Any, config: Mapping[str, Any], zmq_context: Any = None) -> None:
        """Joins the bridge of the queue; blocks for the handshake with the controller.

        Raises:
            BadConfig: this process shares no memory with the one that began the queue.
        """
        settings = {**config, "client_name": CLIENT}
        self._membership = join(settings)
        super().__init__(controller_info, settings, zmq_context=zmq_context)

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
        store, loop = self.storage_client.store, asyncio.get_running_loop()
        listed = list(columns.values())
        for pause_s in store.waits(listed):
            await asyncio.sleep(pause_s)
        name = await loop.run_in_executor(None, store.write, owners, listed)
        for known in metadata._custom_backend_meta:  # as every backend of TransferQueue does
            known.update(dict.fromkeys(columns, name))
        told = {owner: dict.fromkeys(columns, name) for owner in owners}
        try:
            await self.notify_data_update(metadata.partition_ids[0], owners, schema, told)
        except Exception:  # raised before anything was sent
            store.discard(name)
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
        opened, owners = Opened(self.storage_client.store), metadata.global_indexes
        places = metadata._custom_backend_meta
        fields = {
            name: self.storage_client.get_field(name, owners, [each.get(name) for each in places], opened)
            for name in sorted(metadata.field_names)
        }
        return TensorDict(fields, batch_size=len(owners))

    async def clear_data(self, metadata: BatchMeta) -> None:
        """Releases all values of these rows, of whatever fields. Idempotent."""
        owners = list(metadata.global_indexes)
        await asyncio.get_running_loop().run_in_executor(None, self.storage_client.store.clear, owners)

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
