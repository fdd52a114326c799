"""What a record and a batch both are: columns by name, as in a data frame, and a table for Arrow."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    import polars as pl
    import pyarrow as pa


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
