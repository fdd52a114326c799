"""Rank fuzz: producers, a hub that serves two ranks, and the ranks, killed and stopped at random moments, in
every pair of modes.

    python tests/faults/stress/ranks_fuzz.py --seconds 600 --seed 1

A record must have been given back by a rank that had seen it (in broadcast with "wait": by both), or come to
the consumer that takes the rest. Prints one JSON object; exit status 1 if anything was lost, torn, doubled
without a mark or out of order (but for what moved from a dead rank). The schedule of who is killed comes from
the seed; where the victim is by then does not.
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
from fuzz.ledger import Order, ProducerWords
from fuzz.pattern import Pattern
from fuzz.rank_role import MOVED, PAIRS, WORLD, Modes, read, serve
from fuzz.scene import Place, Scene, new_bridge
from fuzz.word_referee import WordReferee

_IMPORTED_BEFORE_FORK = (
    "shmbridge.producer",
    "shmbridge.hub.rank",
    "shmbridge.hub.ranks",
    "shmbridge.control.server",
    "shmbridge.batch",
)
_ROUND_S = 5.0
_HZ = {"rank": 2.5, "producer": 1.0, "hub": 0.4, "stop": 1.5}


def note_moved(place: Place) -> bool:
    """Notes how many shares not issued to a dead rank come unmarked, after later shares of its heir. Returns
    False: the child had not said that it would end.
    """
    assert place.log is not None
    place.may_fall = place.log.words[MOVED]
    return False


class Round:
    """One pair of modes on one bridge."""

    def __init__(self, scene: Scene, modes: Modes, choices: random.Random, producers: int) -> None:
        self._scene, self._choices = scene, choices
        self.producers = scene.add_producers(producers)
        groups, prefetch = choices.choice((2, 3, 4)), choices.choice((0, 1, 2, 2))
        self.hub = scene.add(
            "hub",
            lambda _, log: lambda: serve(scene.bridge, modes, groups, prefetch, log),
            delays_s=(0.0, 0.05, 0.2),
        )
        self.ranks = [
            # The hub looks for the dead five times a second.
            scene.add(f"rank {rank}", self._reader(rank), rank, delays_s=(0.0, 0.05, 0.3, 0.6, 0.9))
            for rank in range(WORLD)
        ]
        if modes.dead_rank == "spread":
            for place in self.ranks:
                place.before_end = note_moved

    def _reader(self, rank: int):
        def role(place: Place, log):
            life = place.life
            return lambda: read(self._scene.bridge, rank, life, log, self._scene.pattern)

        return role

    def play(self, seconds: float) -> None:
        for kind, rate_hz in _HZ.items():
            at_s = self._choices.expovariate(rate_hz)
            while at_s < seconds:
                self._scene.after(at_s, lambda kind=kind: self._harm(kind))
                at_s += self._choices.expovariate(rate_hz)
        self._scene.pump(seconds, choose=self._choices.choice)

    def _harm(self, kind: str) -> None:
        places = {"rank": self.ranks, "producer": self.producers, "hub": [self.hub]}.get(
            kind, [*self.ranks, self.hub, *self.producers]
        )
        place = self._choices.choice(places)
        if (child := place.child) is None:
            return
        if kind != "stop":
            child.kill()
            return
        child.stop()
        ends = child.kill if self._choices.random() < 0.2 else child.go_on
        self._scene.after(min(self._choices.expovariate(8.0), 1.0), ends)

    def end(self) -> None:
        """Producers close, the ranks read until the hub has no more for them, and the rest is taken by one
        consumer.
        """
        scene = self._scene
        scene.pump(1.2)  # stops and kills that are under way
        for place in scene.places:
            if place.child is not None:
                place.child.go_on()
        scene.end_producers(self.producers)
        for place in (self.hub, *self.ranks):
            place.delays_s = (0.0,)
        scene.wait(
            "hub and ranks are there",
            lambda: all(place.child is not None for place in (self.hub, *self.ranks)),
        )
        scene.ending = True
        assert self.hub.log is not None
        self.hub.log.order(Order.QUIT)
        scene.end()

    def kills(self) -> Counter[str]:
        return Counter(
            producer_kills=sum(place.kills for place in self.producers),
            hub_kills=self.hub.kills,
            rank_kills=sum(place.kills for place in self.ranks),
        )


def run(seed: int, seconds: float, producers: int, plant: bool) -> dict[str, object]:
    words, incarnations, crew = ProducerWords(), itertools.count(), Crew()
    totals: Counter[str] = Counter()
    by_pair: dict[str, Counter[str]] = {str(modes): Counter() for modes in PAIRS}
    told: list[str] = []
    began, violations = time.monotonic(), 0
    rounds = max(len(PAIRS), round(seconds / (_ROUND_S + 1.5)) // len(PAIRS) * len(PAIRS))
    for number in range(rounds):
        modes = PAIRS[number % len(PAIRS)]
        choices = random.Random(f"{seed}/{number}")
        everybody = frozenset(range(WORLD)) if modes == Modes("broadcast", "wait") else frozenset()
        referee = WordReferee(words, everybody, apart=modes.mode == "broadcast")
        scene = Scene(
            crew, new_bridge("rank-fuzz", seed, number), words, incarnations, Pattern(seed + number), referee
        )
        scene.plant_lost = plant
        one = Round(scene, modes, choices, producers)
        try:
            one.play(max(seconds / rounds - 1.5, 1.0))
            one.end()
        except (TimeoutError, RuntimeError) as stuck:
            referee.fault("failed", f"{modes}: {stuck}")
        finally:
            scene.sweep()
        by_pair[str(modes)].update(referee.counts + one.kills())
        totals.update(referee.counts + one.kills())
        violations += referee.violations
        for line in referee.told:
            print(f"{modes}, round {number}: {line}", flush=True)
            told.append(line)
    return {
        "seed": seed,
        "seconds": round(time.monotonic() - began, 1),
        "violations": violations,
        "counts": dict(sorted(totals.items())),
        "pairs": {pair: dict(sorted(counts.items())) for pair, counts in by_pair.items()},
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=60.0, help="how long (default 60)")
    parser.add_argument("--seed", type=int, default=None, help="default: a random one, which is printed")
    parser.add_argument("--producers", type=int, default=3)
    parser.add_argument(
        "--plant", action="store_true", help="release two records without a count: that must be found"
    )
    wanted = parser.parse_args()
    seed = int.from_bytes(os.urandom(3)) if wanted.seed is None else wanted.seed
    logging.basicConfig(level=logging.ERROR, format="%(process)d %(name)s: %(message)s")
    # it says that it waits, which this fuzz makes it do
    logging.getLogger("shmbridge.producer").setLevel(logging.CRITICAL)
    for name in _IMPORTED_BEFORE_FORK:
        importlib.import_module(name)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    tally = run(seed, wanted.seconds, wanted.producers, wanted.plant)
    print(json.dumps(tally), flush=True)
    return 1 if tally["violations"] else 0


if __name__ == "__main__":
    sys.exit(main())
