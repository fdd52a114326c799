"""shmbridge itself, through its public names: `Producer.put` and `Consumer.get`, or `poll`.

Does: everything it promises (what was committed outlives everybody's death, nothing is lost or torn, in
order, several producers, backpressure, waiting without burning a core), and takes groups as they are: lists,
arrays, tensors. The consumer reads columns in place. Does not: keep a checksum over the bytes; where
`checksum` is asked for, both ends make it, as an application would.
"""

import os
import zlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

import shmbridge
from shmbridge.bench import contract
from shmbridge.bench.baselines.memcpy_baseline import touch
from shmbridge.bench.contract import MODULO, READ_TIMEOUT_S, Checksum, Plan
from shmbridge.bench.groups import Array, Group

if TYPE_CHECKING:
    import pyarrow as pa

NAME = "shmbridge"
NEEDS = ()
INSTALL = ""


class Reader(contract.Reader):
    """The hub of a bridge of its own."""

    _bridges = 0

    def __init__(self, plan: Plan) -> None:
        super().__init__(plan)
        Reader._bridges += 1
        self.address = {"bridge": f"bench-{os.getpid()}-{Reader._bridges}"}
        self._check = _CHECKS[plan.checksum]
        self._consumer = shmbridge.Consumer(self.address["bridge"], schema=_schema(plan.checksum))

    def read_one(self) -> int:
        with self._consumer.get(READ_TIMEOUT_S) as record:
            return self._look(record)

    def read(self, count: int) -> int:
        return super().read(count) if self.plan.take == "get" else self._poll(count)

    def _poll(self, count: int) -> int:
        total = 0
        while count:
            records = self._consumer.poll(min(count, 256))
            for record in records:
                total += self._look(record)
                record.release()
            count -= len(records)
        return total % MODULO

    def _look(self, record: shmbridge.Record) -> int:
        if self.plan.look == "nothing":
            return 0
        columns = [record[name].values for name in self.plan.shape.columns]
        if self.plan.shape.has_score:
            columns.append(record["score"])
        for _ in range(self.plan.reads):
            total = sum(map(touch, columns))
        if self._check is not None and not np.array_equal(
            record["checksums"], [self._sum(record)] * self.plan.shape.rows
        ):
            raise ValueError(f"record {record.meta.sequence}: its bytes are not what was put in")
        return total

    def _sum(self, record: shmbridge.Record) -> int:
        assert self._check is not None
        return sum(self._check(record[name].values) for name in self.plan.shape.columns)

    def close(self) -> None:
        self._consumer.close()
        shmbridge.clean(self.address["bridge"], dry_run=False)


class Writer(contract.Writer):
    """A producer with a lane of the plan's size."""

    def __init__(self, address: dict[str, str], plan: Plan) -> None:
        super().__init__(address, plan)
        self._check = _CHECKS[plan.checksum]
        self._producer = shmbridge.Producer(
            address["bridge"], env_name=plan.form, lane_bytes=plan.lane_bytes, schema=_schema(plan.checksum)
        )

    def prepare(self, groups: list[Group]) -> list[Group]:
        return groups

    def write_one(self, group: Group) -> None:
        if self._check is not None:
            check = sum(self._check(group[name][0]) for name in self.plan.shape.columns)
            group = group | {"checksums": [check] * self.plan.shape.rows}
        self._producer.put(group, timeout_s=READ_TIMEOUT_S)

    def close(self) -> None:
        self._producer.close()


def _xxh3(values: Array) -> int:
    import xxhash

    return xxhash.xxh3_64_intdigest(values.data) >> 8  # the sum of five fits an int64


def _crc32(values: Array) -> int:
    return zlib.crc32(values.data)


_CHECKS: dict[Checksum, Callable[[Array], int] | None] = {"none": None, "crc32": _crc32, "xxh3": _xxh3}


def _schema(checksum: Checksum) -> "pa.Schema | None":
    """One int64 per row on top of the standard columns."""
    if checksum == "none":
        return None
    import pyarrow as pa

    fields: list[Any] = [pa.field("checksums", pa.int64())]
    return pa.schema(fields)
