"""The roles of children of the takeover tests: `python takeover_roles.py ROLE BRIDGE ...`; roles.py has those
of a single end.

A nursery is one process that has imported everything and forks the children that start at the same moment.
"""

import ctypes
import importlib
import itertools
import os
import random
import select
import signal
import sys
import time
import zlib
from collections.abc import Callable

import numpy as np
from roles import given, pattern, say

import shmbridge
from shmbridge.segments import control_name, still_named, weights_name
from shmbridge.testing import faults
from shmbridge.weights import WeightsReader, WeightsWriter

WHOLE = 600  # seconds: longer than any test
PR_SET_PDEATHSIG = 1  # linux/prctl.h: no child outlives the nursery


def learn(bridge: str, groups: str, hold: str, prefetch: str) -> None:
    """Takes batches of whole groups, says what is in each, and goes on when it is told to."""
    consumer = shmbridge.Consumer(bridge)
    say("ready")
    for batch in consumer.batches(groups=int(groups), hold=hold, prefetch=int(prefetch)):
        rows = np.split(batch.tokens, batch.cu_seqlens[1:-1])
        for first in range(0, len(batch), 2):
            meta = batch.meta[first]
            wanted = pattern(meta.producer_id, meta.sequence)["tokens"]
            assert all(
                np.array_equal(row, want) for row, want in zip(rows[first : first + 2], wanted, strict=True)
            )
        say(
            "batch",
            *(f"{given(meta.producer_id)}/{meta.sequence}/{meta.redelivered}" for meta in batch.meta[::2]),
        )
        if not sys.stdin.readline():
            return


def keep_a_view(bridge: str, how: str) -> None:
    """Keeps a view of a record beyond the end of its consumer, and says when asked whether it still reads the
    same.
    """
    try:
        with shmbridge.Consumer(bridge) as consumer:
            record = consumer.get(30)
            view = record["tokens"].values
            if how == "released":
                record.release()
            elif how == "error":
                raise KeyError("the learner fails")
            elif how == "held":
                kept = record
    except KeyError:
        pass
    del consumer, record
    before = zlib.crc32(view.tobytes())
    say("closed")
    sys.stdin.readline()
    say("same" if zlib.crc32(view.tobytes()) == before else "changed")
    kept = view = None
    say("dropped")
    sys.stdin.readline()
    del kept, view


# -- a nursery: many start at once
# ------------------------------------------------------------------------------------------------------


def import_all() -> None:
    """Before the forks, not in each."""
    importlib.import_module("shmbridge.control.server")


def fork_all(jobs: list[Callable[[], None]], armed: dict[int, faults.Fault]) -> dict[int, int]:
    """Forks a child per job, held back until the last one is there: pid -> number of the job.

    Children never come back.
    """
    gate, opener = os.pipe()
    pids = {}
    for number, job in enumerate(jobs):
        pid = os.fork()
        if pid == 0:
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            os.close(opener)
            if number in armed:
                os.environ["SHMBRIDGE_FAULT"] = str(armed[number])
            os.read(gate, 1)
            try:
                job()
            except BaseException as error:
                say("failed", number, type(error).__name__, error)
                os._exit(1)
            os._exit(0)
        pids[pid] = number
    os.close(opener)
    return pids


def nursery(bridge: str, seed: str) -> None:
    """Twenty starters at one moment: ten want to be the consumer and try again for ever, ten are producers;
    some are killed on the way.
    """
    import_all()
    rng = random.Random(int(seed))
    killers = [
        *faults.CREATING_CONTROL,
        *faults.CREATING_LANE,
        *faults.ENTERING_HUB,
        *faults.TAKING,
        *faults.SWEEPING,
        "producer.before_tail",
    ]
    wants = [n % 2 == 0 for n in range(20)]
    jobs = [lambda n=n: (compete if wants[n] else deliver)(bridge, n) for n in range(20)]
    armed = {n: faults.Fault(rng.choice(killers), rng.randrange(2)) for n in rng.sample(range(20), 7)}
    pids = fork_all(jobs, armed)
    # the race is over
    signal.signal(signal.SIGTERM, lambda *_: [os.kill(pid, signal.SIGKILL) for pid in list(pids)])
    while pids:
        pid, status = os.wait()
        say(
            "ended",
            pids[pid],
            "consumer" if wants[pids.pop(pid)] else "producer",
            os.waitstatus_to_exitcode(status),
        )


def compete(bridge: str, number: int) -> None:
    """Becomes the consumer as soon as no other process is, prints that, and takes until it is killed."""
    while True:
        try:
            consumer = shmbridge.Consumer(bridge)
            break
        except shmbridge.ConsumerTaken:
            time.sleep(0.002)
    say("hub", number, os.getpid(), consumer.hub_epoch)
    while True:
        with consumer.get() as record:
            say("got", given(record.meta.producer_id), check_short(record), record.meta.redelivered)


