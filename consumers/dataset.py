"""A bridge as a torch data set: trajectory groups from live environments, for your own training loop.

    data = BridgeDataset("run1", groups=16)
    for batch in DataLoader(data, batch_size=None):
        loss = ...                                 # batch["tokens"], batch["advantages"], ... are tensors
        data.publish_policy_version(step)

Tensors and a position on a `Feed`, which has the consumer and the leases. A feed's state names whole groups;
a position counts rows, since an iteration over rows may stop within a group.
"""

from __future__ import annotations

import multiprocessing
import os
import threading
import time
from collections import deque
from collections.abc import Container, Iterator, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Self, get_args

import numpy as np
import torch
from torch.utils.data import IterableDataset, get_worker_info

import shmbridge
from shmbridge import Batch, ConsumerEmpty, Record
from shmbridge.batch import (
    KEYS_OF_BATCHES,
    KEYS_OF_ROWS,
    Layout,
    batch_numbers,
    check_names,
    name_taken,
    number_columns,
)
from shmbridge.consumers.feed import Drained, Feed, HeldRecords, ReleaseAt, Step, check_words
from shmbridge.errors import counted
from shmbridge.record import RaggedLists
from shmbridge.schema import STANDARD, Split

if TYPE_CHECKING:
    import pyarrow as pa

    from shmbridge.hub import RankServer
    from shmbridge.record import Group

Items = Literal["batches", "rows"]
Tensors = dict[str, torch.Tensor]

_LOOK_FOR_PARENT_S = 1.0
_OF_FEED = {"exact", "longest_row", "run_dir", "set_aside_after", "start", "unfit", "vocabulary"}
_HANDLES = "_feed", "_member", "_server", "_step", "_left", "_pid", "_has_asked"  # of one process
_FORMAT = 1
_COUNTS = "items", "rows", "tokens"


