"""The roles of children of the limits tests: `python roles.py ROLE BRIDGE ...`.

One JSON object per step is said on standard output.

Roles that hit a limit import everything first, so that the bridge meets the limit and not the import system.
"""

import json
import os
import resource
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np

import shmbridge
import shmbridge.control.server
from shmbridge import Consumer, Producer, clean, list_bridges
from shmbridge.segments import locks as limits
from shmbridge.weights import WeightsWriter

MOUNT = "/dev/shm"


def say(step: str, **facts: Any) -> None:
    os.write(1, (json.dumps({"step": step, **facts}) + "\n").encode())


def attempt(step: str, action: Callable[[], Any]) -> Any:
    """Makes the call and prints the result; an error is printed with its class, its builtins, message and
    hint.
    """
    try:
        done = action()
    except Exception as wrong:
        names = [each.__name__ for each in type(wrong).__mro__]
        say(
            step,
            error=names[0],
            also=names,
            message=getattr(wrong, "message", str(wrong)),
            hint=getattr(wrong, "hint", ""),
        )
        return None
    say(step, error=None)
    return done


def left() -> list[str]:
    return sorted(name for name in os.listdir(MOUNT) if name.startswith("shmbridge."))


def start_all(bridge: str, lane_bytes: str = "1M") -> None:
    """Everything that can be started, one after the other, and what is left after each failed."""
    model = [("w", np.zeros(1 << 18, np.float32))]
    for step, action in {
        "producer": lambda: Producer(bridge, lane_bytes=lane_bytes).close(),
        "consumer": lambda: Consumer(bridge).close(),
        "weights": lambda: WeightsWriter(bridge).close(),
        "publish": lambda: WeightsWriter(bridge).publish(1, model),
        "list": list_bridges,
        "clean": lambda: clean(bridge, dry_run=False),
    }.items():
        attempt(step, action)
        say(f"left by {step}", names=left() if os.path.isdir(MOUNT) else [])


def lanes_until_full(bridge: str, lane_bytes: str, most: str) -> None:
    """Opens producers until it fails, then uses those there are with a consumer."""
    producers = []
    while len(producers) < int(most) and (
        made := attempt("producer", lambda: Producer(bridge, lane_bytes=lane_bytes))
    ):
        producers.append(made)
    say("opened", count=len(producers), lanes=sum(".l." in name for name in left()))
    consumer = attempt("consumer", lambda: Consumer(bridge))
    for number, producer in enumerate(producers):
        producer.put({"tokens": [np.arange(100_000) + number]}, timeout_s=5)
    batch = next(iter(consumer.batches(groups=len(producers), prefetch=0)))
    say(
        "batch",
        tokens=len(batch.tokens),
        first=sorted(batch.tokens[np.flatnonzero(batch.position_ids == 0)].tolist()),
    )
    batch.release()
    consumer.close()
    for producer in producers:
        producer.close()
    say("end", names=left())


def in_fork(role: Callable[..., None], *arguments: str) -> None:
    """Makes the call in a forked child, which has everything imported; prints how it ended."""
    child = os.fork()
    if child == 0:
        try:
            role(*arguments)
            os._exit(0)
        finally:
            os._exit(1)
    say("ended", status=os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), of=arguments)


def fill(bridge: str, *spares: str) -> None:
    """Fills the mount but for so many bytes, then starts everything; for each of the numbers."""
    for spare in spares:
        mount = os.statvfs(MOUNT)
        with open(f"{MOUNT}/filler", "wb") as file:
            os.posix_fallocate(file.fileno(), 0, mount.f_bavail * mount.f_frsize - int(spare))
        in_fork(start_all, bridge, "1M")
        os.unlink(f"{MOUNT}/filler")


def in_cgroup(bridge: str, folder: str, lane_bytes: str) -> None:
    """Enters a memory cgroup, then opens lanes of a size until it cannot."""
    with open(f"{folder}/cgroup.procs", "w") as procs:
        procs.write(str(os.getpid()))
    producers = []
    while len(producers) < 100 and (
        made := attempt("producer", lambda: Producer(bridge, lane_bytes=lane_bytes))
    ):
        producers.append(made)
    say("opened", count=len(producers), lanes=sum(f".{bridge}.l." in name for name in left()))
    for producer in producers:
        producer.put({"tokens": [np.arange(100_000)]})
        producer.close()
    clean(bridge, dry_run=False)


def start_together(bridge: str, folder: str, lane_bytes: str, count: str) -> None:
    """Producers that all start in the same instant, in a memory cgroup; how each ended."""
    go, tell = os.pipe()
    opened, say_opened = os.pipe()
    end, say_end = os.pipe()
    children = []
    for _ in range(int(count)):
        children.append(os.fork())
        if children[-1] == 0:
            os.close(tell)
            os.close(say_end)
            with open(f"{folder}/cgroup.procs", "w") as procs:
                procs.write(str(os.getpid()))
            os.read(go, 1)
            try:
                made = Producer(bridge, lane_bytes=lane_bytes)
            except shmbridge.ShmTooSmall:
                os._exit(3)
            os.write(say_opened, b"x")
            os.read(end, 1)  # until all have tried
            made.close()
            os._exit(0)
    os.set_blocking(opened, False)
    os.close(tell)
    count_opened = 0
    while count_opened + sum(map(has_ended, children)) < len(children):
        with suppress(BlockingIOError):
            count_opened += len(os.read(opened, 100))
        time.sleep(0.005)
    os.close(say_end)
    say("ended", statuses=[os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children])


