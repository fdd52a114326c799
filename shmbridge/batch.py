"""Batches: many groups gathered into padded or packed arrays, one host copy per column (_ext/gather.pxi);
their numbers as named arrays, and values for rows that lack their own.
"""

from collections.abc import Callable, Collection, Iterable
from typing import TYPE_CHECKING, Any, Literal, Self

import numpy as np

from shmbridge._ext.record import MOST_TOKENS, Gather, Pool, TooManyTokens, positions
from shmbridge.errors import BadArgument, BatchTooBig, LeaseReleased, SchemaMismatch, no_column, shown
from shmbridge.record import (
    BatchColumns,
    Group,
    NamedColumns,
    Ragged,
    RaggedLists,
    Record,
    RecordMeta,
    batch_columns,
    columns_as_html,
)
from shmbridge.schema import STANDARD, Column, Kind
from shmbridge.segments import OneProcess

if TYPE_CHECKING:
    import pyarrow as pa
    from torch import Tensor, device

    from shmbridge.control.messages import Manifest

# Keys that are no columns.
KEYS_OF_ROWS = frozenset({"policy_version", "redelivered"})
KEYS_OF_BATCHES = KEYS_OF_ROWS | {"lengths", "cu_seqlens", "position_ids", "group_index"}


def check_names(names: Iterable[str], keys: Collection[str]) -> None:
    """Raises SchemaMismatch for a column that has the name of another key."""
    for name in names:
        if name in keys:
            raise name_taken(name)


def name_taken(name: str, beside: str = "") -> SchemaMismatch:
    """Returns the error for a column with the name of another key, or of one that `beside` brings along."""
    return SchemaMismatch(
        f"column {name!r} has the name of a key that every batch or row has as "
        f"tensors{beside and f', beside the column {beside!r}'}",
        hint=f"rename the column, where it is put and in schema=: 'my_{name}'",
    )


def number_columns(batch: "Batch") -> dict[str, Any]:
    """Returns the columns that hold numbers: an array, Ragged or RaggedLists by name."""
    columns = {name: batch[name] for name in batch_columns(batch)}
    return {
        name: column
        for name, column in columns.items()
        if isinstance(column, (Ragged, RaggedLists, np.ndarray))
    }


def batch_numbers(batch: "Batch") -> dict[str, np.ndarray[Any, Any]]:
    """Returns the batch's own arrays by key, without a copy; the keys are those of `Batch.to_torch`.

    Never blocks. SchemaMismatch for a column that has the name of another key.
    """
    found: dict[str, np.ndarray[Any, Any]] = {
        "lengths": batch.lengths,
        "cu_seqlens": batch.cu_seqlens,
        "position_ids": batch.position_ids,
        "group_index": batch.group_index,
        "policy_version": np.array([meta.min_policy_version for meta in batch.meta], np.int64),
        "redelivered": np.array([meta.redelivered for meta in batch.meta], np.bool_),
    }
    columns = number_columns(batch)
    check_names(columns, KEYS_OF_BATCHES)
    for name, column in columns.items():
        arrays = _arrays(name, column)
        for key in (f"has_{name}", *arrays):
            if key != name and key in columns:
                raise name_taken(key, name)
        found |= arrays
        if not (has := batch.has(name)).all():
            found[f"has_{name}"] = has
    return found


def _arrays(name: str, column: Any) -> dict[str, np.ndarray[Any, Any]]:
    if isinstance(column, RaggedLists):
        return {
            name: column.values,
            f"{name}_lengths": column.lengths,
            f"{name}_inner_lengths": column.inner_lengths,
        }
    if isinstance(column, Ragged):
        return {name: column.values, f"{name}_lengths": column.lengths}
    return {name: column}


_Array = np.ndarray[Any, Any]


