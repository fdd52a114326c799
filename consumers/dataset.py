"""A bridge as a torch data set: trajectory groups from live environments, for your own training loop.

    data = BridgeDataset("run1", groups=16)
    for batch in DataLoader(data, batch_size=None):
        loss = ...                                 # batch["tokens"], batch["advantages"], ... are tensors
        data.publish_policy_version(step)

This file opens the bridge, ends leases and keeps the position. `dataset_parts/batch_tensors.py` makes the
tensors, `dataset_parts/position.py` defines the saved state.
"""

from __future__ import annotations

import os
import time
from collections.abc import Generator, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Literal, Self

from torch.utils.data import IterableDataset, get_worker_info

import shmbridge
from shmbridge import Batch, Record
from shmbridge.consumers.dataset_parts.batch_tensors import Tensors, batch_tensors, check_names, row_tensors
from shmbridge.consumers.dataset_parts.position import Place, Position
from shmbridge.record.leases import abandon
from shmbridge.schema import Split
from shmbridge.segments.at_exit import closed_at_exit

if TYPE_CHECKING:
    import pyarrow as pa

    from shmbridge.ranks.server import RankServer
    from shmbridge.record.groups import Group

Items = Literal["batches", "rows"]
Layout = Literal["packed", "padded"]
Hold = Literal["step", "checkpoint"]

_LOOK_FOR_PARENT_S = 1.0


class TooManyWorkers(ValueError):
    """A DataLoader has more workers than a bridge has consumers."""