class _Item(NamedTuple):
    """What an iteration yields next, or leaves out: rows that cannot be trained, or were had before."""

    taken: dict[tuple[str, int], int]  # rows of each record that are handed out then
    rows: int = 0
    tokens: int = 0
    tensors: Tensors | None = None


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
        items: "batches" yields the tensors of `Batch.to_torch`, "rows" those of each row: see `row_tensors`.
        layout: of batches: "packed" (N,) with cu_seqlens and position_ids, or "padded" (B, T).
        hold: see above; as Feed's release_at. "checkpoint" needs the consumer in this process, and no ranks.
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
        feed: as of Feed, without ranks: `longest_row`, `vocabulary`, `unfit` ("leave_out" for rows only);
            `set_aside_after` (here 0), `run_dir`, `exact`: an exception that leaves the `with` is a failure
            of the batch in hand; `start` (here "from-scratch", since the model is not known here).

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
        hold: ReleaseAt = "step",
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
        **feed: Any,
    ) -> None:
        super().__init__()
        check_words(locals() | feed, items=get_args(Items), layout=get_args(Layout), hold=get_args(ReleaseAt))
        if items == "rows" and layout != "packed":
            raise ValueError(f"layout={layout!r} is of batches; rows have no padding")
        if unknown := feed.keys() - _OF_FEED:
            raise TypeError(f"BridgeDataset takes no argument {', '.join(sorted(unknown))}")
        if items == "batches" and feed.get("unfit") == "leave_out":
            raise ValueError('unfit="leave_out" is of rows; a batch has all rows of its groups')
        self.bridge, self.groups, self.items, self.layout, self.hold = bridge, groups, items, layout, hold
        self.rank, self.world_size = _ranks(rank, world_size)
        if self.world_size is not None and (hold == "checkpoint" or feed):
            raise ValueError(
                f"{', '.join(feed) or repr(hold)} is for one process: with ranks the consumer keeps what is "
                'not done, hold="step"'
            )
        keys = KEYS_OF_ROWS if items == "rows" else KEYS_OF_BATCHES
        check_names(getattr(schema, "names", ()), keys)
        self._timeout_s, self._whole_rows = timeout_s, whole_rows
        of_batches = {"groups": groups, "max_staleness": max_staleness, "prefetch": prefetch, "split": split}
        self._of_batches: dict[str, Any] = of_batches
        run = run or shmbridge.Run(batch_size=max(64, 8 * groups), max_token_len=0, num_steps=(1 << 31) - 1)
        self._options = {"set_aside_after": 0, "start": "from-scratch", **feed}
        self._options |= {"run": run, "lanes": lanes, "schema": schema}
        self._counts, self._skipped = dict.fromkeys(_COUNTS, 0), 0
        self._held: dict[tuple[str, int], int] = {}  # by place: rows handed out of each record held here
        # rows handed out of each record of the loaded state that is not held here, and the lanes' mounts
        self._had: dict[tuple[str, int], int] = {}
        self._mounts: dict[str, str] = {}
        # by producer: the newest record handed out, that of the loaded state, and what is missing behind it
        self._newest: dict[str, int] = {}
        self._loaded: dict[str, int] = {}
        self._gone: dict[str, int] = {}
        self._forget_process()

    def _forget_process(self) -> None:
        self._pid: int | None = os.getpid()
        self._feed: Feed | None = None
        self._member: shmbridge.Rank | None = None
        self._server: RankServer | None = None
        self._step: Step | None = None  # in hand
        self._left: deque[_Item] = deque()  # its items that are not handed out
        self._has_asked = False  # for a batch

    def _check_process(self) -> None:
        if self._pid != os.getpid():  # a forked worker: the open handles belong to the parent
            self._forget_process()

    # -- reading

    def __iter__(self) -> Iterator[Tensors]:
        """Yields items until the bridge is drained.

        Blocks in `next`; a later iteration continues where this one stops, also within a group.

        Raises:
            TooManyWorkers: in each worker of a DataLoader that has several.
            shmbridge.BatchTooBig: the batches held for a checkpoint leave no room for the next one.
            shmbridge.ConsumerEmpty: no item came within `timeout_s`. shmbridge.ConsumerTaken, RankTaken: the
                place is taken.
            shmbridge.SchemaMismatch, UnfitRow, BridgeAhead: see the class; the batch comes again.
        """
        self._check_worker()
        self._check_process()
        batches = self._steps() if self.world_size is None else self._shares(self.world_size)
        while True:
            while self._left:  # a break or an exception ends the iteration, and not what is left
                item = self._left[0]
                self._take(item)
                self._left.popleft()
                if item.tensors is not None:
                    yield item.tensors
            self._end_step(release=self.hold == "step")
            if not next(batches, False):
                return

    def _steps(self) -> Iterator[bool]:
        """Makes each step the one in hand, with its items left; True for each."""
        feed, of = self._open_feed(), counted(self.groups, "group")
        while True:
            self._has_asked = True
            try:
                step = feed.take(self._timeout_s)
            except Drained:
                return
            except ConsumerEmpty as empty:
                there = empty.message.partition(": ")[2]
                raise ConsumerEmpty(f"no batch of {of} within {self._timeout_s} s; {there}") from None
            try:
                self._left = self._items_of(step.batch, step.unfit)
            except BaseException:
                feed.give_back(step)
                raise
            self._step = step
            yield True

    def _shares(self, world_size: int) -> Iterator[bool]:
        """Makes the items of each share of this rank those that are left; True for each."""
        assert self.rank is not None
        if self.rank == 0 and self._server is None:
            self._server = self._open_feed().consumer.serve_ranks(world_size, **self._of_batches)
        if self._member is None:
            self._member = shmbridge.Rank(self.bridge, self.rank, world_size)
        for share in self._member.batches(layout=self.layout, timeout_s=self._timeout_s):
            self._left = self._items_of(share, ())
            yield True
        if self._server is not None:
            # the other ranks read through this process until they are done
            self._server.wait(self._timeout_s)

    def _items_of(self, batch: Batch, unfit: Container[int]) -> deque[_Item]:
        """Returns the items of a batch. Raises SchemaMismatch."""
        if self._whole_rows:
            batch.train_whole_rows()
        if self.items == "rows":
            return deque(self._rows(batch, unfit))
        numbers = batch_numbers(batch)
        tensors = {name: torch.from_numpy(array) for name, array in numbers.items()}
        taken = {_place(record): record.rows for record in batch.records}
        return deque([_Item(taken, len(batch), batch.token_count, tensors)])

    def _rows(self, batch: Batch, unfit: Container[int]) -> Iterator[_Item]:
        rows = enumerate(zip(row_tensors(batch), batch.lengths.tolist(), strict=True))
        for record in list(batch.records):
            had, place = min(self._had.get(_place(record), 0), record.rows), _place(record)
            self._skipped += had
            for number, (row, (tensors, tokens)) in zip(range(record.rows), rows, strict=False):
                if number >= had and row not in unfit:
                    yield _Item({place: number + 1}, 1, tokens, tensors)
                elif number == record.rows - 1:
                    yield _Item({place: record.rows})

    def _take(self, item: _Item) -> None:
        """Notes that an item is handed out; what names records may be noted twice."""
        for place, rows in item.taken.items():
            producer, sequence = place
            self._held[place] = rows
            self._newest[producer] = max(self._newest.get(producer, -1), sequence)
            if (missing := sequence - self._loaded.get(producer, sequence) - 1) >= 0:
                self._gone[producer] = min(self._gone.get(producer, missing), missing)
        if item.tensors is not None:
            self._counts["items"] += 1
            self._counts["rows"] += item.rows
            self._counts["tokens"] += item.tokens

    def _is_new(self, group: Group) -> bool:
        """The feed's screen: keeps out groups whose rows the loaded state has all."""
        had = all(self._had.get(_place(record), 0) >= record.rows for record in group.records)
        self._skipped += group.rows if had else 0
        return not had

    def _end_step(self, *, release: bool) -> None:
        """Ends the batch in hand, if nothing is left of it: the feed releases or holds it. Or releases all
        that is handed out whole.
        """
        if self._feed is not None and self._step is not None and not self._left:
            step, self._step = self._step, None
            self._feed.trained(step)
        if release:
            if self._feed is not None:
                self._feed.checkpointed()
            groups = () if self._step is None else self._step.groups
            in_hand = {_place(record) for group in groups for record in group.records}
            for place in self._held.keys() - in_hand:
                del self._held[place]
                self._had.pop(place, None)

    def release(self) -> None:
        """Releases everything handed out so far; it is not redelivered. Never blocks.

        A batch of which rows are left stays, for the next call.
        Under hold="step" this happens automatically, except for the last item before a `break`.
        """
        self._check_process()
        self._end_step(release=True)

    # -- who opens the bridge

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

    def _open_feed(self) -> Feed:
        self._check_process()
        if self._feed is None:
            self._feed = Feed(
                self.bridge,
                **self._of_batches,
                **self._options,
                release_at=self.hold,
                make=lambda groups, _: Batch(groups, self.layout),
                screen=self._is_new,
            )
            if get_worker_info() is not None:
                parent = multiprocessing.parent_process()
                watched = self._feed, os.getppid() if parent is None else parent.pid
                threading.Thread(target=_close_with_parent, args=watched, daemon=True).start()
        return self._feed

    def publish_policy_version(self, version: int) -> None:
        """Tells environments the newest policy version.

        Only rank 0's call has an effect. Opens the bridge in this process, so do not use it with a DataLoader
        worker. Under start=None: BridgeAhead, so load the state before.
        """
        if self.rank in (None, 0):
            self._open_feed().require_start()
            self._open_feed().publish(version)

    def drain(self) -> None:
        """Takes no new records; iteration ends after those already there. For rank 0; opens the bridge."""
        self._open_feed().drain()

    def stats(self) -> dict[str, float]:
        """Returns flat counters: items handed out, `rows_skipped` and `records_gone` since a state was
        loaded, and the feed's and the bridge's counters if this process is its consumer.

        Never blocks.

        `records_gone`: records after the loaded state, from its producers, that never arrived: an earlier
        process consumed them and saved no state since, or they were discarded.
        """
        mine = {f"handed_out_{name}_total": float(count) for name, count in self._counts.items()}
        mine |= {
            "rows_skipped_total": float(self._skipped),
            "records_gone_total": float(sum(self._gone.values())),
        }
        return mine if self._feed is None or self._pid != os.getpid() else self._feed.stats() | mine

    # -- state

    def state_dict(self) -> dict[str, Any]:
        """Returns what was handed out so far and what is still held; small, for a checkpoint. Never blocks.

        With a worker, torchdata's StatefulDataLoader asks the worker; `torch.utils.data.DataLoader` cannot.
        """
        left = HeldRecords.of(self._had, self._mounts).that_may_come_again()
        left |= HeldRecords.of(self._held)
        rows = self._had | self._held
        return {
            "format": _FORMAT,
            **self._counts,
            "held": [[name, at, rows[name, at]] for name in left.held for at in sorted(left.held[name])],
            "mounts": left.mounts,
            "newest": dict(self._newest),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues from a state: redelivered records that it contains are released unread, and counted.

        Call it before the first item. With ranks only the counts are restored: the next consumer may deal a
        record to another rank.

        Raises:
            ValueError: not such a state, or items were already handed out.
        """
        self._check_process()
        stats = {} if self._feed is None else self._feed.stats()
        if self._has_asked:
            raise ValueError("items were asked for: load a state before the first item")
        if out := int(stats.get("feed_steps_out", 0) + stats.get("feed_steps_trained_held", 0)):
            raise ValueError(f"{out} batches are handed out: load a state before the first item")
        wanted = {"format", *_COUNTS, "held", "newest"}
        if not isinstance(state, Mapping) or state.get("format") != _FORMAT or not wanted <= state.keys():
            names = ", ".join(map(str, state)) if isinstance(state, Mapping) else type(state).__name__
            raise ValueError(
                f"this is no state of a BridgeDataset of format {_FORMAT}: it has {names or 'nothing'}"
            )
        self._counts, self._skipped = {name: int(state[name]) for name in _COUNTS}, 0
        held = state["held"] if self.world_size is None else ()
        self._had = {(producer, int(sequence)): int(rows) for producer, sequence, rows in held}
        self._mounts = dict(state.get("mounts", {}))  # what an earlier release wrote has none
        self._loaded = {producer: int(sequence) for producer, sequence in state["newest"].items()}
        self._held, self._gone, self._newest = {}, {}, dict(self._loaded)
        self._options["start"] = self._options["start"] or "from-scratch"  # the user has a checkpoint

    # -- the end

    def close(self) -> None:
        """Closes the bridge. Held records go to the next consumer; tensors stay valid. Idempotent."""
        self.__exit__(None, None, None)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Closes; under `set_aside_after` an exception counts as a failure of the batch in hand."""
        self._check_process()
        if self._member is not None:
            self._member.close()
        if self._feed is not None:
            self._feed.__exit__(kind, error, trace)
        self._forget_process()

    def __getstate__(self) -> dict[str, Any]:
        """Returns the state without handles of this process, for a newly started worker."""
        return self.__dict__ | dict.fromkeys(_HANDLES)

    def __repr__(self) -> str:
        ranks = "" if self.world_size is None else f", rank {self.rank} of {self.world_size}"
        return f"<BridgeDataset of {self.bridge!r}: {self.items}, {self._counts['items']} handed out{ranks}>"


def row_tensors(batch: Batch) -> Iterator[Tensors]:
    """Returns the rows of a packed batch, each as tensors over the batch's own arrays, without a copy.

    Never blocks.

    A row has `tokens`, `loss_mask` (0 where the row has none) and the other columns with one value per token
    as (L,), lists as they are, scalars without dimensions, and `policy_version` and `redelivered`. A column
    that the row lacks is not in its dictionary. SchemaMismatch for a column that has the name of another key.
    """
    columns = number_columns(batch)
    check_names(columns, KEYS_OF_ROWS)
    for name, column in columns.items():
        if isinstance(column, RaggedLists) and f"{name}_inner_lengths" in columns:
            raise name_taken(f"{name}_inner_lengths", name)
    has = {name: batch.has(name) | (name == "loss_mask") for name in columns}
    starts = batch.cu_seqlens.tolist()

    def tensors_of(row: int) -> Tensors:
        meta = batch.meta[row]
        tensors = {
            "policy_version": torch.tensor(meta.min_policy_version),
            "redelivered": torch.tensor(meta.redelivered),
        }
        for name, column in columns.items():
            if not has[name][row]:
                continue
            per_token = isinstance(column, np.ndarray) and name in STANDARD and STANDARD[name].per_token
            values = column[starts[row] : starts[row + 1]] if per_token else column[row]
            if isinstance(column, RaggedLists):
                tensors[f"{name}_inner_lengths"] = torch.from_numpy(values.lengths)
                values = values.values
            tensors[name] = torch.from_numpy(np.asarray(values))
        return tensors

    return map(tensors_of, range(len(batch)))


def _place(record: Record) -> tuple[str, int]:
    return record.meta.producer_id, record.meta.sequence


def _close_with_parent(feed: Feed, parent: int) -> None:
    """Closes the feed of a worker once its training process is gone, so that the worker ends, too."""
    while os.getppid() == parent:
        time.sleep(_LOOK_FOR_PARENT_S)
    feed.close()


def _ranks(rank: int | None, world_size: int | None) -> tuple[int | None, int | None]:
    """Returns rank and world size: as given, else from torchrun's environment, else None."""
    if (rank is None) != (world_size is None):
        raise ValueError(f"rank={rank} and world_size={world_size}: both or neither")
    if rank is None and "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if rank is not None and world_size is not None and not 0 <= rank < world_size:
        raise ValueError(f"rank={rank} is not within 0 and world_size={world_size} - 1")
    return rank, world_size
