"""Step fuzz: producers, consumers, observers and both ends of the weights are stopped between any two system
calls while others go on, and some are killed there.

    python tests/faults/stress/step_fuzz.py --seconds 600 --seed 1
    python tests/faults/stress/step_fuzz.py --births 10000
    python tests/faults/stress/step_fuzz.py --scene birth --turns "one:fallocate*3 observer:mmap one:"

A play is one scene on its own bridge. Its first turns follow from the seed and the number of the play, and
stop actors somewhere; then all come to their ends. Prints one JSON object. Exit status 1 if a good lane was
refused or could not be read, a record was lost or came twice without a mark, a version of the weights went
back, anything was left behind, or anybody hung. What went wrong is printed with all turns of the play, which
--turns plays again.
"""

import argparse
import contextlib
import functools
import json
import logging
import os
import random
import secrets
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from mmap import mmap
from typing import TypeVar

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # one thread, or it could not fork

import numpy as np
import numpy.ma  # np.unique would, in each actor
from stepping import Notes, Stage, Stuck, Turn, turns_of

import shmbridge
import shmbridge.consumer
import shmbridge.control.server
import shmbridge.producer
from shmbridge import sizing
from shmbridge._ext import header
from shmbridge.segments import (
    MOUNT,
    lane_info,
    lane_names,
    locks,
    memory_headroom,
    read_values_head,
    release_values,
    segment,
    sweep_bridge,
    value_names,
    weights_name,
    write_values,
)
from shmbridge.testing.fixtures import segments_of
from shmbridge.watch import snapshot
from shmbridge.watch.observer import Observer
from shmbridge.weights import WeightsReader, WeightsWriter

