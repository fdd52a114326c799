"""Columns of a record or batch: by name, as attributes, and as the protocol by which an export reads them.

The standard columns as attributes are for completion and type checkers; a test holds them to the schema.
"""

from collections.abc import Iterable, Iterator
from html import escape
from typing import TYPE_CHECKING, Any, Generic, Literal, NoReturn, Protocol, Self, TypeVar, overload

import numpy as np

from shmbridge._ext.record import Ragged, RecordMeta, list_array
from shmbridge.schema import Columns, Tag

if TYPE_CHECKING:
    import polars as pl
    import pyarrow as pa


class RaggedLists:
    """A list<list> column of one record: flat values in place, lists per row, values per list.

    Attributes:
        values: the values of all rows, flat: a read-only view of the lane.
        lengths: lists in each row, uint32[rows].
        inner_lengths: values in each list, uint32.
        valid: bool[rows] where some rows are null, None where none is.
    """

    __slots__ = ("inner_lengths", "lengths", "valid", "values")

    def __init__(
        self,
        values: np.ndarray[Any, Any],
        lengths: np.ndarray[Any, Any],
        inner: np.ndarray[Any, Any],
        valid: np.ndarray[Any, Any] | None,
    ) -> None:
        self.values, self.lengths, self.inner_lengths, self.valid = values, lengths, inner, valid

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, row: int) -> Ragged:
        """Row `row` as a Ragged over the same values."""
        row = range(len(self))[row]
        first = int(self.lengths[:row].sum())
        inner = self.inner_lengths[first : first + int(self.lengths[row])]
        start = int(self.inner_lengths[:first].sum())
        return Ragged(self.values[start : start + int(inner.sum())], inner, None)

    def tolist(self) -> list[list[list[Any]] | None]:
        """Returns the rows as lists of lists of Python numbers, a copy; None for a null row."""
        lists: list[list[Any]] = Ragged(self.values, self.inner_lengths, None).tolist()  # type: ignore[assignment]
        ends = np.cumsum(self.lengths, dtype=np.int64).tolist()
        rows = [lists[start:end] for start, end in zip([0, *ends], ends, strict=False)]
        valid = self.valid if self.valid is not None else [True] * len(rows)
        return [row if there else None for row, there in zip(rows, valid, strict=True)]

    def to_arrow(self) -> "pa.ListArray":
        """Returns a pyarrow.ListArray of lists over the same values, null where a row is null.

        It keeps the lease until it is dropped. ValueError for more values than Arrow counts.
        """
        lists = Ragged(self.values, self.inner_lengths, None).to_arrow()
        return list_array(self.lengths, lists, self.valid)

    def __arrow_c_array__(self, requested_schema: object | None = None) -> tuple[object, object]:
        """Returns to_arrow() as capsules of Arrow's C interface."""
        capsules: tuple[object, object] = self.to_arrow().__arrow_c_array__(requested_schema)
        return capsules

    def __repr__(self) -> str:
        said = f"{len(self)} rows, {len(self.inner_lengths)} lists, {len(self.values)} values"
        return f"<RaggedLists {self.values.dtype}: {said}>"


class ReadableRecord(Protocol):
    """A Record, as an export reads it; see Record."""

    @property
    def meta(self) -> RecordMeta:
        """Origin of the record."""

    @property
    def columns(self) -> list[str]:
        """Names of the columns that are present."""

    @property
    def _lane_columns(self) -> Columns:
        """All columns its lane may carry, by name."""

    def __len__(self) -> int:
        """Returns the number of rows."""

    def __contains__(self, name: object) -> bool:
        """Returns whether a column is present."""

    def __getitem__(self, name: str) -> Any:
        """Returns a column."""

    def valid(self, name: str) -> np.ndarray[Any, Any] | None:
        """Returns which rows are not null; None if all are."""

    def tag(self, name: str) -> Tag | None:
        """Returns whether a column holds values, null, [] or {}."""

    def json(self, name: str) -> Any:
        """Returns a column of JSON text, decoded."""


