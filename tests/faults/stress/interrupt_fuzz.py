"""Interrupt fuzz: a handler raises at random instants in a consumer that reads in every way there is, and in
producers.

    python tests/faults/stress/interrupt_fuzz.py --seconds 600 --seed 1

A record must be seen by the body of the reader's loop and released explicitly, or come again: to the same
consumer, to the next, or to the one that takes the rest. Under hold="gather" each interrupt may cost one
batch: so would SIGKILL. The consumers end by close(), by exceptions, by SIGKILL, and by handlers that close
them. Prints one JSON object; exit status 1 if anything was lost, doubled without a mark or out of order.
"""

import argparse
import importlib
import itertools
import json
import logging
import os
import random
import signal
import sys
import time
from collections import Counter

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # one thread, or it could not fork

from fuzz.crew import Crew
from fuzz.interrupt_role import (
    ENDED_BY_ITSELF,
    GROUPS,
    RAISED,
    WAYS,
    consume,
    consume_calmly,
    produce_interrupted,
)
from fuzz.ledger import ConsumerLog, Order, ProducerWords
from fuzz.pattern import Pattern
from fuzz.scene import Place, Scene, new_bridge
from fuzz.word_referee import WordReferee

_IMPORTED_BEFORE_FORK = (
    "shmbridge.producer",
    "shmbridge.consumer",
    "shmbridge.control.server",
    "shmbridge.batch",
    "concurrent.futures.thread",
)
_ROUND_S = 3.0
_LONGEST_LIFE_S = 12.0
_PRODUCERS = "producers"


def play(scene: Scene, way: str, seconds: float, plant: str) -> Counter[str]:
    """One way of reading on one bridge."""
    counts: Counter[str] = Counter()
    if way == _PRODUCERS:
        producers = scene.add_producers(2, produce_interrupted)
        reader = scene.add(way, lambda _, log: lambda: consume_calmly(scene.bridge, log, scene.pattern), 0)
    else:
        producers = scene.add_producers(2)

        def role(place: Place, log: ConsumerLog):
            life = place.life
            return lambda: consume(scene.bridge, way, life, log, scene.pattern, plant == "silent")

        reader = scene.add(way, role, 0)

    def note_end(place: Place) -> bool:
        """Whether the child had said that it would kill itself."""
        assert place.log is not None
        counts["interrupts"] += place.log.words[RAISED]
        # unread records come again once destroyed, even late
        place.may_fall = place.log.words[RAISED]
        counts["lives"] += 1
        return place.log.words[ConsumerLog.STEP] == ENDED_BY_ITSELF

    reader.before_end, reader.longest_s = note_end, _LONGEST_LIFE_S
    scene.plant_lost = plant == "lost"
    scene.pump(seconds)
    scene.end_producers(producers)
    reader.over = True
    if way == _PRODUCERS and reader.log is not None:
        reader.log.order(Order.QUIT)
    scene.wait("the last reader ends", lambda: reader.child is None)
    scene.end(may_miss=GROUPS * counts["interrupts"] if "gather" in way else 0)
    return counts


def run(seed: int, seconds: float, ways: tuple[str, ...], plant: str) -> dict[str, object]:
    words, incarnations, crew = ProducerWords(), itertools.count(), Crew()
    totals: Counter[str] = Counter()
    by_way: dict[str, Counter[str]] = {way: Counter() for way in ways}
    began, violations = time.monotonic(), 0
    rounds = max(len(ways), round(seconds / _ROUND_S) // len(ways) * len(ways))
    for number in range(rounds):
        way = ways[number % len(ways)]
        referee = WordReferee(words)
        scene = Scene(
            crew,
            new_bridge("interrupt-fuzz", seed, number),
            words,
            incarnations,
            Pattern(seed + number),
            referee,
        )
        counts: Counter[str] = Counter()
        try:
            counts = play(scene, way, max(seconds / rounds - 0.7, 0.6), plant)
        except (TimeoutError, RuntimeError) as stuck:
            referee.fault("failed", str(stuck))
        finally:
            scene.sweep()
        by_way[way].update(referee.counts + counts)
        totals.update(referee.counts + counts)
        violations += referee.violations
        for line in referee.told:
            print(f"{way}, round {number}: {line}", flush=True)
    return {
        "seed": seed,
        "seconds": round(time.monotonic() - began, 1),
        "violations": violations,
        "counts": dict(sorted(totals.items())),
        "ways": {way: dict(sorted(counts.items())) for way, counts in by_way.items()},
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=60.0, help="how long (default 60)")
    parser.add_argument("--seed", type=int, default=None, help="default: a random one, which is printed")
    parser.add_argument(
        "--ways", nargs="*", default=[*WAYS, _PRODUCERS], help=f"of {', '.join(WAYS)} and {_PRODUCERS}"
    )
    parser.add_argument(
        "--plant",
        choices=("", "silent", "lost"),
        default="",
        help="an error that must be found; silent: a record in a thousand is released without a word; lost: "
        "two without a count",
    )
    wanted = parser.parse_args()
    seed = int.from_bytes(os.urandom(3)) if wanted.seed is None else wanted.seed
    logging.basicConfig(level=logging.CRITICAL, format="%(process)d %(name)s: %(message)s")
    for name in _IMPORTED_BEFORE_FORK:
        importlib.import_module(name)
    random.seed(seed)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    tally = run(seed, wanted.seconds, tuple(wanted.ways), wanted.plant)
    print(json.dumps(tally), flush=True)
    return 1 if tally["violations"] else 0


if __name__ == "__main__":
    sys.exit(main())