LIMIT_S = 60.0  # of one play
LANE_BYTES = 64 << 10
LANE_SIZE = header.lane_geometry(LANE_BYTES, sizing.slots_of(LANE_BYTES))[-1]
STEP_BYTES = 24 << 10  # of a reservation: a small lane grows in as many steps as a large one
STEPS = -(-LANE_SIZE // STEP_BYTES)
BIRTHS = 24  # of one play of the scene "births"
# Most turns end before one of these: who stops there has begun what another one may look at, or looks at it.
BEGUN = ["fallocate", "fallocate", "mmap", "futex", "fcntl", "openat", "unlink", "close"]
LOOKS = ["mmap", "mmap", "mmap", "fcntl", "fcntl", "openat", "newfstatat", "getdents64", "unlink", "futex"]
MARK = "sched_yield"  # between two lives of a role
End = TypeVar("End")


class Setting:
    """What all actors of a play know. `over`: those who give have ended, so that nothing more comes."""

    def __init__(self, bridge: str) -> None:
        self.bridge = bridge
        self._over = mmap(-1, 1)

    @property
    def over(self) -> bool:
        return self._over[0] == 1

    def end(self) -> None:
        self._over[0] = 1


Role = Callable[[Setting, Callable[[], None], Notes], None]


# -- roles


def put(
    setting: Setting, begin: Callable[[], None], notes: Notes, *, lives: int = 1, records: int = 2
) -> None:
    """Producers, one after the other."""
    begin()
    for life in range(lives):
        with shmbridge.Producer(setting.bridge, lane_bytes=LANE_BYTES) as producer:
            for number in range(records):
                name = f"{os.getpid()}.{life}.{number}"
                group = {"tokens": [[1, 2, 3]], "loss_mask": [[0, 1, 1]], "scores": [1.0]}
                producer.put(group, group_id=name, timeout_s=LIMIT_S)
                notes.add("put", name)
        os.sched_yield()


def pass_by(setting: Setting, begin: Callable[[], None], notes: Notes) -> None:
    """Producers that put nothing: they come, and sweep, and go."""
    put(setting, begin, notes, lives=3, records=0)


def take(setting: Setting, begin: Callable[[], None], notes: Notes) -> None:
    """One consumer, which takes and releases all that comes."""
    with shmbridge.Consumer(setting.bridge) as consumer:
        begin()
        last = False
        while not last:
            last = setting.over  # before the look
            _take_some(consumer, notes, timeout_s=0.0 if last else 0.02)


def take_in_turn(setting: Setting, begin: Callable[[], None], notes: Notes) -> None:
    """Consumers, one after the other: each closes when nothing has come for a moment."""
    begin()
    last = False
    while not last:
        last = setting.over
        with _opened(lambda: shmbridge.Consumer(setting.bridge)) as consumer:
            _take_some(consumer, notes, timeout_s=0.0 if last else 0.005)
        os.sched_yield()


def take_the_rest(setting: Setting, begin: Callable[[], None], notes: Notes) -> None:
    """Takes what nobody has taken, not in turns, and releases values whose writer was killed."""
    with shmbridge.Consumer(setting.bridge) as consumer:
        _take_some(consumer, notes, timeout_s=0.0)
    for name in value_names(setting.bridge):
        with contextlib.suppress(shmbridge.RecordUnreadable):  # never committed
            release_values(name, range(2))
    sweep_bridge(setting.bridge)


def _take_some(consumer: shmbridge.Consumer, notes: Notes, *, timeout_s: float) -> None:
    with contextlib.suppress(shmbridge.ConsumerEmpty):
        while True:
            record = consumer.get(timeout_s=timeout_s)
            name = record.meta.group_id
            notes.add("took", name, record.meta.redelivered)
            record.release()
            notes.add("released", name)
    stats = consumer.stats()
    if stats["lanes_refused"] or stats["lanes_quarantined"]:
        notes.add("refused", consumer._lanes.refused_lanes())


def _opened(open_end: Callable[[], End]) -> End:
    """Opens an end once its place is free."""
    while True:
        with contextlib.suppress(shmbridge.ConsumerTaken):
            return open_end()
        time.sleep(0.002)


def observe(setting: Setting, begin: Callable[[], None], notes: Notes) -> None:
    with Observer(setting.bridge) as observer:
        begin()
        while not setting.over:
            observer.poll()
            observer.wait(0.01)
        notes.add("unreadable", observer.unreadable)


def look(setting: Setting, begin: Callable[[], None], notes: Notes) -> None:
    begin()
    while not setting.over:
        if (seen := snapshot.look(setting.bridge)) is not None:
            notes.add("unreadable", seen.unreadable)
        for name in lane_names(setting.bridge):
            lane_info(name)
        time.sleep(0.01)


def publish(
    setting: Setting, begin: Callable[[], None], notes: Notes, *, size: int = 8000, one_model: bool = False
) -> None:
    """Two writers, one after the other, of a model of this size; `one_model`: nobody has another one."""
    begin()
    for _ in range(2):
        with _opened(lambda: WeightsWriter(setting.bridge)) as writer:
            version = 1 + (-1 if writer.last_version is None else writer.last_version)
            # Another writer may come in between as long as there is no segment to lock.
            with contextlib.suppress(shmbridge.ConsumerTaken, shmbridge.BadArgument):
                writer.publish(version, [("tensor", np.full(size, version))], timeout_s=LIMIT_S)
                notes.add("published", version)
                if one_model:
                    notes.add("segment", os.stat(f"{MOUNT}{weights_name(setting.bridge)}").st_ino)
        os.sched_yield()


def follow(setting: Setting, begin: Callable[[], None], notes: Notes) -> None:
    """Reads versions, and keeps the bridge alive; asks at the end for the last one."""
    version = None
    with WeightsReader(setting.bridge) as reader:
        begin()
        while not setting.over:
            with contextlib.suppress(shmbridge.NotReady):
                reader.wait(version, timeout_s=0.02)
                version, tensors = reader.copy(timeout_s=0.1)
                notes.add("read", version, np.unique(tensors["tensor"]).tolist())
        with _opened(lambda: WeightsWriter(setting.bridge)) as writer:
            notes.add("last", writer.last_version)


def store(setting: Setting, begin: Callable[[], None], notes: Notes) -> None:
    """Stores values, finds them again, and releases them row by row."""
    begin()
    for _ in range(2):
        name = write_values(setting.bridge, np.arange(2), b"table", [(0, [bytes(2 * STEP_BYTES)])])
        for row in range(2):
            if (found := read_values_head(name)) is None or found.table != b"table":
                notes.add("lost", f"values {name} before row {row} was released")
            release_values(name, [row])
        os.sched_yield()


# -- scenes


def drawn(scene: "Scene", stage: Stage, rng: random.Random, tally: Counter[str]) -> Iterator[Turn]:
    """Draws the first turns of a play: one actor stops in the middle of something, another one where it
    looks; then the first goes on to its mark, and the other one after it. At most two are killed.
    """

    def somewhere(actor: str, calls: list[str]) -> Turn:
        if rng.random() < 0.05:
            return Turn(actor, others_ms=rng.choice([1, 5, 20]))
        if rng.random() < 0.8:
            return Turn(actor, rng.choice(calls), rng.randint(1, 5))
        return Turn(actor, "", 1 + int(rng.expovariate(1 / 25)))

    kills = 2
    for _ in range(rng.randint(3, 8)):
        one, other = rng.sample(list(scene.roles), 2)
        for turn in (
            somewhere(one, BEGUN),
            somewhere(other, LOOKS),
            Turn(one, MARK, 1),
            Turn(other, MARK, 1),
        ):
            if rng.random() < 0.1:
                continue
            dies = turn.actor in scene.mortal and kills > 0 and rng.random() < 0.05
            kills -= dies
            yield turn._replace(kill=dies)


def births(scene: "Scene", stage: Stage, rng: random.Random, tally: Counter[str]) -> Iterator[Turn]:
    """Stops hub and observer between the size of a lane and their look at it, and the lane's producer while
    it reserves the lane; another producer, born a moment before, has the hub look for lanes now.

    Counts the births, and how often each mapped a lane that was not whole.
    """
    for _ in range(BIRTHS // 2):
        one, other = rng.sample(["one", "two"], 2)
        yield Turn(other, "fallocate", STEPS)
        yield Turn(other, "mmap", 1)
        yield Turn(one, "fallocate", rng.randint(2, STEPS))
        yield Turn(other, MARK, 1)
        for each in rng.sample(["hub", "observer"], 2):
            yield Turn(each, "mmap", 1)
            if not _maps_too_early(stage, each):  # it maps the other one's lane first
                yield Turn(each, "mmap", 1)
            tally[f"{each} mapped too early"] += _maps_too_early(stage, each)
        yield Turn(one, MARK, 1)
        for each in rng.sample(["hub", "observer"], 2):
            yield Turn(each)
        tally["births"] += 2


def _maps_too_early(stage: Stage, name: str) -> bool:
    held = stage.actors[name].held.values()
    return any(call.name == "mmap" and header.control_bytes < call.arguments[1] < LANE_SIZE for call in held)


@dataclass(frozen=True)
class Scene:
    """`givers` bring records, weights or values, and the play is over once they have ended; `mortal` may be
    killed.
    """

    roles: dict[str, Role]
    givers: tuple[str, ...] = ("one", "two")
    mortal: tuple[str, ...] = ()
    turns: Callable[["Scene", Stage, random.Random, Counter[str]], Iterator[Turn]] = drawn


puts = functools.partial(put, lives=3)
SCENES = {
    "birth": Scene({"hub": take, "observer": observe, "one": puts, "two": puts}),
    "births": Scene(
        {
            "hub": take,
            "observer": observe,
            "one": functools.partial(put, lives=BIRTHS // 2, records=1),
            "two": functools.partial(put, lives=BIRTHS // 2, records=1),
        },
        turns=births,
    ),
    "opening": Scene({"hub": take_in_turn, "looker": look, "one": puts, "two": puts}),
    "leaving": Scene({"one": puts, "two": puts, "passer": pass_by, "looker": look}, ("one", "two", "passer")),
    "death": Scene(
        {"hub": take, "observer": observe, "one": puts, "two": puts, "passer": pass_by},
        ("one", "two", "passer"),
        mortal=("one", "two", "passer"),
    ),
    "takeover": Scene(
        {"hub": take_in_turn, "next": take_in_turn, "one": puts, "two": puts, "observer": observe},
        mortal=("hub",),
    ),
    "weights": Scene(
        {"reader": follow, "one": publish, "two": publish, "other": functools.partial(publish, size=9000)},
        ("one", "two", "other"),
        mortal=("one", "two", "other"),
    ),
    "one model": Scene(
        {
            "reader": follow,
            "one": functools.partial(publish, one_model=True),
            "two": functools.partial(publish, one_model=True),
        }
    ),
    "values": Scene(
        {"one": store, "two": store, "passer": pass_by, "looker": look},
        ("one", "two", "passer"),
        mortal=("two",),
    ),
}


def play(
    scene: Scene, number: int, bridge: str, given: list[Turn] | None, rng: random.Random, tally: Counter[str]
) -> tuple[list[str], list[str]]:
    """Plays one scene; returns what went wrong, and the turns in words."""
    setting, stage, wrong = Setting(bridge), Stage(LIMIT_S), []

    def between() -> None:
        if all(stage.actors[name].ended for name in scene.givers):
            setting.end()

    def enter(name: str, role: Role) -> None:
        def body(begin: Callable[[], None], notes: Notes) -> None:
            rng = random.Random(f"{number}/{name}")
            secrets.token_hex = lambda size: rng.randbytes(size).hex()  # names sort alike in each play
            role(setting, begin, notes)

        stage.enter(name, body)

    try:
        for name, role in scene.roles.items():
            enter(name, role)
        for turn in given or scene.turns(scene, stage, rng, tally):
            stage.play(turn)
        stage.finish(between)
        enter("last", take_the_rest)
        stage.finish()
    except Stuck as stuck:
        wrong.append(f"hangs: {stuck}")
    finally:
        stage.kill_all()
        left = segments_of(bridge)
        shmbridge.clean(bridge, dry_run=False)
    wrong += judge(stage, tally)
    wrong += [f"{name} is left" for name in left]
    tally["plays"] += 1
    tally["calls"] += sum(actor.calls for actor in stage.actors.values())
    tally["kills"] += sum(actor.killed for actor in stage.actors.values())
    return wrong, stage.played


def judge(stage: Stage, tally: Counter[str]) -> Iterator[str]:
    """Yields what cannot be, by what the actors noted."""
    said = [(name, *note) for name, actor in stage.actors.items() for note in actor.notes.all()]
    for name, actor in stage.actors.items():
        if actor.status != 0 and not actor.killed:
            yield f"{name} ended with {actor.status}"
    for name, what, *about in said:
        if what in ("failed", "lost"):
            yield f"{name} {what} {about[0]}"
        elif what == "refused":
            yield f"{name} refused {about[0]}"
        elif what == "unreadable" and about[0]:
            yield f"{name} could not read {about[0]}"
    yield from _judge_records(stage, said, tally)
    yield from _judge_weights(said, tally)


def _judge_records(stage: Stage, said: list[tuple], tally: Counter[str]) -> Iterator[str]:
    committed = {note[2] for note in said if note[1] == "put"}
    released = {(note[2], note[0]) for note in said if note[1] == "released"}
    taken: dict[str, list[tuple[str, bool]]] = {}
    for name, what, *about in said:
        if what == "took":
            taken.setdefault(about[0], []).append((name, about[1]))
    tally["records"] += len(committed)
    for record in sorted(committed - taken.keys()):
        yield f"record {record} is lost"
    hub_was_killed = "hub" in stage.actors and stage.actors["hub"].killed
    for record, times in taken.items():
        first, *again = times
        if (first[1] and not hub_was_killed) or any(not marked for _, marked in again):
            yield f"record {record} came as {times}"
        if any((record, name) in released for name, _ in times[:-1]):
            yield f"record {record} came as {times}, although it had been released"


def _judge_weights(said: list[tuple], tally: Counter[str]) -> Iterator[str]:
    read = [note[2] for note in said if note[1] == "read"]
    published = [note[2] for note in said if note[1] == "published"]
    tally["versions"] += len(published)
    if read != sorted(read):
        yield f"versions went back: {read}"
    if len(set(published)) < len(published):
        yield f"versions came again: {published}"
    if len({note[2] for note in said if note[1] == "segment"}) > 1:
        yield "a good segment of weights was replaced"
    for name, what, *about in said:
        if what == "read" and about[1] != [about[0]]:
            yield f"{name} read version {about[0]}, which was {about[1]}"
        elif what == "last" and published and (about[0] is None or about[0] < max(published)):
            yield f"{name} heard of {about[0]} as the last version, {max(published)} was published"


# -- the fuzz


def prepare() -> None:
    """Has small lanes grow in steps, and a stopped producer hold back only those of its play: one that
    reserves has all others of its user wait.
    """
    logging.disable(logging.CRITICAL)  # a producer without a consumer says so
    segment._STEP_BYTES = STEP_BYTES
    segment._TURN_PREFIX = f".shmbridge-turn.step-fuzz-{os.getpid()}."
    # Dozens of calls for each step, none of which has to do with another process.
    locks.memory_headroom = functools.cache(memory_headroom)
    memory_headroom()


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=60.0, help="how long (default 60)")
    parser.add_argument("--seed", type=int, default=1, help="of the turns (default 1)")
    parser.add_argument("--births", type=int, default=0, help="so many births, however long it takes")
    parser.add_argument("--scene", choices=list(SCENES), help="this one only")
    parser.add_argument("--play", type=int, default=0, help="the number of the first play (default 0)")
    parser.add_argument("--turns", type=turns_of, help="one play with these first turns; with --scene")
    wanted = parser.parse_args()
    prepare()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # not without cleaning up
    tally: Counter[str] = Counter()
    wrong: list[str] = []
    played: list[str] = []
    number, end_s = wanted.play, time.monotonic() + wanted.seconds
    scenes = ["births"] if wanted.births else [wanted.scene] if wanted.scene else list(SCENES)
    try:
        while not wrong and (tally["births"] < wanted.births if wanted.births else time.monotonic() < end_s):
            name = scenes[number % len(scenes)]
            rng = random.Random(f"{wanted.seed}/{number}")
            bridge = f"step-fuzz-{os.getpid()}-{number}"
            wrong, played = play(SCENES[name], number, bridge, wanted.turns, rng, tally)
            tally[f"plays of {name}"] += 1
            if wrong:
                again = " ".join(each.split("  ")[0] for each in played)
                print(f'seed {wanted.seed}: --play {number} --scene "{name}" --turns "{again}"')
                print("\n".join([*played, *wrong]))
            number += 1
            if wanted.turns:
                break
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(f"{MOUNT}/{segment._TURN_PREFIX}{os.geteuid()}")
    about = {"played": played} if wanted.turns else {}
    print(json.dumps({"seed": wanted.seed, "wrong": wrong, **tally, **about}), flush=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