def advantages_or(batch: "Batch", fallback: "float | _Array") -> _Array:
    """See Batch.advantages_or."""
    shape, rows = batch.tokens.shape, len(batch.lengths)
    wanted = f"one number, one for each of {rows} rows, or one for each token, shaped {tuple(shape)}"
    try:
        given = np.asarray(fallback)
    except (TypeError, ValueError):  # ragged, or no NumPy dtype
        given = np.asarray("")
    if given.dtype.kind not in "biuf":
        raise BadArgument(f"fallback={shown(fallback)} is no number", hint=f"give {wanted}")
    given = given.astype(np.float32, copy=False)
    if given.shape not in ((), (rows,), shape):
        raise BadArgument(f"fallback has shape {given.shape}", hint=f"give {wanted}")
    own = np.array(batch["advantages"], np.float32) if "advantages" in batch else np.zeros(shape, np.float32)
    lacks = ~batch.has("advantages")
    if batch.layout == "padded":
        tokens = (np.arange(shape[1]) < batch.lengths[:, None]) & lacks[:, None]
        values = given[:, None] if given.shape == (rows,) and given.shape != shape else given
    else:
        tokens = np.repeat(lacks, batch.lengths)
        values = np.repeat(given, batch.lengths) if given.shape == (rows,) and given.shape != shape else given
    return np.where(tokens, values, own)


Layout = Literal["padded", "packed"]
Hold = Literal["step", "gather", "caller"]
MakeBatch = Callable[[list[Group], Layout], "Batch"]
_NAMES = {"scores": "score"}
_POOL = Pool()  # reuses memory of dropped arrays for the next batch