class BridgeDataset(IterableDataset[Tensors]):
    """Trajectory groups of a bridge as dictionaries of tensors, until the bridge is drained; a context
    manager.

    Without ranks it is the bridge's only consumer. It opens on first read: in this process, or in the single
    worker of a DataLoader. With ranks every process has one data set; rank 0's is the consumer too, and deals
    out each batch.

    `hold` decides when leases end, so which records the next process gets again if this one is killed.
    hold="step": an item is released when the next one is requested. If the process is killed in between, its
    records are redelivered. hold="checkpoint": everything handed out is held until `release()`. Call it once
    a checkpoint with `state_dict()` in it is on disk. Then every record is trained exactly once along the
    chain of checkpoints, whenever the process is killed.

    A worker releases an item when it makes the next one, which it does ahead of training (`prefetch_factor`
    items). A killed run loses those items. So does a `break`, except for the last one if the worker ends with
    it. Rows that a DataLoader collates into a batch are also released before training, unless
    hold="checkpoint". With ranks, records of a killed run are redelivered even if a saved state contains
    them.

    Args:
        bridge: name of the bridge.
        groups: groups in a batch, over all ranks.
        items: "batches" yields what `batch_tensors` makes of each batch, "rows" what `row_tensors` makes of
            each row.
        layout: of batches: "packed" (N,) with cu_seqlens and position_ids, or "padded" (B, T).
        hold: see above; "checkpoint" needs the consumer in this process, and no ranks.
        max_staleness: groups that are more versions older than the current policy are discarded and counted;
            None: no limit.
        prefetch: batches gathered ahead in a thread, still held.
        timeout_s: seconds to wait for an item; None: for ever.
        run: the training run to announce; Atropos environments wait for it. None: a run with no last step and
            no longest row, whose `batch_size` is 8 rows per group of `groups`, and at least 64.
        lanes: environments to take from at once, as in Consumer; "auto": as many as descriptors allow.
        schema: a pyarrow.Schema that extends the standard columns.
        rank: 0 to world_size - 1, as in torch.distributed; None: RANK of the environment under torchrun, else
            no ranks.
        world_size: as in torch.distributed; None: WORLD_SIZE of the environment under torchrun.
        whole_rows: rows with neither a mask nor `prompt_length` get a `loss_mask` of 1 instead of 0.
        split: "train" or "eval": groups of the other are released untrained and counted; None: both.

    Raises:
        ValueError: an argument is not one of the allowed values; rank without world_size.
        shmbridge.SchemaMismatch: a column of `schema`, or while reading a column of a record, has the same
            name as a key of the items.
    """

    def __init__(
        self,
        bridge: str,
        *,
        groups: int = 8,
        items: Items = "batches",
        layout: Layout = "packed",
        hold: Hold = "step",
        max_staleness: int | None = None,
        prefetch: int = 1,
        timeout_s: float | None = None,
        run: shmbridge.Run | None = None,
        lanes: int | Literal["auto"] = "auto",
        schema: pa.Schema | None = None,
        rank: int | None = None,
        world_size: int | None = None,
        whole_rows: bool = False,
        split: Split | None = "train",
    ) -> None:
        super().__init__()
        if items not in ("batches", "rows") or hold not in ("step", "checkpoint"):
            raise ValueError(
                f'items={items!r} is "batches" or "rows", hold={hold!r} is "step" or "checkpoint"'
            )
        if items == "rows" and layout != "packed":
            raise ValueError(f"layout={layout!r} is of batches; rows have no padding")
        if split not in ("train", "eval", None):
            raise ValueError(f'split={split!r} is none of "train", "eval" and None')
        self.bridge, self.groups, self.items, self.layout, self.hold = bridge, groups, items, layout, hold
        self.rank, self.world_size = _ranks(rank, world_size)
        if hold == "checkpoint" and self.world_size is not None:
            raise ValueError(
                'hold="checkpoint" is for one process: with ranks the consumer keeps what is not done, '
                'hold="step"'
            )
        self._max_staleness, self._prefetch, self._timeout_s = max_staleness, prefetch, timeout_s
        self._run, self._lanes, self._schema = run or _endless_run(groups), lanes, schema
        self._whole_rows, self._split = whole_rows, split
        check_names(getattr(schema, "names", ()), items)
        self._position = Position()
        self._pid = 0
        self._consumer: shmbridge.Consumer | None = None
        self._member: shmbridge.Rank | None = None
        self._server: RankServer | None = None
        self._held: list[Batch] = []  # handed out, not yet released
        self._forget_process()

    # -- reading
    # --------------------------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Tensors]:
        """Yields items until the bridge is drained.

        Blocks in `next`; a later iteration continues where this one stops.

        Raises:
            TooManyWorkers: in each worker of a DataLoader that has several.
            shmbridge.BatchTooBig: the batches held for a checkpoint leave no room for the next one.
            shmbridge.ConsumerEmpty: no item came within `timeout_s`. shmbridge.ConsumerTaken, RankTaken: the
                place is taken.
        """
        self._check_worker()
        for batch in closed_at_exit(self._batches()):
            if self.items == "rows":
                yield from self._rows(batch)
            else:
                yield from self._whole(batch)

    def _whole(self, batch: Batch) -> Iterator[Tensors]:
        self._keep(batch)
        for record in batch.records:
            self._position.took(_place(record), record.rows)
        self._count(rows=len(batch), tokens=batch.token_count)
        yield batch_tensors(batch)

    def _rows(self, batch: Batch) -> Iterator[Tensors]:
        rows = zip(row_tensors(batch), batch.lengths.tolist(), strict=True)
        self._keep(batch)
        for record in list(batch.records):
            place = _place(record)
            had = min(self._position.rows_had(place), record.rows)
            if had:
                self._position.skipped += had
                self._position.took(place, had)
            for row, (tensors, tokens) in zip(range(record.rows), rows, strict=False):
                if row >= had:
                    self._position.took(place, 1)
                    self._count(rows=1, tokens=tokens)
                    yield tensors

    def _count(self, *, rows: int, tokens: int) -> None:
        counts = self._position.counts
        counts["items"] += 1
        counts["rows"] += rows
        counts["tokens"] += tokens

    def _keep(self, batch: Batch) -> None:
        """Keeps the batch's leases until `release`. With ranks, the rank's share owns them."""
        if self.world_size is None:
            self._held.append(batch)

    def _is_new(self, group: Group) -> bool:
        """The consumer's screen: keeps out groups whose rows the loaded state has all."""
        had = all(self._position.rows_had(_place(record)) >= record.rows for record in group.records)
        self._position.skipped += group.rows if had else 0
        return not had

    def _batches(self) -> Generator[Batch, None, None]:
        if self.world_size is not None:
            yield from self._shares()
            return
        parent = os.getppid() if get_worker_info() is not None else None
        consumer, batches = self._open_consumer(), self._iterate_consumer(parent)
        while True:
            self._end_step()
            with consumer.one_wait():
                batches, batch = self._wait_for_batch(batches, parent)
            if batch is None:
                return
            yield batch

    def _wait_for_batch(
        self, batches: Iterator[Batch], parent: int | None
    ) -> tuple[Iterator[Batch], Batch | None]:
        """Returns the next batch, and the iteration it is of: one that timed out has ended.

        The batch is None after the last one, and if the parent process has ended.
        """
        began = time.monotonic()
        while True:
            try:
                return batches, next(batches, None)
            except shmbridge.ConsumerEmpty as empty:
                if parent is None:
                    raise
                if self._timeout_s is not None and time.monotonic() - began >= self._timeout_s:
                    whole = empty.message.replace(
                        f" within {_LOOK_FOR_PARENT_S} s", f" within {self._timeout_s} s", 1
                    )
                    raise shmbridge.ConsumerEmpty(whole, hint=empty.hint) from None
                if os.getppid() != parent:  # the training process is gone, so this worker ends itself
                    return batches, None
            batches = self._iterate_consumer(parent)

    def _iterate_consumer(self, parent: int | None) -> Iterator[Batch]:
        patience = self._timeout_s
        if parent is not None:
            patience = _LOOK_FOR_PARENT_S if patience is None else min(patience, _LOOK_FOR_PARENT_S)
        return self._open_consumer().batches(
            groups=self.groups,
            layout=self.layout,
            max_staleness=self._max_staleness,
            prefetch=self._prefetch,
            timeout_s=patience,
            hold="caller",
            whole_rows=self._whole_rows,
            split=self._split,
        )

    def _shares(self) -> Iterator[Batch]:
        member = self._open_rank()
        yield from member.batches(layout=self.layout, timeout_s=self._timeout_s, whole_rows=self._whole_rows)
        if self._server is not None:
            # the other ranks read through this process until they are done
            self._server.wait(self._timeout_s)

    def _end_step(self) -> None:
        if self.hold == "step":
            self.release()

    def release(self) -> None:
        """Releases everything handed out so far; it is not redelivered. Never blocks.

        Under hold="step" this happens automatically, except for the last item before a `break`.
        """
        for batch in self._held:
            batch.release()
        self._held = []
        self._position.ended()

    # -- who opens the bridge
    # -----------------------------------------------------------------------------------------------------

    def _check_worker(self) -> None:
        worker = get_worker_info()
        if worker is not None and worker.num_workers > 1:
            raise TooManyWorkers(
                f"a DataLoader of {worker.num_workers} workers over bridge {self.bridge!r}, which has one "
                "consumer -> num_workers=0, or 1; rollouts come from other processes anyway"
            )
        if worker is not None and self.hold == "checkpoint":
            raise ValueError(
                'hold="checkpoint" in a worker, which no release() of the training process reaches -> '
                "num_workers=0"
            )

    def _forget_process(self) -> None:
        self._pid = os.getpid()
        self._consumer = self._member = self._server = None
        self._held = []

    def _check_process(self) -> None:
        if self._pid != os.getpid():  # a forked worker: the open handles belong to the parent
            self._forget_process()

    def _open_consumer(self) -> shmbridge.Consumer:
        self._check_process()
        if self._consumer is None:
            self._consumer = shmbridge.Consumer(
                self.bridge, run=self._run, lanes=self._lanes, schema=self._schema
            )
            self._consumer.screen(self._is_new)
        return self._consumer

    def _open_rank(self) -> shmbridge.Rank:
        assert self.rank is not None
        assert self.world_size is not None
        self._check_process()
        if self.rank == 0 and self._server is None:
            self._server = self._open_consumer().serve_ranks(
                self.world_size,
                groups=self.groups,
                max_staleness=self._max_staleness,
                prefetch=self._prefetch,
                split=self._split,
            )
        if self._member is None:
            self._member = shmbridge.Rank(self.bridge, self.rank, self.world_size)
        return self._member

    def publish_policy_version(self, version: int) -> None:
        """Tells environments the newest policy version.

        Only rank 0's call has an effect. Opens the bridge in this process, so do not use it with a DataLoader
        worker.
        """
        if self.rank in (None, 0):
            self._open_consumer().publish_policy_version(version)

    def drain(self) -> None:
        """Takes no new records; iteration ends after those already there. For rank 0; opens the bridge."""
        self._open_consumer().drain()

    def stats(self) -> dict[str, float]:
        """Returns flat counters: items handed out, `rows_skipped` and `records_gone` since a state was
        loaded, and the bridge's counters if this process is its consumer.

        Never blocks.

        `records_gone`: records after the loaded state, from its producers, that never arrived: an earlier
        process consumed them and saved no state since, or they were discarded.
        """
        mine = {f"handed_out_{name}_total": float(count) for name, count in self._position.counts.items()}
        mine |= {
            "rows_skipped_total": float(self._position.skipped),
            "records_gone_total": float(self._position.gone),
        }
        return mine if self._consumer is None or self._pid != os.getpid() else self._consumer.stats() | mine

    # -- state
    # --------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Returns what was handed out so far and what is still held; small, for a checkpoint. Never blocks.

        With a worker, torchdata's StatefulDataLoader asks the worker; `torch.utils.data.DataLoader` cannot.
        """
        return self._position.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues from a state: redelivered records that it contains are released unread, and counted.

        Call it before the first item. With ranks only the counts are restored: the next consumer may deal a
        record to another rank.

        Raises:
            ValueError: not such a state, or items were already handed out.
        """
        if self._held:
            raise ValueError(f"{len(self._held)} batches are handed out: load a state before the first item")
        self._position.load_state_dict(state if self.world_size is None else {**state, "held": []})

    # -- the end
    # --------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Closes the bridge. Held records go to the next consumer; tensors stay valid. Idempotent."""
        self._check_process()
        for batch in self._held:
            abandon(batch.records)
        if self._member is not None:
            self._member.close()
        if self._consumer is not None:
            self._consumer.close()
        self._forget_process()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __getstate__(self) -> dict[str, Any]:
        """Returns the state without handles of this process, for a newly started worker."""
        mine: dict[str, Any] = {"_consumer": None, "_member": None, "_server": None, "_held": [], "_pid": 0}
        return {**self.__dict__, **mine}

    def __repr__(self) -> str:
        ranks = "" if self.world_size is None else f", rank {self.rank} of {self.world_size}"
        return (
            f"<BridgeDataset of {self.bridge!r}: {self.items}, {self._position.counts['items']} handed "
            f"out{ranks}>"
        )


def _endless_run(groups: int) -> shmbridge.Run:
    """Returns the default run: it sizes environments' queues, never ends and drops no long row."""
    return shmbridge.Run(batch_size=max(64, 8 * groups), max_token_len=0, num_steps=(1 << 31) - 1)


def _place(record: Record) -> Place:
    return record.meta.producer_id, record.meta.sequence


def _ranks(rank: int | None, world_size: int | None) -> tuple[int | None, int | None]:
    """Returns rank and world size: as given, else from torchrun's environment, else None."""
    if (rank is None) != (world_size is None):
        raise ValueError(f"rank={rank} and world_size={world_size}: both or neither")
    if rank is None and "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if rank is not None and world_size is not None and not 0 <= rank < world_size:
        raise ValueError(f"rank={rank} is not within 0 and world_size={world_size} - 1")
    return rank, world_size