class ReadableBatch(Protocol):
    """A Batch, as an export reads it; see Batch."""

    @property
    def layout(self) -> str:
        """`packed` or `padded`."""

    @property
    def lengths(self) -> np.ndarray[Any, Any]:
        """Tokens of each row."""

    @property
    def cu_seqlens(self) -> np.ndarray[Any, Any]:
        """Start of each row and the end of the last."""

    @property
    def group_index(self) -> np.ndarray[Any, Any]:
        """Number of each row's group."""

    @property
    def position_ids(self) -> np.ndarray[Any, Any]:
        """Position of each token in its row."""

    @property
    def meta(self) -> list[RecordMeta]:
        """Origin of each row."""

    @property
    def columns(self) -> list[str]:
        """Columns that at least one record has."""

    def __len__(self) -> int:
        """Returns the number of rows."""

    def __contains__(self, name: object) -> bool:
        """Returns whether at least one record has a column."""

    def __getitem__(self, name: str) -> Any:
        """Returns a column."""

    def has(self, name: str) -> np.ndarray[Any, Any]:
        """Returns which rows have a column."""


def batch_columns(batch: ReadableBatch) -> list[str]:
    """Returns the columns to hand out; `loss_mask` is always among them."""
    return batch.columns if "loss_mask" in batch else [*batch.columns, "loss_mask"]


class NamedColumns:
    """Iteration gives the names of the columns, and `dict(it)` has every column; it is not copied."""

    __slots__ = ()
    _instead: str

    if TYPE_CHECKING:

        @property
        def columns(self) -> list[str]:
            """Names of the columns that are present."""

        def __getitem__(self, name: str) -> Any:
            """A column by name."""

        def to_arrow(self) -> pa.RecordBatch:
            """The columns as a pyarrow.RecordBatch."""

    def keys(self) -> list[str]:
        """Returns the names of the columns that are present: `dict(it)` has every column."""
        return self.columns

    def items(self) -> Iterator[tuple[str, Any]]:
        """Yields each column that is present with its name."""
        return ((name, self[name]) for name in self.columns)

    def __iter__(self) -> Iterator[str]:
        return iter(self.columns)

    def _ipython_key_completions_(self) -> list[str]:
        return self.columns

    def __copy__(self) -> NoReturn:
        raise TypeError(f"a {type(self).__name__} holds leases and cannot be copied -> {self._instead}")

    def __deepcopy__(self, _: object) -> NoReturn:
        self.__copy__()

    def __arrow_c_array__(self, requested_schema: object | None = None) -> tuple[object, object]:
        """Returns to_arrow() as capsules of Arrow's C interface: `pa.record_batch(it)`, `pl.DataFrame(it)`.

        What takes them keeps what to_arrow() keeps. Errors as to_arrow(); pyarrow's, if `requested_schema` is
        another one.
        """
        capsules: tuple[object, object] = self.to_arrow().__arrow_c_array__(requested_schema)
        return capsules

    def __arrow_c_stream__(self, requested_schema: object | None = None) -> object:
        """Returns to_arrow() as a stream of one batch: `pa.table(it)`, DuckDB. As __arrow_c_array__."""
        import pyarrow as pa

        return pa.Table.from_batches([self.to_arrow()]).__arrow_c_stream__(requested_schema)

    def to_polars(self) -> "pl.DataFrame":
        """Returns to_arrow() as a polars frame; of a record, it and all made of it without a copy hold the
        lease until they are dropped.

        Errors as to_arrow(), and ModuleNotFoundError without polars.
        """
        import polars as pl

        return pl.DataFrame(self)


_Array = np.ndarray[Any, Any]
_Maps = list[dict[str, float]]
_Texts = list[str | None]
Value = TypeVar("Value")