class Batch(BatchColumns, NamedColumns, OneProcess):
    """Rows of several groups as arrays; B rows, N tokens in all, T tokens in the longest row.

    Per-token columns are (N,) packed or (B, T) padded on the right with zeros; scalar columns are (B,); other
    lists are Ragged or RaggedLists with B rows; text and maps are lists of B. A column that no record has is
    None as an attribute (`batch.advantages`) and a KeyError as `batch["advantages"]`. Where only some records
    have it, the other records' rows are zero: see `has`. A per-token row whose length differs from its tokens
    is zero too: see `uneven`. `loss_mask` is always there, 0 in rows without a mask: see `train_whole_rows`.
    All arrays are the batch's own copies; under hold="step" the batch also keeps its records' leases until
    release().

    Args:
        groups: whole groups, leased.
        layout: "packed" or "padded".
        in_place: columns that are not copied and stay out of the batch; read them in `records`.

    Attributes:
        layout: "packed" or "padded".
        lengths: tokens of each row, int32 (B,).
        cu_seqlens: begin of each row among the N tokens and the end of the last, int32 (B + 1,).
        group_index: number of each row's group in the batch, int32 (B,).
        groups: its groups, in order.
        records: the leased records of the rows, in order; empty after release().
        manifest: the whole batch of which a learner rank got this share; else None.
        uneven: column -> bool (B,), of columns that do not fit some records: rows whose number of values
            differs from their tokens, and all rows of a record whose column differs from its tokens in number
            of rows. Per-token columns are absent there.

    Raises:
        BatchTooBig: more tokens than the int32 of cu_seqlens can count.
    """

    _instead = "pass copies of its arrays: to_torch(), to_arrow()"

    def __init__(self, groups: list[Group], layout: Layout, in_place: Collection[str] = ()) -> None:
        self.layout: Layout = layout
        self.groups = groups
        self.manifest: Manifest | None = None  # from which a learner rank got it
        self._is_lent = False  # its leases are another's, who releases them
        self.records: list[Record] = [record for group in groups for record in group.records]
        self._sources = tuple(self.records)
        self._meta: list[RecordMeta] | None = None
        self._position_ids: np.ndarray[Any, np.dtype[np.int32]] | None = None
        self._present: dict[str, np.ndarray[Any, Any]] = {}
        self._columns: dict[str, Any] = {}
        self._in_place = frozenset(in_place)
        # `loss_mask` if no record has one.
        self._no_mask: np.ndarray[Any, np.dtype[np.uint8]] | None = None
        self.uneven: dict[str, np.ndarray[Any, np.dtype[np.bool_]]] = {}
        with self._gathering() as gather:
            self.lengths, self.cu_seqlens, self.group_index = (
                gather.lengths,
                gather.cu_seqlens,
                gather.group_index,
            )
            self._gather(gather, in_place)

    @property
    def meta(self) -> list[RecordMeta]:
        """Origin and times of each row; rows of one record share one. Valid also after release()."""
        if self._meta is None:
            self._meta = [meta for record in self._sources for meta in [record.meta] * record.rows]
        return self._meta

    @property
    def position_ids(self) -> np.ndarray[Any, np.dtype[np.int32]]:
        """0, 1, 2, ... in each row: int32, (N,) packed, (B, T) padded with zeros.

        Made when first asked for.
        """
        if self._position_ids is None:
            self._position_ids = positions(self.lengths, self.layout == "padded", _POOL)
        return self._position_ids

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def token_count(self) -> int:
        """Tokens of all rows, without padding."""
        return int(self.cu_seqlens[-1])

    @property
    def group_count(self) -> int:
        """Groups in the batch."""
        return int(self.group_index[-1]) + 1

    @property
    def columns(self) -> list[str]:
        """Columns that at least one record has."""
        return list(self._columns)

    def has(self, name: str) -> np.ndarray[Any, Any]:
        """Returns bool (B,): the rows that have the column, not null and with a value for each token."""
        return self._present.get(_NAMES.get(name, name), np.zeros(len(self), bool))

    def __contains__(self, name: object) -> bool:
        return _NAMES.get(name, name) in self._columns  # type: ignore[call-overload]

    if not TYPE_CHECKING:  # a checker knows the standard columns, by BatchColumns

        def __getitem__(self, name: str) -> Any:
            if name == "loss_mask" and name not in self._columns and name not in self._in_place:
                return self._mask()
            try:
                return self._columns[_NAMES.get(name, name)]
            except (KeyError, TypeError):
                raise no_column(name, "batch", {**STANDARD, **self._columns}, self._columns) from None

        def __getattr__(self, name: str) -> Any:
            name = _NAMES.get(name, name)
            if name.startswith("_"):
                raise AttributeError(f"'Batch' object has no attribute {name!r}")
            if not (name in STANDARD or name in self._columns):
                raise no_column(name, "batch", {**STANDARD, **self._columns}, self._columns)
            return (
                self._mask()
                if name == "loss_mask" and name not in self._in_place
                else self._columns.get(name)
            )

    def advantages_or(self, fallback: "float | np.ndarray[Any, Any]") -> np.ndarray[Any, Any]:
        """Returns `advantages`, with `fallback` in the rows that lack them: float32, a copy, shaped as
        `tokens`.

        A row that lacks them also has zeros in `advantages`; `has("advantages")` tells. Padding stays 0.

        Args:
            fallback: one number, one for each row (B,), or one for each token, shaped as `tokens`.

        Raises:
            BadArgument: `fallback` is no number, or has another shape.
        """
        return advantages_or(self, fallback)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *self.__dict__.get("_columns", ()), "loss_mask", "scores"})

    def train_whole_rows(self) -> None:
        """Sets `loss_mask` to 1 in rows with neither a mask nor `prompt_length`; `has` stays.

        Never blocks, idempotent.

        A row whose mask does not fit its tokens keeps 0: it is unknown which tokens the mask leaves out.

        Raises ValueError if the mask stays in place.
        """
        if "loss_mask" in self._in_place:
            raise ValueError(
                "loss_mask stays in place, where nothing can be written -> leave it out of `in_place`"
            )
        whole, mask = ~(self.has("loss_mask") | self.has("prompt_length")), self._mask()
        for name in ("loss_mask", "masks"):
            whole &= ~self.uneven.get(name, np.zeros(len(self), bool))
        if self.layout == "padded":
            mask[(np.arange(mask.shape[1]) < self.lengths[:, None]) & whole[:, None]] = 1
        else:
            mask[np.repeat(whole, self.lengths)] = 1

    def _mask(self) -> np.ndarray[Any, np.dtype[np.uint8]]:
        if "loss_mask" in self._columns:
            mask: np.ndarray[Any, np.dtype[np.uint8]] = self._columns["loss_mask"]
            return mask
        if self._no_mask is None:
            longest = int(self.lengths.max(initial=0))
            self._no_mask = np.zeros(
                (len(self), longest) if self.layout == "padded" else (self.token_count,), np.uint8
            )
        return self._no_mask

    def to_arrow(self, meta: bool = True) -> "pa.RecordBatch":
        """Returns the batch as a pyarrow.RecordBatch, one row per trajectory. Never blocks.

        Columns have the types of `shmbridge.TRAJECTORY_SCHEMA`; a row that lacks a column, or has another
        number of values than tokens (`uneven`), is null there. `loss_mask` is never null. The numbers of a
        packed batch are the batch's own arrays, which must not be written while the result is used; those
        of a padded batch are cut by `lengths`, a copy. It holds no lease, and may be made after release().

        Args:
            meta: adds what says where a row came from: `group_index`, and the attributes of `meta`.

        Raises:
            ValueError: some columns stay in place, or more values than the int32 offsets of a list count.
            SchemaMismatch: a column has the name of one that `meta` adds.
        """
        from shmbridge.record.arrow import batch_rows

        self._check_copied()
        return batch_rows(self, self._column_types(), meta)

    def to_torch(self, device: "device | str | None" = None) -> "dict[str, Tensor]":
        """Returns the batch's numbers as tensors of their own memory, by name. Blocks for the copy.

        Always there: `tokens`, `loss_mask`, `lengths`, `cu_seqlens`, `position_ids`, `group_index`,
        `policy_version` (int64 (B,), when generation began, -1 if unknown) and `redelivered` (bool (B,)).
        Beside them every column of numbers that some row has, in its own dtype, shaped as in this batch; of
        lists that are not one value per token the values of all rows, and `NAME_lengths` (B,); of lists of
        lists also `NAME_inner_lengths`. Where only some rows have a column there is `has_NAME`, bool (B,).
        Text, bytes and maps are left out. It holds no lease, and may be called after release().

        Args:
            device: where the tensors are made; None: on the CPU.

        Raises:
            ValueError: some columns stay in place.
            SchemaMismatch: a column has the name of another key.
        """
        import torch

        self._check_copied()
        return {name: torch.tensor(array, device=device) for name, array in batch_numbers(self).items()}

    def _check_copied(self) -> None:
        """Raises ValueError if the batch lacks columns that its records have."""
        if self._in_place:
            raise ValueError(
                f"{', '.join(sorted(self._in_place))} stay in place and are not in this batch -> read them "
                "in its `records`, or make the batch without in_place"
            )

    def _column_types(self) -> dict[str, Column]:
        found = {"loss_mask": STANDARD["loss_mask"]}
        for record in self._sources:
            found |= record._lane_columns
        return found

    def release(self) -> None:
        """Ends the leases of the batch's records, unless they are a feed's; its arrays stay. Idempotent."""
        if self._is_lent:
            return
        for record in self.records:
            record.release()
        self.records = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.release()

    def __repr__(self) -> str:
        return (
            f"<{type(self).__name__} {self.layout}: {self.group_count} groups, {len(self)} rows, "
            f"{self.token_count} tokens, {', '.join(self.columns)}{'' if self.records else '; released'}>"
        )

    def _repr_html_(self) -> str:
        return columns_as_html(
            repr(self), [(name, _described(self[name], self.has(name))) for name in self.columns]
        )

    def _gathering(self) -> Gather:
        try:
            return Gather([group.records for group in self.groups], self.layout == "padded", _POOL)
        except BufferError as ended:
            raise LeaseReleased(f"a record of a batch was released before it was gathered: {ended}") from None
        except TooManyTokens as wrong:
            raise BatchTooBig(
                f"a batch of {len(self.groups)} groups has {wrong.args[0]} tokens, and int32 cu_seqlens "
                f"count {MOST_TOKENS}",
                hint="ask for fewer groups",
            ) from None

    def _gather(self, gather: Gather, in_place: Collection[str]) -> None:
        """Gathers every column that some record has, except those in place; copies without the GIL."""
        added: list[tuple[Column, Any]] = []
        for record, number in gather.columns():
            column = record._lane_columns.order[number]
            name = column.name
            if name in self._columns or name in in_place:
                continue
            self._present[name], *arrays = gather.add(
                name.encode(),
                column.kind,
                column.dtype,
                per_record=column.per_record,
                per_token=column.per_token and column.kind is Kind.LIST,
            )
            self._columns[name] = _texts_or_maps(self.records, column) if arrays[0] is None else arrays[0]
            if arrays[1] is not None:
                added.append((column, arrays))
        gather.copy()
        self.uneven = {
            name: rows for name, rows in zip(self._columns, gather.uneven, strict=True) if rows.any()
        }
        for column, (values, lengths, inner) in added:
            self._columns[column.name] = (
                Ragged(values, lengths, None) if inner is None else RaggedLists(values, lengths, inner, None)
            )
            if column.per_token:
                self._leave_out_uneven(column.name)

    def _leave_out_uneven(self, name: str) -> None:
        """Marks rows as absent whose number of lists differs from their tokens."""
        lists, has = self._columns[name], self._present[name]
        unfit = self.uneven.get(name, np.zeros(len(self), bool)) | (has & (lists.lengths != self.lengths))
        if unfit.any():
            self.uneven[name] = unfit
            has &= ~unfit
            of_lists = np.repeat(~unfit, lists.lengths)
            values = lists.values[np.repeat(of_lists, lists.inner_lengths)]
            self._columns[name] = RaggedLists(
                values, np.where(unfit, 0, lists.lengths), lists.inner_lengths[of_lists], None
            )