def has_ended(child: int) -> bool:
    return os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def few_threads(bridge: str, folder: str) -> None:
    """A consumer in a pids cgroup."""
    with open(f"{folder}/cgroup.procs", "w") as procs:
        procs.write(str(os.getpid()))
    consumer = attempt("consumer", lambda: Consumer(bridge))
    if consumer is not None:
        consumer.close()
    say("end", names=[name for name in left() if f".{bridge}." in name])


def limited(bridge: str, what: str, *limits: str) -> None:
    """Lowers a limit of a process that starts everything; for each of the numbers."""
    for limit in limits:
        in_fork(_limited, bridge, what, limit)


def _limited(bridge: str, what: str, limit: str) -> None:
    """Lowers a limit of this process; address space counts from what is used now."""
    number = getattr(resource, f"RLIMIT_{what}")
    soft = int(limit)
    if what == "AS":
        with open("/proc/self/statm") as statm:
            soft += int(statm.read().split()[0]) * resource.getpagesize()
    model = [("w", np.zeros(1 << 16, np.float32))]
    hard = resource.getrlimit(number)[1]
    resource.setrlimit(number, (soft, hard))
    # the hard limit too is treated as that low: it could not be raised again here
    limits.descriptors_at_most = lambda: soft
    producer = attempt("producer", lambda: Producer(bridge, lane_bytes="8M"))
    if producer is not None:
        attempt("put", partial(producer.put, {"tokens": [[1, 2, 3]]}, timeout_s=5))
    consumer = attempt("consumer", lambda: Consumer(bridge))
    if consumer is not None and producer is not None:
        attempt("get", lambda taker=consumer: taker.get(5).release())
    writer = attempt("weights", lambda: WeightsWriter(bridge))
    if writer is not None:
        attempt("publish", partial(writer.publish, 1, model))
    resource.setrlimit(number, (hard, hard))
    for each in (writer, producer, consumer):
        if each is not None:
            each.close()
    del each, writer, producer, consumer
    with Consumer(bridge) as last:  # what was put, and could not be taken under the limit
        for record in last.poll():
            record.release()
            del record
    say("end", names=[name for name in left() if f".{bridge}." in name])


def consume_with_few_descriptors(bridge: str, spare: str) -> None:
    """A consumer with lanes; then all descriptors but `spare` are taken, and given back when told."""
    consumer = Consumer(bridge)
    record = consumer.get(10)
    say("got", value=int(record["tokens"].values[0]))
    record.release()
    del record
    taken = []
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    try:
        while True:
            taken.append(os.open("/", os.O_PATH))
    except OSError:
        for _ in range(int(spare)):
            os.close(taken.pop())
    say("short")
    for line in sys.stdin:
        if line == "free\n":
            while taken:
                os.close(taken.pop())
        elif line == "state\n":
            say(
                "state",
                lanes=len(consumer._lanes),
                waits=consumer._lanes.some_wait,
                live=consumer.stats()["lanes_live"],
            )
        else:
            record = attempt("get", lambda: consumer.get(10))
            if record is not None:
                say("got", value=int(record["tokens"].values[0]))
                record.release()
            del record
    consumer.close()


def produce(bridge: str, number: str, count: str = "1") -> None:
    """Puts `count` records, says so, and waits to be told or killed."""
    producer = Producer(bridge, producer_id=f"p{number}", lane_bytes="64K")
    for sequence in range(int(count)):
        producer.put({"tokens": [[int(number), sequence]]})
    say("put", pid=os.getpid())
    for line in sys.stdin:
        producer.put({"tokens": [[int(number), int(line)]]})
        say("put")


def read_share(bridge: str) -> None:
    """Is rank 0 of one: says the tokens of one record, or why it may not."""
    try:
        with shmbridge.Rank(bridge, 0, 1) as rank, rank.next_share(timeout_s=20) as share:
            (record,) = share.records
            say("read", error=None, tokens=record["tokens"].values.tolist())
            del record
    except shmbridge.ShmBridgeError as wrong:
        say("read", error=type(wrong).__name__, message=wrong.message, hint=wrong.hint)


def storm(bridge: str, count: str, lane_bytes: str = "64K") -> int:
    """Producers one after the other, by fork: each puts one record and dies by SIGKILL, until all have or
    there is no room.
    """
    statuses = []
    for number in range(int(count)):
        child = os.fork()
        if child == 0:
            try:
                Producer(bridge, producer_id=f"p{number}", lane_bytes=lane_bytes).put({"tokens": [[number]]})
            except shmbridge.ShmTooSmall as full:
                say("full", number=number, message=full.message, hint=full.hint)
                os._exit(3)
            os.kill(os.getpid(), 9)
        statuses.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        if statuses[-1] != -9:
            break
    say("storm", died=statuses.count(-9), lanes=sum(f".{bridge}.l." in name for name in left()))
    return statuses.count(-9)


def storm_then_consume(bridge: str, lane_bytes: str) -> None:
    """A storm without a consumer fills the mount; then one comes."""
    died, numbers = storm(bridge, "500", lane_bytes), []
    with Consumer(bridge, lanes=8) as consumer:
        for _ in range(died):
            with consumer.get(10) as record:
                numbers.append(int(record["tokens"].values[0]))
                del record
    say("found", numbers=sorted(numbers))
    again = attempt("producer", lambda: Producer(bridge, lane_bytes=lane_bytes))
    again.close()
    say("end", names=left())


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
