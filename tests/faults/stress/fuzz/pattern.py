"""The content of a record: a function of seed, producer and sequence, cheap on both sides and compared byte
for byte.

Knows columns; knows nothing of bridges. A record is three slices of random tables at places that a hash
chooses, so that another record's bytes, or half of them, are not taken for it.
"""

from typing import Any, NamedTuple

import numpy as np

LONGEST = 1200  # tokens of a record
_PLACES = 1 << 16
_BLOCK = 256
_MIX = (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)


class Shape(NamedTuple):
    """The places of a record's bytes in the tables, and the split of its tokens into rows."""

    at: int
    tokens: int
    score_at: int
    rows: int
    columns: int  # 1: tokens; 2: and scores; 3: and advantages


class Pattern:
    """The records of one run. A producer is known by its number."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        random = np.random.default_rng(seed)
        self._tokens = random.integers(0, 1 << 31, _PLACES + LONGEST, dtype=np.int32)
        self._advantages = random.random(_PLACES + LONGEST, dtype=np.float32)
        self._scores = random.random(_PLACES + 4)
        self._token_bytes = self._tokens.tobytes()
        self._advantage_bytes = self._advantages.tobytes()
        self._score_bytes = self._scores.tobytes()
        self._blocks: dict[int, tuple[int, list[Shape]]] = {}

    def shape(self, number: int, sequence: int) -> Shape:
        """Returns the shape of one record; keeps the block of sequences around it for the next call."""
        block = sequence // _BLOCK
        kept = self._blocks.get(number)
        if kept is None or kept[0] != block:
            kept = self._blocks[number] = (block, self._shapes(number, block))
        return kept[1][sequence % _BLOCK]

    def _shapes(self, number: int, block: int) -> list[Shape]:
        keys = np.arange(block * _BLOCK, (block + 1) * _BLOCK, dtype=np.uint64)
        keys ^= np.uint64(number << 24) ^ np.uint64((self.seed * _MIX[0]) & (1 << 63) - 1)
        for shift, factor in ((30, _MIX[1]), (27, _MIX[2])):
            keys = (keys ^ (keys >> np.uint64(shift))) * np.uint64(factor)
        keys ^= keys >> np.uint64(31)
        parts = [
            ((keys >> np.uint64(shift)) & np.uint64(0xFFFF)).astype(np.int64) for shift in (0, 16, 32, 48)
        ]
        at, score_at, size, kind = parts
        tokens = np.where(
            kind % 100 < 70,
            4 + size % 61,
            np.where(kind % 100 < 95, 64 + size % 256, 320 + size % (LONGEST - 319)),
        )
        rows, columns = 1 + kind // 100 % 3, np.maximum(1, kind // 300 % 5 - 1)
        return [Shape(*each) for each in np.stack((at, tokens, score_at, rows, columns), axis=1).tolist()]

    @staticmethod
    def lengths(shape: Shape) -> list[int]:
        """Tokens of each row: all equal, the last takes the rest."""
        each = shape.tokens // shape.rows
        return [each] * (shape.rows - 1) + [shape.tokens - each * (shape.rows - 1)]

    def columns(self, number: int, sequence: int) -> dict[str, Any]:
        """The record as `put` takes it."""
        shape = self.shape(number, sequence)
        columns: dict[str, Any] = {"tokens": self._rows(self._tokens, shape)}
        if shape.columns >= 2:
            columns["score"] = self._scores[shape.score_at : shape.score_at + shape.rows]
        if shape.columns >= 3:
            columns["advantages"] = self._rows(self._advantages, shape)
        return columns

    def _rows(self, table: np.ndarray, shape: Shape) -> list[np.ndarray]:
        end = shape.at + shape.tokens
        if shape.rows == 1:
            return [table[shape.at : end]]
        each = shape.tokens // shape.rows
        cuts = [*range(shape.at, shape.at + each * shape.rows, each), end]
        return [table[cuts[row] : cuts[row + 1]] for row in range(shape.rows)]

    def claimed(self, number: int, sequence: int) -> tuple[int, dict[str, Any]]:
        """Rows and lengths of the record as `claim` takes them."""
        shape = self.shape(number, sequence)
        lengths = self.lengths(shape)
        columns = {"tokens": lengths, "score": None, "advantages": lengths}
        return shape.rows, dict(list(columns.items())[: shape.columns])

    def fill(self, slot: Any, number: int, sequence: int) -> None:
        """The record, written into an open claim."""
        shape = self.shape(number, sequence)
        end = shape.at + shape.tokens
        slot["tokens"][:] = self._tokens[shape.at : end]
        if shape.columns >= 2:
            slot["score"][:] = self._scores[shape.score_at : shape.score_at + shape.rows]
        if shape.columns >= 3:
            slot["advantages"][:] = self._advantages[shape.at : end]

    def token_bytes(self, number: int, sequence: int) -> bytes:
        """Returns the expected bytes of the record's tokens."""
        shape = self.shape(number, sequence)
        return self._token_bytes[4 * shape.at : 4 * (shape.at + shape.tokens)]

    def is_whole(self, record: Any, number: int) -> bool:
        """Whether every byte, every length and the kind of every column is as its producer wrote it."""
        shape = self.shape(number, record._sequence)
        end = shape.at + shape.tokens
        tokens = record["tokens"]
        if (
            tokens.values.tobytes() != self._token_bytes[4 * shape.at : 4 * end]
            or tokens.lengths.tolist() != self.lengths(shape)
            or len(record.columns) != shape.columns
        ):
            return False
        if shape.columns >= 2:
            wanted = self._score_bytes[8 * shape.score_at : 8 * (shape.score_at + shape.rows)]
            if record["score"].tobytes() != wanted:
                return False
        return (
            shape.columns < 3
            or record["advantages"].values.tobytes() == self._advantage_bytes[4 * shape.at : 4 * end]
        )