def deliver(bridge: str, number: int) -> None:
    """Puts three records and lives on."""
    producer = shmbridge.Producer(bridge, producer_id=str(number), lane_bytes="64K")
    for sequence in range(3):
        producer.put(pattern(str(number), sequence, 300), group_id=sequence)
    say("delivered", number, os.getpid(), producer.lane_name)
    time.sleep(WHOLE)


def come_and_go(bridge: str, rounds: str, seed: str) -> None:
    """Producers and both ends of the weights start and stop `rounds` times in all, consumers as they like;
    four processes only clean.
    """
    import_all()
    share = int(rounds) // 6
    stop, stopper = os.pipe()

    def over() -> bool:
        return bool(select.select([stop], [], [], 0)[0])

    sweepers = fork_all([lambda: sweep_for_ever(bridge, over)] * 4, {})
    takers = fork_all([lambda n=n: take_for_ever(bridge, 20, over) for n in range(2)], {})
    jobs = [lambda n=n: put_rounds(bridge, n, share, int(seed)) for n in range(4)]
    jobs += [lambda: write_rounds(bridge, share), lambda: read_rounds(bridge, share)]
    left = fork_all(jobs, {})
    while left:
        pid, status = os.wait()
        assert pid in left, f"a sweeper or a consumer ended with {status:#x}"
        assert left.pop(pid) is not None
        assert status == 0
    say("rounds over")
    sys.stdin.readline()
    os.write(stopper, b"x")  # all see it, none reads it
    for pid in [*sweepers, *takers]:
        assert os.waitpid(pid, 0)[1] == 0
    say("done")


def sweep_for_ever(bridge: str, over: Callable[[], bool]) -> None:
    removed = 0
    while not over():
        removed += len(shmbridge.clean(bridge, dry_run=False).removed)
    say("swept", removed)


def put_rounds(bridge: str, number: int, rounds: int, seed: int) -> None:
    """Each round is a producer that puts a few records, waits until they were released, and looks whether its
    segments are still there.
    """
    rng = random.Random(seed * 100 + number)
    for turn in range(rounds):
        who = f"{number}-{turn}"
        with shmbridge.Producer(bridge, producer_id=who, lane_bytes="64K") as producer:
            there(producer._lane.fd, producer.lane_name)
            there(producer._control.mapping.fd, control_name(bridge))
            count = rng.randrange(1, 6)
            for sequence in range(count):
                producer.put(pattern(who, sequence, 300), group_id=sequence, timeout_s=30)
            there(producer._lane.fd, producer.lane_name)
            say("put", who, count)
            producer.close(drain=True, timeout_s=30)  # without a consumer the sweepers remove the rest


def take_for_ever(bridge: str, every: int, over: Callable[[], bool]) -> None:
    """Is the consumer for `every` records, then closes and becomes it again."""
    while not over():
        try:
            consumer = shmbridge.Consumer(bridge)
        except shmbridge.ConsumerTaken:
            time.sleep(0.002)
            continue
        with consumer:
            there(consumer._state.words.mapping.fd, control_name(bridge))
            for _ in range(every):
                try:
                    with consumer.get(0.2) as record:
                        say("got", given(record.meta.producer_id), check_short(record))
                except shmbridge.ConsumerEmpty:
                    if over():
                        break
            there(consumer._state.words.mapping.fd, control_name(bridge))


def check_short(record: shmbridge.Record) -> int:
    wanted = pattern(record.meta.producer_id, record.meta.sequence, 300)
    assert all(np.array_equal(record["tokens"][i], wanted["tokens"][i]) for i in range(2))
    return int(record.meta.sequence)


def write_rounds(bridge: str, rounds: int) -> None:
    """Each round is a writer that publishes two versions, and looks whether the segment is still there."""
    version = itertools.count(1)
    for _ in range(rounds):
        with WeightsWriter(bridge) as writer:
            for _ in range(2):
                number = max(next(version), (writer.last_version or 0) + 1)
                writer.publish(number, [("all", np.full(1000, number, np.float32))])
                there(writer._versions.mapping.fd, weights_name(bridge))


def read_rounds(bridge: str, rounds: int) -> None:
    """Each round is a reader that leases what is newest, if there is anything."""
    for _ in range(rounds):
        with WeightsReader(bridge) as reader:
            if reader.version is None:
                continue
            try:
                with reader.lease(timeout_s=0.2) as lease:
                    assert np.all(lease.tensors["all"] == lease.version)
            except shmbridge.NotReady:  # its writer has left, and took them along as the last one
                pass


def there(fd: int, name: str) -> None:
    """Checks that a segment in use by a living process still has its name."""
    assert still_named(fd, name), f"{name} was removed under its living user"


def look(bridge: str) -> None:
    """Says how many lanes have a living producer and whether a consumer lives, as seen from here, and tries
    to clean.
    """
    (info,) = [each for each in shmbridge.list_bridges() if each.name == bridge]
    say("sees", sum(lane.alive for lane in info.lanes), info.consumer_pid is not None)
    say("removed", len(shmbridge.clean(bridge, dry_run=False).removed))


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
