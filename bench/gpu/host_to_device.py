"""How fast values come from host memory to the device: from a registered lane, a registered batch, pinned and
pageable memory.

The same bytes each time, in copies of one record. A part of `make gpu`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from shmbridge.bench.gpu.part import Clock, Figures, arguments, gib_per_s

RECORDS = 32
TOKENS = {"smallest": 1 << 14, "full": 1 << 19}  # of one record, four bytes each
ROUNDS = 10
_PAGE = 4096


class _Copies:
    """Copies of RECORDS records to the device, and their figures."""

    def __init__(self, options: Any) -> None:
        self.figures, self.clock = Figures(options.out, options.seconds), Clock(options.device)
        self.tokens = TOKENS[options.size]
        self.size = RECORDS * self.tokens * 4
        self._target = torch.empty(RECORDS, self.tokens, dtype=torch.int32, device=options.device)

    def measure(self, what: str, sources: list[torch.Tensor]) -> None:
        """Adds a figure of copies of one record each."""
        self.add(what, lambda: self.copy(sources), RECORDS)

    def add(self, what: str, work: Callable[[], object], copies: int) -> None:
        """Adds a figure of all bytes in so many copies."""
        rate = gib_per_s(self.size, self.clock.seconds(work, ROUNDS))
        self.figures.add(what, gib_s=rate, copies=copies, mib=self.size >> 20)

    def copy(self, sources: list[torch.Tensor]) -> None:
        for row, source in zip(self._target, sources, strict=True):
            row.copy_(source, non_blocking=True)


def main() -> int:
    """0 if everything that this machine can do was measured."""
    options = arguments(__doc__ or "")
    copies = _Copies(options)
    pageable = [torch.full((copies.tokens,), number, dtype=torch.int32) for number in range(RECORDS)]
    copies.measure("pageable memory", pageable)
    if options.device == "cuda":
        copies.measure("pinned memory", [source.pin_memory() for source in pageable])
    _bridge_rows(options.device, copies)
    return 0


def _bridge_rows(device: str, copies: _Copies) -> None:
    """From lanes as they are, from registered lanes, and from a batch's own arrays, registered."""
    import shmbridge
    from shmbridge.bench.gpu.preflight import has_ofd_locks
    from shmbridge.consumers.pinned import CudaDriver, PinnedLanes

    if not has_ofd_locks():
        copies.figures.add("lanes and batches: not measured, a bridge needs OFD locks")
        return
    driver = CudaDriver() if device == "cuda" else None
    bridge = f"gpu-copies-{os.getpid()}"
    try:
        with (
            shmbridge.Consumer(bridge) as consumer,
            shmbridge.Producer(bridge, lane_bytes=2 * copies.size) as producer,
        ):
            for number in range(RECORDS):
                producer.put({"tokens": [np.full(copies.tokens, number, np.int32)]})
            groups = consumer.take_groups(groups=RECORDS, timeout_s=30.0)
            assert groups is not None
            records = [record for group in groups for record in group.records]
            views = [_over(record["tokens"].values) for record in records]
            copies.measure("lane, not registered", views)
            if driver is not None:
                lanes = PinnedLanes(driver)
                lanes.pin(records[0])
                pieces = [
                    [_over(part) for part in lanes.cut(record, record["tokens"].values)] for record in records
                ]
                what = "lane, registered" if lanes.bytes else "lane, registration refused (see the log)"
                copies.add(what, lambda: _copy_pieces(pieces), sum(map(len, pieces)))
                torch.cuda.synchronize()
                lanes.close()
                pieces.clear()
            batch = shmbridge.Batch(groups, "packed")
            _batch_rows(batch, driver, copies)
            batch.release()
            views.clear()
    finally:
        shmbridge.clean(bridge, dry_run=False)


def _batch_rows(batch: Any, driver: Any, copies: _Copies) -> None:
    gathered = batch.tokens
    sources = list(torch.from_numpy(gathered).view(RECORDS, copies.tokens))
    copies.measure("batch, not registered", sources)
    if driver is None:
        return
    address = gathered.ctypes.data
    length = -(-gathered.nbytes // _PAGE) * _PAGE
    refused = driver.register(address, length) if address % _PAGE == 0 else -1
    what = f"batch, registration refused ({refused})" if refused else "batch, registered"
    copies.measure(what, sources)
    if not refused:
        hidden = _hidden(lambda: copies.copy(sources))
        copies.figures.add("batch, registered: its copies beside a matrix product", hidden=hidden)
        torch.cuda.synchronize()
        driver.unregister(address)


def _hidden(copy: Callable[[], None]) -> float:
    """The share of the copies' time that is hidden behind compute on another stream: 1 if both take no longer
    than the compute alone.
    """
    make: Any = torch.cuda.Stream
    clock, side = Clock("cuda"), make()
    work = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)

    def compute() -> None:
        for _ in range(40):
            torch.matmul(work, work)

    def both() -> None:
        begun = torch.cuda.current_stream()
        side.wait_stream(begun)
        compute()  # queued first, as a step is while the next batch is brought
        with torch.cuda.stream(side):
            copy()
        begun.wait_stream(side)

    copies, alone, together = (sorted(clock.seconds(each, 5))[2] for each in (copy, compute, both))
    return max(0.0, min(1.0, 1.0 - (together - alone) / copies))


def _copy_pieces(pieces: list[list[torch.Tensor]]) -> None:
    for parts in pieces:
        for part in parts:
            part.to("cuda", non_blocking=True)


class _Writable:
    """A read-only array's memory for torch, which takes none that is; only copied from."""

    def __init__(self, values: np.ndarray[Any, Any]) -> None:
        self.values = values
        self.__array_interface__ = values.__array_interface__ | {"data": (values.ctypes.data, False)}


def _over(values: np.ndarray[Any, Any]) -> torch.Tensor:
    return torch.from_numpy(np.asarray(_Writable(values)))


if __name__ == "__main__":
    sys.exit(main())