class ColumnOf(Generic[Value]):
    """A column of a record as an attribute; None where the record lacks it."""

    def __init__(self, meaning: str) -> None:
        self.__doc__ = meaning

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    @overload
    def __get__(self, record: None, owner: type) -> Self: ...
    @overload
    def __get__(self, record: object, owner: type) -> Value: ...
    def __get__(self, record: Any, owner: type) -> Any:
        if record is None:
            return self
        present = self._name in record
        return record[self._name] if present else None


class RecordColumns:
    """`record.tokens`: as `record["tokens"]`, but None for a column that the record lacks."""

    __slots__ = ()

    tokens = ColumnOf["Ragged"]("Token ids, prompt and response.")
    prompt_length = ColumnOf["_Array | None"]("Tokens before the first trained turn.")
    loss_mask = ColumnOf["Ragged | None"]("1 where a token was sampled and is trained.")
    masks = ColumnOf["Ragged | None"]("Atropos' masks where they are neither -100 nor the token.")
    score = ColumnOf["_Array | None"]("Outcome reward of each trajectory.")
    raw_score = ColumnOf["_Array | None"]("The environment's own score, where a reward bridge changed it.")
    advantages = ColumnOf["Ragged | None"]("Advantage of each token, from the environment.")
    token_rewards = ColumnOf["Ragged | None"]("Reward placed on tokens.")
    step_rewards = ColumnOf["Ragged | None"]("Process reward of each step.")
    step_ends = ColumnOf["Ragged | None"]("Index after the last token of each step.")
    inference_logprobs = ColumnOf["Ragged | None"]("Log-probabilities of the tokens as sampled, in nats.")
    ref_logprobs = ColumnOf["Ragged | None"]("Log-probabilities under the reference policy, in nats.")
    token_versions = ColumnOf["Ragged | None"]("Policy version that sampled each token, -1 elsewhere.")
    temperature = ColumnOf["_Array | None"]("Sampling temperature.")
    reward_components = ColumnOf["_Maps | None"]("Named parts of the score.")
    trace_spans = ColumnOf["Ragged | None"]("Begin and end token of each reasoning trace, in pairs.")
    distill_token_ids = ColumnOf["RaggedLists | None"]("The teacher's top tokens at each position.")
    distill_logprobs = ColumnOf["RaggedLists | None"]("Their log-probabilities, in nats.")
    instance_id = ColumnOf["_Texts | None"]("Id of the prompt's instance.")
    repetition_id = ColumnOf["_Array | None"]("Number of the rollout among those of its prompt.")
    row_index = ColumnOf["_Array | None"]("Number of the row among those of its episode.")
    is_last = ColumnOf["_Array | None"]("Whether the row ends its episode.")
    finish_reason = ColumnOf["_Array | None"]("Why it ended: 0 stop, 1 length, 2 abort, 3 error.")
    turn_ends = ColumnOf["Ragged | None"]("Index after the last token of each turn.")
    messages = ColumnOf["_Texts | None"]("The conversation, JSON text.")
    overrides = ColumnOf["_Texts | None"]("Atropos' overrides of each row, JSON text.")
    group_overrides = ColumnOf["_Texts | None"]("Atropos' overrides of the group, JSON text; one value.")
    generation_params = ColumnOf["_Texts | None"]("Parameters of generation, JSON text; one value.")
    images = ColumnOf["_Texts | None"]("Images of each row, JSON text.")
    extra = ColumnOf["_Texts | None"]("Keys without a column of their own, JSON text; one value.")
    routed_experts = ColumnOf["list[bytes | None] | None"](
        "Experts of each token, layer and choice, as bytes."
    )

    if TYPE_CHECKING:

        @overload
        def __getitem__(
            self,
            name: Literal[
                "tokens",
                "loss_mask",
                "masks",
                "advantages",
                "token_rewards",
                "step_rewards",
                "step_ends",
                "inference_logprobs",
                "ref_logprobs",
                "token_versions",
                "trace_spans",
                "turn_ends",
            ],
        ) -> Ragged: ...
        @overload
        def __getitem__(
            self,
            name: Literal[
                "prompt_length",
                "score",
                "raw_score",
                "temperature",
                "repetition_id",
                "row_index",
                "is_last",
                "finish_reason",
            ],
        ) -> _Array: ...
        @overload
        def __getitem__(self, name: Literal["reward_components"]) -> _Maps: ...
        @overload
        def __getitem__(self, name: Literal["distill_token_ids", "distill_logprobs"]) -> RaggedLists: ...
        @overload
        def __getitem__(
            self,
            name: Literal[
                "instance_id",
                "messages",
                "overrides",
                "group_overrides",
                "generation_params",
                "images",
                "extra",
            ],
        ) -> _Texts: ...
        @overload
        def __getitem__(self, name: Literal["routed_experts"]) -> list[bytes | None]: ...
        @overload
        def __getitem__(self, name: str) -> Any: ...
        def __getitem__(self, name: str) -> Any:
            """A column by name; KeyError if it is absent."""