def _described(value: Any, has: np.ndarray[Any, Any]) -> str:
    """Returns what a column is, in words."""
    of = getattr(value, "values", value)
    shape = "x".join(map(str, getattr(value, "shape", ()))) or f"{len(value)} rows"
    lacking = int(len(has) - has.sum())
    return f"{getattr(of, 'dtype', 'list')} {shape}" + (f", {lacking} rows lack it" if lacking else "")


def forget_spare_memory() -> None:
    """Frees the memory kept of earlier batches' arrays. Any thread."""
    _POOL.keep_bytes = 0


def whole_rows(make: MakeBatch | None) -> MakeBatch:
    """Returns a function that makes batches as `make` does, and trains rows without a mask whole."""

    def made(groups: list[Group], layout: Layout) -> Batch:
        batch = as_batch((make or Batch)(groups, layout))
        batch.train_whole_rows()
        return batch

    return made


def as_batch(made: object) -> Batch:
    """Returns the batch that `make` made. Raises TypeError if it is not a Batch: iterations need one."""
    if not isinstance(made, Batch):
        raise TypeError(f"make= returned {type(made).__name__} of leased groups, not a Batch")
    return made


def unreadable(groups: list[Group], layout: Layout) -> list[tuple[Group, Exception]]:
    """Returns the groups of which no batch can be made, each with the reason."""
    found: list[tuple[Group, Exception]] = []
    for group in groups:
        try:
            Batch([group], layout)
        except MemoryError:
            raise
        except Exception as wrong:
            found.append((group, wrong))
    return found


def _texts_or_maps(records: list[Record], column: Column) -> list[Any]:
    """Returns one value per row; None where a record lacks the column, or an uneven column the row."""
    rows: list[Any] = []
    for record in records:
        values = list(record[column.name]) if column.name in record else []
        if column.per_record:
            values *= record.rows
        rows += values[: record.rows]
        rows += [None] * (record.rows - len(values))
    return rows
