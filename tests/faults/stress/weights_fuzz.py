"""Kill fuzz of the weights: a writer, ranks that write parts of its versions, and readers, killed and stopped
at random moments.

    python tests/faults/stress/weights_fuzz.py --seconds 600 --seed 1

The tensors of a version follow from its number, so that every reader can tell a torn, mixed or half-written
one. Prints one JSON object; exit status 1 if anything was wrong. The schedule of who is killed comes from the
seed; where the victim is by then does not.
"""

import argparse
import contextlib
import json
import mmap
import os
import random
import select
import signal
import sys
import time
from collections.abc import Callable

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # one thread, or it could not fork

import numpy as np

import shmbridge
from shmbridge.segments import control_name, stands_there, weights_name
from shmbridge.weights import WeightsLease, WeightsPart, WeightsReader, WeightsWriter

SHAPES = {"large": (300, 1000), "wide": (4, 50_000), "vector": (999,), "small": (2, 3), "scalar": ()}
SPECS = [(name, "int64", shape) for name, shape in SHAPES.items()]
RANKS = 2
COUNTERS = [
    "published",
    "changed_only",
    "filled",
    "refused",
    "abandoned",
    "busy",
    "parts",
    "late_parts",
    "leases",
    "copies",
]


class Counters:
    """Shared by all processes; each is added to by one role, so that at most what a kill interrupts is
    lost.
    """

    def __init__(self) -> None:
        self._memory = np.frombuffer(mmap.mmap(-1, 4096), np.int64)

    def add(self, name: str) -> None:
        self._memory[COUNTERS.index(name)] += 1

    def all(self) -> dict[str, int]:
        return dict(zip(COUNTERS, self._memory.tolist(), strict=False))


def given_by(version: int) -> tuple[str, set[str]]:
    """How a version is written, and which tensors it gives."""
    rng = random.Random(version)
    how = rng.choice(["whole", "changed", "changed", "fill", "fill"])
    return how, set(rng.sample(sorted(SHAPES), rng.randrange(len(SHAPES) + 1))) if how == "changed" else set(
        SHAPES
    )


def check(version: int, tensors: dict[str, np.ndarray]) -> dict[str, int]:
    """Returns the value of each tensor; each must have one value, of a version that gave it, and none of an
    incomplete version.
    """
    values = {}
    for name, tensor in tensors.items():
        values[name] = int(tensor.flat[0])
        assert (tensor == values[name]).all(), f"version {version}: {name} is torn: {np.unique(tensor)}"
        assert values[name] <= version, f"version {version}: {name} says {values[name]}"
        assert name in given_by(values[name])[1], (
            f"version {version}: {name} says {values[name]}, which did not give it"
        )
    for said in {*values.values(), version}:
        for name in given_by(said)[1]:
            assert values[name] >= said, f"version {version}: {name} says {values[name]}, and {said} gave it"
    return values


def write(bridge: str, tickets: list[int], acks: int, counters: Counters) -> None:
    rng = random.Random()
    with WeightsWriter(bridge) as writer:
        version = -1 if writer.last_version is None else writer.last_version
        while True:
            version += 1
            how, names = given_by(version)
            values = [
                (name, np.full(SHAPES[name], version)) for name in sorted(names, key=lambda _: rng.random())
            ]
            try:
                if how == "fill":
                    fill(writer, version, tickets, acks, rng.random() < 0.1)
                    counters.add("filled")
                elif how == "changed" and writer.last_version is None:
                    continue
                else:
                    writer.publish(version, values, changed_only=how == "changed", timeout_s=0.2)
                    counters.add("changed_only" if how == "changed" else "published")
            except shmbridge.WeightsMismatch:
                counters.add("refused")
            except shmbridge.WeightsBusy:
                counters.add("busy")
                version -= 1  # a version that was not begun, or not committed, may come again
            except InterruptedError:
                counters.add("abandoned")


def fill(writer: WeightsWriter, version: int, tickets: list[int], acks: int, abandon: bool) -> None:
    while select.select([acks], [], [], 0)[0]:
        os.read(acks, 4096)
    with writer.fill(version, SPECS, timeout_s=0.2) as filling:
        for each in tickets:
            with contextlib.suppress(BlockingIOError):  # a rank that has been stopped for long
                os.write(each, json.dumps(filling.ticket).encode() + b"\n")
        for name in ("vector", "small", "scalar"):
            filling.write(name, np.full(SHAPES[name], version))
        if abandon:
            raise InterruptedError
        heard, deadline = 0, time.monotonic() + 0.2
        while heard < RANKS and select.select([acks], [], [], max(deadline - time.monotonic(), 0))[0]:
            heard += os.read(acks, 4096).split().count(str(version).encode())


def write_parts(bridge: str, rank: int, tickets: int, acks: int, counters: Counters) -> None:
    """Half of the rows of one tensor, half of the columns of the other."""
    with WeightsPart(bridge) as part:
        while True:
            for line in os.read(tickets, 65536).splitlines():
                try:
                    ticket = json.loads(line)
                    version = ticket["version"]
                    rows, columns = SHAPES["large"][0] // RANKS, SHAPES["wide"][1] // RANKS
                    index = (slice(rank * rows, (rank + 1) * rows),)
                    part.write(ticket, "large", np.full((rows, 1000), version), index)
                    index = (slice(None), slice(rank * columns, (rank + 1) * columns))
                    part.write(ticket, "wide", np.full((4, columns), version), index)
                    os.write(acks, f"{version}\n".encode())
                    counters.add("parts")
                except shmbridge.FillingOver:
                    counters.add("late_parts")
                except json.JSONDecodeError:
                    pass  # the rest of a line whose first part a dead rank has read