class BatchColumns:
    """`batch.tokens`, padded or packed; None for a column that no record of the batch has."""

    if TYPE_CHECKING:
        tokens: _Array
        prompt_length: _Array | None
        loss_mask: _Array
        masks: _Array | None
        score: _Array | None
        scores: _Array | None
        raw_score: _Array | None
        advantages: _Array | None
        token_rewards: _Array | None
        step_rewards: Ragged | None
        step_ends: Ragged | None
        inference_logprobs: _Array | None
        ref_logprobs: _Array | None
        token_versions: _Array | None
        temperature: _Array | None
        reward_components: _Maps | None
        trace_spans: Ragged | None
        distill_token_ids: RaggedLists | None
        distill_logprobs: RaggedLists | None
        instance_id: _Texts | None
        repetition_id: _Array | None
        row_index: _Array | None
        is_last: _Array | None
        finish_reason: _Array | None
        turn_ends: Ragged | None
        messages: _Texts | None
        overrides: _Texts | None
        group_overrides: _Texts | None
        generation_params: _Texts | None
        images: _Texts | None
        extra: _Texts | None
        routed_experts: list[bytes | None] | None

        @overload
        def __getitem__(
            self,
            name: Literal[
                "tokens",
                "prompt_length",
                "loss_mask",
                "masks",
                "score",
                "scores",
                "raw_score",
                "advantages",
                "token_rewards",
                "inference_logprobs",
                "ref_logprobs",
                "token_versions",
                "temperature",
                "repetition_id",
                "row_index",
                "is_last",
                "finish_reason",
            ],
        ) -> _Array: ...
        @overload
        def __getitem__(
            self, name: Literal["step_rewards", "step_ends", "trace_spans", "turn_ends"]
        ) -> Ragged: ...
        @overload
        def __getitem__(self, name: Literal["reward_components"]) -> _Maps: ...
        @overload
        def __getitem__(self, name: Literal["distill_token_ids", "distill_logprobs"]) -> RaggedLists: ...
        @overload
        def __getitem__(
            self,
            name: Literal[
                "instance_id",
                "messages",
                "overrides",
                "group_overrides",
                "generation_params",
                "images",
                "extra",
            ],
        ) -> _Texts: ...
        @overload
        def __getitem__(self, name: Literal["routed_experts"]) -> list[bytes | None]: ...
        @overload
        def __getitem__(self, name: str) -> Any: ...
        def __getitem__(self, name: str) -> Any:
            """A column by name; KeyError if it is absent."""


def columns_as_html(title: str, columns: Iterable[tuple[str, str]]) -> str:
    """Returns a title and a table of names and their descriptions."""
    rows = "".join(
        f"<tr><td><code>{escape(name)}</code></td><td>{escape(said)}</td></tr>" for name, said in columns
    )
    return f"<div><code>{escape(title)}</code><table>{rows}</table></div>"
