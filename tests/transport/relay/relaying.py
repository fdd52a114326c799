"""What Ray does between a source and a destination, on one machine: it copies bytes."""

import time
from collections.abc import Callable

import numpy as np

import shmbridge
from shmbridge.relay import wire
from shmbridge.relay.destination import Destination
from shmbridge.relay.source import Source


def send(source: Source, ask: wire.PullRequest) -> wire.PullReply:
    """What a pull brings: through bytes, as over the network."""
    arrays = wire.encode(source.pull(wire.decode_request(wire.encode_request(ask))))
    return wire.decode([np.array(each) for each in arrays])


def exchange(source: Source, destination: Destination, asks: int = 1) -> int:
    """So many asks and their answers; returns the bytes that came."""
    size = 0
    for _ in range(asks):
        requested_ns = time.monotonic_ns()
        size += destination.accept(source.node, send(source, destination.request(source.node)), requested_ns)
        destination.work()
    return size


def group(number: int, tokens: int = 8, rows: int = 2) -> dict:
    return {"tokens": [[number] * tokens] * rows, "score": [float(number)] * rows}


def key(record: shmbridge.Record) -> tuple[str, int]:
    """The key of a record at its origin."""
    return record.meta.origin.producer_id, record.meta.origin.sequence


def balanced(stats: dict[str, float]) -> bool:
    """Whether taken = acknowledged + discarded + refused + held."""
    ended = sum(
        count for name, count in stats.items() if name.startswith(("acknowledged", "discarded", "refused"))
    )
    return stats.get("taken_total", 0) == ended + stats["held"]


def taken(consumer: shmbridge.Consumer) -> list[tuple[str, int]]:
    """The keys of all records that are there; releases them."""
    keys = []
    while records := consumer.poll():
        for record in records:
            keys.append(key(record))
            record.release()
    return keys


def take(consumer: shmbridge.Consumer, count: int, step: Callable[[], object]) -> list[tuple[str, int]]:
    """The keys of so many records, or more, while `step` brings them; releases them. At most 20 seconds."""
    keys, until = taken(consumer), time.monotonic() + 20
    while len(keys) < count and time.monotonic() < until:
        step()
        keys += taken(consumer)
    return keys
