"""The groups that are moved: seeded, with the dense core of 17 bytes a token, in every form that a producer
takes.

Knows no transport.
"""

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from shmbridge.config import format_size

SEED = 20260101
SOURCES = 4  # different groups, put in turn, so that no source stays in the nearest cache
ROWS = 8

Form = Literal["arrays", "row_arrays", "tensors", "lists"]
Group = dict[str, Any]
Array = np.ndarray[Any, Any]

FORMS: tuple[Form, ...] = ("arrays", "row_arrays", "tensors", "lists")
DTYPES = {
    "tokens": np.int32,
    "loss_mask": np.uint8,
    "inference_logprobs": np.float32,
    "advantages": np.float32,
    "token_rewards": np.float32,
}
COLUMNS = tuple(DTYPES)  # one value per token; `score`, one float64 per row, comes on top


@dataclass(frozen=True, slots=True)
class Shape:
    """How large a group is: `rows` trajectories of `length` tokens, and which columns it has (without any but
    tokens: no score).
    """

    rows: int = ROWS
    length: int = 2048
    columns: tuple[str, ...] = COLUMNS

    @property
    def tokens(self) -> int:
        return self.rows * self.length

    @property
    def has_score(self) -> bool:
        return self.columns == COLUMNS

    @property
    def bytes(self) -> int:
        """Bytes of all values, which every contender has to move, whatever it adds."""
        return sum(np.dtype(DTYPES[each]).itemsize for each in self.columns) * self.tokens + (
            8 * self.rows if self.has_score else 0
        )

    def __str__(self) -> str:
        return f"{self.rows} x {self.length} tokens, {format_size(self.bytes)}"


SMALL, MIDDLE, LARGE = Shape(length=256), Shape(length=2048), Shape(length=16384)
# 1 KiB to 16 MiB, about 4 times as large each
SIZES = tuple(Shape(length=length) for length in (8, 32, 128, 256, 512, 2048, 8192, 16384, 32768, 123_360))
TINY = Shape(rows=1, length=8, columns=("tokens",))  # a record that is nearly all bookkeeping


def make(shape: Shape, form: Form, seed: int = SEED) -> Group:
    """One group; the same seed has the same values in every form."""
    rng, count = np.random.default_rng(seed), shape.tokens
    mask = np.ones((shape.rows, shape.length), dtype=np.uint8)
    mask[:, : shape.length // 4] = 0  # the prompt
    flat: dict[str, Array] = {
        "tokens": rng.integers(0, 150_000, count, dtype=np.int32),
        "loss_mask": mask.ravel(),
        "inference_logprobs": -rng.exponential(size=count).astype(np.float32),
        "advantages": rng.normal(size=count).astype(np.float32),
        "token_rewards": rng.normal(size=count).astype(np.float32),
    }
    scores = [float(score) for score in rng.normal(size=shape.rows)]
    group: Group = {name: _as(form, flat[name], shape) for name in shape.columns}
    if form == "lists" and "loss_mask" in group:  # as Atropos has it
        pairs = zip(group["tokens"], group.pop("loss_mask"), strict=True)
        group["masks"] = [
            [token if kept else -100 for token, kept in zip(*pair, strict=True)] for pair in pairs
        ]
    if shape.has_score:
        group["scores"] = scores
    return group


def sources(shape: Shape, form: Form, first_seed: int = SEED) -> list[Group]:
    """SOURCES different groups."""
    return [make(shape, form, first_seed + n) for n in range(SOURCES)]


def flat_columns(group: Group) -> list[Array]:
    """The values of a group of form `arrays` as contiguous arrays, scores last, for transports of bytes."""
    columns = [group[name][0] for name in COLUMNS if name in group]
    return [*columns, np.asarray(group["scores"], dtype=np.float64)] if "scores" in group else columns


def _as(form: Form, flat: Array, shape: Shape) -> Any:
    if form == "arrays":
        return flat, np.full(shape.rows, shape.length, dtype=np.uint32)
    rows = [row.copy() for row in flat.reshape(shape.rows, shape.length)]
    if form == "lists":
        return [row.tolist() for row in rows]
    if form == "tensors":
        import torch

        return [torch.from_numpy(row) for row in rows]
    return rows
