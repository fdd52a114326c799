"""Values for the rows of a batch that lack their own."""

from typing import Any, Literal, Protocol

import numpy as np

from shmbridge.errors import BadArgument, shown

_Array = np.ndarray[Any, Any]


class Rows(Protocol):
    """A batch, as far as its rows are filled here."""

    lengths: _Array
    tokens: _Array

    @property
    def layout(self) -> Literal["padded", "packed"]:
        """How its tokens are laid out."""

    def has(self, name: str) -> _Array:
        """Returns the rows that have a column."""

    def __contains__(self, name: object) -> bool:
        """Returns whether any row has a column."""

    def __getitem__(self, name: str) -> Any:
        """Returns a column."""


def advantages_or(batch: Rows, fallback: "float | _Array") -> _Array:
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
