"""The roles of children of the crash tests: `python roles.py ROLE BRIDGE ...`.

Every step is said on standard output as it happens.

Payloads are a function of (producer, sequence) with a checksum beside them, so that any reader can tell a
torn record.
"""

import gc
import json
import os
import pickle
import re
import subprocess
import sys
import time
import zlib
from pathlib import Path

import numpy as np

import shmbridge
from shmbridge.put import LaneOrigin, RelayedRecord


def given(producer_id: str) -> str:
    """Returns the id that a role gave its producer, from the one that its records carry."""
    return re.sub("-[0-9a-f]{16}$", "", producer_id)


def pattern(producer_id: str, sequence: int, tokens: int = 1200) -> dict:
    """One record: two rows of unequal length, about 17 bytes a token."""
    seed = zlib.crc32(f"{given(producer_id)}/{sequence}".encode())
    stored = np.random.default_rng(seed).integers(0, 1 << 30, tokens, dtype=np.int32)
    rows = [stored[: tokens // 3], stored[tokens // 3 :]]
    return {
        "tokens": rows,
        "advantages": [row.astype(np.float32) for row in rows],
        "inference_logprobs": [-(row % 4096).astype(np.float32) for row in rows],
        "score": [float(zlib.crc32(row.tobytes())) for row in rows],
    }


def check(record: shmbridge.Record) -> int:
    """The record's sequence, if every byte of it is as its producer wrote it."""
    rows, wanted = record["tokens"], pattern(record.meta.producer_id, record.meta.sequence)
    assert len(rows) == 2
    for i, score in enumerate(record["score"]):
        assert zlib.crc32(np.ascontiguousarray(rows[i]).tobytes()) == score, "torn"
        assert np.array_equal(rows[i], wanted["tokens"][i]), "another record's payload"
        assert np.array_equal(record["advantages"][i], wanted["advantages"][i])
        assert np.array_equal(record["inference_logprobs"][i], wanted["inference_logprobs"][i])
    return int(record.meta.sequence)


def say(*words: object) -> None:
    os.write(1, (" ".join(map(str, words)) + "\n").encode())


def produce(bridge: str, producer_id: str, count: str, lane_bytes: str = "64K") -> None:
    """Puts `count` records, one after the other; closes."""
    producer = shmbridge.Producer(bridge, producer_id=producer_id, lane_bytes=lane_bytes)
    say("ready")
    for sequence in range(int(count)):
        put = producer.put(pattern(producer_id, sequence), group_id=sequence)
        assert put == sequence
        say("put", sequence)
    producer.close()
    say("closed")


def relay(bridge: str, record: str) -> None:
    """Puts one record of another node per line of standard input, all with the memory that the file `record`
    holds; closes.
    """
    producer = shmbridge.Producer(bridge, lane_bytes="64K", origin=LaneOrigin("env-2", "source"))
    extent, table, words = pickle.loads(Path(record).read_bytes())
    say("ready")
    for number, _ in enumerate(sys.stdin):
        producer.put(RelayedRecord(extent, table, words, -1, -1, there(number), 0, 0))
        say("put", there(number))
    producer.close()
    say("closed")


def there(number: int) -> int:
    """The sequence at its origin of a relay's record of that number: not all of them are relayed."""
    return 7 * number + 3


def release_all(bridge: str, count: str) -> None:
    """Takes and releases so many records; closes, which removes dead lanes."""
    with shmbridge.Consumer(bridge) as consumer:
        for _ in range(int(count)):
            consumer.get(timeout_s=30).release()
        say("released")
    say("closed")


def produce_when_told(bridge: str, producer_id: str) -> None:
    """Puts one record per line of standard input, and is never closed."""
    producer = shmbridge.Producer(bridge, producer_id=producer_id, lane_bytes="64K")
    say("ready")
    for sequence, _ in enumerate(sys.stdin):
        producer.put(pattern(producer_id, sequence), group_id=sequence)
        say("put", sequence)


def produce_and_fork(bridge: str, producer_id: str, how: str) -> None:
    """Puts two records, then leaves a child of its own behind, and waits to be killed."""
    producer = shmbridge.Producer(bridge, producer_id=producer_id, lane_bytes="64K")
    for sequence in range(2):
        producer.put(pattern(producer_id, sequence), group_id=sequence)
    if how == "fork":
        child = os.fork()
        if child == 0:
            time.sleep(600)
    else:
        child = subprocess.Popen(["sleep", "600"], close_fds=how == "subprocess").pid
    say("child", child)
    time.sleep(600)


def fork_while_creating(bridge: str, producer_id: str) -> None:
    """The armed SIGUSR1 forks in the middle of the lane's creation; the parent then waits to be killed."""
    import signal

    def fork(*_: object) -> None:
        child = os.fork()
        if child == 0:
            signal.signal(signal.SIGUSR1, signal.SIG_DFL)
            time.sleep(600)
        say("child", child)

    signal.signal(signal.SIGUSR1, fork)
    producer = shmbridge.Producer(bridge, producer_id=producer_id, lane_bytes="64K")
    producer.put(pattern(producer_id, 0), group_id=0)
    say("put", 0)
    time.sleep(600)


def consume(bridge: str, count: str, release_from: str = "0") -> None:
    """Takes `count` records and says so, then releases those from `release_from` on, last first."""
    consumer = shmbridge.Consumer(bridge)
    say("ready")
    held = []
    for _ in range(int(count)):
        record = consumer.get(timeout_s=60)
        say("got", given(record.meta.producer_id), check(record), record.meta.redelivered)
        held.append(record)
    while len(held) > int(release_from):
        record = held.pop()
        name = f"{given(record.meta.producer_id)} {record.meta.sequence}"
        say("releasing", name)
        record.release()
        say("released", name)
    say("done")
    sys.stdin.readline()
    del record, held
    consumer.close()
    say("closed")


def end_hub(bridge: str, how: str, end: str) -> None:
    """Takes two records or batches and releases the first, or serves ranks; then closes, or drops all."""
    consumer = shmbridge.Consumer(bridge)
    kept: list[object] = []
    if how == "ranks":
        kept.append(consumer.serve_ranks(1, groups=1))
    else:
        taken = iter(consumer.batches(groups=1, timeout_s=60)) if how == "batches" else None
        for _ in range(2):
            each = consumer.get(timeout_s=60) if taken is None else next(taken)
            say("got", check(each if taken is None else each.records[0]))
            if not kept:
                each.release()
            kept.append(taken or each)
    kept, each, taken = [], None, None
    if end == "close":
        consumer.close()
    del consumer
    gc.collect()
    say("ended")
    sys.stdin.readline()


def start_run(bridge: str, version: str, run_id: str, same_as: str) -> None:
    """Publishes a version as the one with which a learner of that run starts; same_as -1: untrained."""
    with shmbridge.Consumer(bridge) as consumer:
        repeated = None if same_as == "-1" else int(same_as)
        consumer.publish_policy_version(int(version), run_id=run_id, same_as=repeated)
    say("started")


def serve_ranks(bridge: str, world_size: str, groups: str) -> None:
    """Is a hub that serves ranks, until it is told to close."""
    consumer = shmbridge.Consumer(bridge)
    consumer.serve_ranks(int(world_size), groups=int(groups), prefetch=0)
    say("ready")
    sys.stdin.readline()
    consumer.close()
    say("closed")


def read_shares(bridge: str, rank: str, world_size: str, shares: str) -> None:
    """Is a learner rank: reads so many shares, says every record, and is done with a share before it asks for
    the next.
    """
    with shmbridge.Rank(bridge, int(rank), int(world_size)) as reader:
        say("ready")
        for _ in range(int(shares)):
            share = reader.next_share(timeout_s=30)
            for record in share.records:
                say("read", check(record), record.meta.redelivered)
            del record
            share.release()
            reader.report_done()
            say("done", share.manifest.number)
        sys.stdin.readline()
    say("closed")


def begin(bridge: str, producer_id: str, tickets: str) -> None:
    """Takes tickets one by one, then puts a group in one of them per line it is told."""
    with shmbridge.Producer(bridge, producer_id=producer_id, lane_bytes="64K") as producer:
        say("ready")
        held = []
        for number in range(int(tickets)):
            held.append(producer.begin_group(timeout_s=20))
            say("holds", number + 1)
        for number, _ in enumerate(sys.stdin):
            with held.pop() as ticket:
                producer.put(pattern(producer_id, number), policy_version=ticket.policy_version)
            say("put", number)


def limit(bridge: str, steps: str, groups: str) -> None:
    """A hub that grants tickets until it is killed."""
    options = {"policy": "oldest", "max_off_policy_steps": int(steps), "groups_per_step": int(groups)}
    with shmbridge.Consumer(bridge, **options) as consumer:
        if consumer.policy_version < 0:
            consumer.publish_policy_version(0)
        say("ready")
        for _ in sys.stdin:
            pass


def enter(bridge: str) -> None:
    """Opens a producer, puts one record, enters as the hub, takes it, leaves: passes every point of
    creation.
    """
    with shmbridge.Producer(bridge, producer_id="enter", lane_bytes="64K") as producer:
        producer.put(pattern("enter", 0), group_id=0)
        say("ready")
        with shmbridge.Consumer(bridge) as consumer, consumer.get(timeout_s=30) as record:
            check(record)
    say("closed")


def attend(bridge: str) -> None:
    """Is a producer until it is told to close, and lives until it is told to end."""
    producer = shmbridge.Producer(bridge, producer_id="attending", lane_bytes="64K")
    say("ready")
    sys.stdin.readline()
    producer.close()
    say("closed")
    sys.stdin.readline()


def sweep(bridge: str) -> None:
    """Removes what is dead."""
    from shmbridge.segments import sweep_bridge

    say("swept", *sweep_bridge(bridge).removed)


def write_weights(bridge: str, first: str, last: str) -> None:
    """Publishes versions first..last; every value of a version is that version."""
    from shmbridge.weights import WeightsWriter

    writer = WeightsWriter(bridge)
    say("ready")
    for version in range(int(first), int(last) + 1):
        writer.publish(version, weights(version))
        say("published", version)
    say("done")
    sys.stdin.readline()
    writer.close()


def weights(version: int) -> list[tuple[str, np.ndarray]]:
    """Tensors whose every value says the version."""
    return [(name, np.full((64, 33), version, np.float32)) for name in ("first", "second")]


def write_other_weights(bridge: str, first: str, last: str) -> None:
    """As `write_weights`, of another model."""
    from shmbridge.weights import WeightsWriter

    with WeightsWriter(bridge) as writer:
        for version in range(int(first), int(last) + 1):
            writer.publish(version, other_weights(version))
            say("published", version)


def other_weights(version: int) -> list[tuple[str, np.ndarray]]:
    """Tensors of another model whose every value says the version."""
    return [(name, np.full((5, 7), version, np.float32)) for name in ("first", "third")]


def third_weights(version: int) -> list[tuple[str, np.ndarray]]:
    """Tensors of a third model."""
    return weights(version)[:1]


def write_changed_weights(bridge: str) -> None:
    """Publishes version 1 whole, then in turns the first tensor alone and the second alone, up to version
    5.
    """
    from shmbridge.weights import WeightsWriter

    writer = WeightsWriter(bridge)
    writer.publish(1, weights(1))
    for version in range(2, 6):
        writer.publish(version, [weights(version)[version % 2]], changed_only=True)
        say("published", version)


def fill_weights(bridge: str, first: str, last: str) -> None:
    """Fills versions first..last: says the ticket, writes the first tensor, and commits when it is told that
    the rest is there.
    """
    from shmbridge.weights import WeightsWriter

    writer = WeightsWriter(bridge)
    for version in range(int(first), int(last) + 1):
        with writer.fill(
            version, [(name, "float32", tensor.shape) for name, tensor in weights(version)]
        ) as filling:
            filling.write(*weights(version)[0])
            say(json.dumps(filling.ticket))
            sys.stdin.readline()
        say("published", version)


def write_parts(bridge: str) -> None:
    """Writes the second tensor, in two halves, for each ticket it is told."""
    from shmbridge.weights import WeightsPart

    with WeightsPart(bridge) as part:
        say("ready")
        for line in sys.stdin:
            ticket = json.loads(line)
            name, tensor = weights(ticket["version"])[1]
            try:
                for half in (slice(0, 32), slice(32, None)):
                    part.write(ticket, name, tensor[half], (half,))
                say("wrote", ticket["version"])
            except shmbridge.FillingOver:
                say("refused", ticket["version"])


def hold_weights(bridge: str) -> None:
    """Leases the newest version and never gives it back."""
    from shmbridge.weights import WeightsReader

    with WeightsReader(bridge).lease(timeout_s=30) as lease:
        say("holds", lease.version)
        time.sleep(600)


def store_values(bridge: str, count: str) -> None:
    """Commits segments of values; every byte of one is its number, every row has that owner, too."""
    from shmbridge.segments import leave_bridge, open_control, stored

    control = open_control(bridge)
    for number in range(int(count)):
        owners = np.arange(10 * number, 10 * number + 4)
        say("stored", stored.write_values(bridge, owners, b"table", [(0, [bytes([number]) * 4096])]))
    say("done")
    sys.stdin.readline()
    leave_bridge(control.mapping.fd, bridge)


def release_values(bridge: str, name: str, first: str, last: str) -> None:
    """Releases rows of a segment, one at a time."""
    from shmbridge.segments import stored

    for row in range(int(first), int(last) + 1):
        say("gone" if stored.release_values(name, [row]) else "held")


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