def lease(bridge: str, counters: Counters) -> None:
    before: tuple[int, dict[str, int]] | None = None
    with WeightsReader(bridge) as reader:
        while True:
            try:
                reader.wait(before[0] if before else None, timeout_s=0.5)
                with reader.lease(timeout_s=0.5) as held:
                    assert before is None or held.version > before[0], f"{held.version} came after {before}"
                    before = held.version, look(held, before)
                    counters.add("leases")
            except shmbridge.NotReady:
                pass


def look(held: WeightsLease, before: tuple[int, dict[str, int]] | None) -> dict[str, int]:
    values = check(held.version, dict(held.tensors))
    if before is not None:
        version, old = before
        changed = held.changed_since(version)
        expected = {name for name, value in values.items() if value > version}
        assert changed == expected, f"since {version}, version {held.version}: {sorted(changed)} of {values}"
        assert all(values[name] == old[name] for name in SHAPES if name not in changed), (
            f"{old} became {values}, changed {sorted(changed)}"
        )
    return values


def copy(bridge: str, counters: Counters) -> None:
    into = None
    version = -1
    with WeightsReader(bridge) as reader:
        while True:
            try:
                reader.wait(version if into else None, timeout_s=0.5)
                last = version
                version, into = reader.copy(into, timeout_s=0.5)
                assert version > last, f"{version} came after {last}"
                check(version, into)
                counters.add("copies")
            except shmbridge.NotReady:
                pass


class Director:
    """Starts all roles as forks of itself, kills and stops them at random, and starts them again."""

    def __init__(self, bridge: str, seed: int) -> None:
        self._rng = random.Random(seed)
        self.counters = Counters()
        pipes = [os.pipe() for _ in range(RANKS)]
        acks = os.pipe()
        for _, end in pipes:
            os.set_blocking(end, False)
        os.set_blocking(acks[1], False)
        self._roles: dict[str, Callable[[], None]] = {
            "writer": lambda: write(bridge, [end for _, end in pipes], acks[0], self.counters),
            "lease": lambda: lease(bridge, self.counters),
            "copy": lambda: copy(bridge, self.counters),
        }
        for rank in range(RANKS):
            self._roles[f"rank {rank}"] = lambda rank=rank: write_parts(
                bridge, rank, pipes[rank][0], acks[1], self.counters
            )
        self.pids: dict[str, int] = {}
        self.kills = dict.fromkeys(self._roles, 0)
        self.wrong: list[str] = []

    def start(self, role: str) -> None:
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
                self._roles[role]()
            except BaseException as error:
                print(f"{role}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
            finally:
                os._exit(status)
        self.pids[role] = pid

    def kill(self, role: str) -> None:
        pid = self.pids.pop(role)
        os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
        self.kills[role] += 1
        if not os.WIFSIGNALED(status):
            self.wrong.append(f"{role} had ended by itself")

    def run(self, seconds: float) -> None:
        for role in self._roles:
            self.start(role)
        end = time.monotonic() + seconds
        while time.monotonic() < end and not self.wrong:
            time.sleep(self._rng.choice([0.001, 0.005, 0.02, 0.05]) * self._rng.random() * 2)
            role = self._rng.choice(["writer", "writer", *self._roles])
            if self._rng.random() < 0.3:
                os.kill(self.pids[role], signal.SIGSTOP)
                time.sleep(self._rng.random() * 0.05)
                if self._rng.random() < 0.5:
                    os.kill(self.pids[role], signal.SIGCONT)
                    continue
            self.kill(role)
            self.start(role)
        for role in list(self.pids):
            self.kill(role)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=60.0, help="how long (default 60)")
    parser.add_argument("--seed", type=int, default=1, help="of the schedule (default 1)")
    wanted = parser.parse_args()
    bridge = f"weights-fuzz-{os.getpid()}"
    with WeightsReader(bridge) as reader:  # the bridge outlives its others
        director = Director(bridge, wanted.seed)
        director.run(wanted.seconds)
        began = time.monotonic()
        with WeightsWriter(bridge) as writer:
            version = 1 + max(writer.last_version or 0, 0)
            writer.publish(
                version, [(name, np.full(shape, version)) for name, shape in SHAPES.items()], timeout_s=5
            )
            with reader.lease() as held:
                assert {int(np.unique(tensor)[0]) for tensor in held.tensors.values()} == {version}
        if time.monotonic() - began > 5:
            director.wrong.append("the last writer waited for the dead")
    left = [name for name in (control_name(bridge), weights_name(bridge)) if stands_there(name)]
    director.wrong += [f"{name} is left" for name in left]
    shmbridge.clean(bridge, dry_run=False)
    print(
        json.dumps(
            {"seed": wanted.seed, "wrong": director.wrong, "kills": director.kills, **director.counters.all()}
        ),
        flush=True,
    )
    return 1 if director.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
