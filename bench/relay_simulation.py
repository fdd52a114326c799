"""Hundreds of nodes on paper: a discrete simulation of relays, with stragglers and failures.

    python -m shmbridge.bench.relay_simulation --nodes 256 --seed 1

The rules are those of shmbridge/relay: a lane on the learner's node for each remote lane, pulls with credits,
acknowledgements with the next pull, at most so many bytes under way. Each node that has nothing has a pull
under way, which waits there for a first record. Nothing here uses Ray or shared memory; times of calls and of
copies are those that test_bench_relay.py measured.
"""

import argparse
import heapq
import json
import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial

MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Setup:
    """One cluster and its load. Times in seconds, sizes in bytes.

    Args:
        nodes, environments: environment nodes, and environments on each.
        group_bytes, group_s: a group, and how long an environment takes for one, in the mean.
        stragglers, slower: share of the nodes that are slow, and how many times.
        source_lane, lane: bytes of a lane on an environment's node and on the learner's.
        parcel, in_flight: most bytes of a parcel, and of all parcels under way.
        round_trip_s, node_bandwidth: of a pull; bytes a second that one node sends.
        parcel_s, put_bandwidth: the destination's work for a parcel, and for its bytes.
        wait_s, most_asks, ask_s: longest wait of a node that has nothing, most asks a second of such nodes,
            and the destination's work for one.
        step_s, step_groups: of the learner.
        max_staleness: steps; a group that began longer ago is dropped.
        node_mtbf_s, relay_mtbf_s, repair_s: mean time between deaths of a node and of a source relay, and
            until a node is back.
        seconds: simulated time.
    """

    nodes: int = 256
    environments: int = 4
    group_bytes: int = 280_000
    group_s: float = 60.0
    stragglers: float = 0.1
    slower: float = 8.0
    source_lane: int = 64 * MIB
    lane: int = 16 * MIB
    parcel: int = 8 * MIB
    in_flight: int = 64 * MIB
    round_trip_s: float = 0.0015
    node_bandwidth: float = 1.0e9
    parcel_s: float = 0.001
    put_bandwidth: float = 1.2e9
    wait_s: float = 0.25
    most_asks: float = 500.0
    ask_s: float = 0.0006
    step_s: float = 20.0
    step_groups: int = 256
    max_staleness: int = 8
    node_mtbf_s: float = 24 * 3600.0
    relay_mtbf_s: float = 12 * 3600.0
    repair_s: float = 120.0
    seconds: float = 3600.0


@dataclass(slots=True)
class Outcome:
    """What came of a simulated run. Every group is in exactly one of the counts from `trained` to `held`."""

    made: int = 0
    trained: int = 0
    stale_at_source: int = 0
    stale_at_learner: int = 0
    lost_with_nodes: int = 0
    held: int = 0
    steps: int = 0
    learner_busy: float = 0.0
    destination_busy: float = 0.0
    pulls_per_s: float = 0.0
    idle_asks_per_s: float = 0.0
    mb_per_s: float = 0.0
    age_p50_s: float = 0.0
    age_p99_s: float = 0.0
    environments_blocked: float = 0.0
    fairness: float = 1.0  # Jain's index over the nodes that neither died nor are slow


@dataclass(slots=True)
class _Group:
    lane: "_Lane"
    sequence: int
    version: int
    made_s: float


@dataclass(slots=True, eq=False)
class _Lane:
    """One environment's incarnation: its lane at the source, and the one on the learner's node."""

    node: "_Node"
    slower: float
    waiting: deque[_Group] = field(default_factory=deque)  # not sent, or to be sent again
    unacknowledged: deque[_Group] = field(default_factory=deque)
    here: deque[_Group] = field(default_factory=deque)  # committed on the learner's node
    made: int = 0
    newest: int = -1
    used_here: int = 0  # bytes in the lane here, and of pulls that will need them
    blocked_since_s: float = -1.0
    alive: bool = True


@dataclass(slots=True, eq=False)
class _Node:
    slow: bool
    lanes: list[_Lane] = field(default_factory=list)
    pulls: int = 0
    last_arrival_s: float = 0.0  # parcels of one node arrive in the order of their pulls
    session: int = 0  # a new one for each incarnation of its relay
    relay_up: bool = True
    up: bool = True
    died: bool = False
    trained: int = 0


class Simulation:
    """One run; `run` returns what came of it."""

    def __init__(self, setup: Setup, seed: int) -> None:
        self.setup, self.random, self.outcome = setup, random.Random(seed), Outcome()
        self.now_s, self._events = 0.0, []  # type: float, list[tuple[float, int, Callable[[], None]]]
        self._number, self._in_flight, self._version, self._pulls, self._bytes = 0, 0, 0, 0, 0
        self._free_at_s, self._busy_s, self._blocked_s, self._next_node = 0.0, 0.0, 0.0, 0
        self._ready: list[_Lane] = []  # lanes of the learner's node, in turn
        self._turn, self._learning = 0, False
        self._ages: list[float] = []
        self._idle_asks_per_s = setup.nodes / max(setup.wait_s, setup.nodes / setup.most_asks)
        slow = set(self.random.sample(range(setup.nodes), int(setup.nodes * setup.stragglers)))
        self.nodes = [_Node(number in slow) for number in range(setup.nodes)]

    def run(self) -> Outcome:
        """Simulates the set time. The same setup and seed give the same outcome."""
        for node in self.nodes:
            self._begin_environments(node)
            self._later(self.random.expovariate(1 / self.setup.node_mtbf_s), partial(self._kill_node, node))
            self._later(self.random.expovariate(1 / self.setup.relay_mtbf_s), partial(self._kill_relay, node))
        while self._events and self._events[0][0] <= self.setup.seconds:
            self.now_s, _, act = heapq.heappop(self._events)
            act()
        return self._finished()

    def _later(self, in_s: float, act: Callable[[], None]) -> None:
        self._number += 1
        heapq.heappush(self._events, (self.now_s + in_s, self._number, act))

    # -- environment nodes

    def _begin_environments(self, node: _Node) -> None:
        node.lanes = [
            _Lane(node, self.setup.slower if node.slow else 1.0) for _ in range(self.setup.environments)
        ]
        for lane in node.lanes:
            self._begin_group(lane)

    def _begin_group(self, lane: _Lane) -> None:
        version = self._version
        took_s = self.random.lognormvariate(-0.125, 0.5) * self.setup.group_s * lane.slower
        self._later(took_s, lambda: self._made(lane, version))

    def _made(self, lane: _Lane, version: int) -> None:
        if not lane.alive:
            return
        held = (len(lane.waiting) + len(lane.unacknowledged) + 1) * self.setup.group_bytes
        if held > self.setup.source_lane:  # the environment waits in put; a release looks again
            if lane.blocked_since_s < 0:
                lane.blocked_since_s = self.now_s
            self._later(0.05, lambda: self._made(lane, version))
            return
        if lane.blocked_since_s >= 0:
            self._blocked_s += self.now_s - lane.blocked_since_s
            lane.blocked_since_s = -1.0
        lane.waiting.append(_Group(lane, lane.made, version, self.now_s))
        lane.made += 1
        self.outcome.made += 1
        self._begin_group(lane)
        self._pull(lane.node)

    def _kill_node(self, node: _Node) -> None:
        lost = [group for lane in node.lanes for group in (*lane.waiting, *lane.unacknowledged)]
        self.outcome.lost_with_nodes += sum(group.sequence > group.lane.newest for group in lost)
        for lane in node.lanes:
            lane.alive = False
            lane.waiting.clear()
            lane.unacknowledged.clear()
        node.up, node.died, node.relay_up, node.session = False, True, False, node.session + 1
        self._later(self.setup.repair_s, lambda: self._node_back(node))

    def _node_back(self, node: _Node) -> None:
        node.up = node.relay_up = True
        self._begin_environments(node)
        self._later(self.random.expovariate(1 / self.setup.node_mtbf_s), lambda: self._kill_node(node))

    def _kill_relay(self, node: _Node) -> None:
        """Its successor, a second later, sends again all that is not committed."""
        if node.up and node.relay_up:
            node.relay_up, node.session = False, node.session + 1
            self._later(1.0, lambda: self._relay_back(node, node.session))
        self._later(self.random.expovariate(1 / self.setup.relay_mtbf_s), lambda: self._kill_relay(node))

    def _relay_back(self, node: _Node, session: int) -> None:
        if session != node.session:
            return
        node.relay_up = True
        for lane in node.lanes:
            lane.waiting.extendleft(
                group for group in reversed(lane.unacknowledged) if group.sequence > lane.newest
            )
            lane.unacknowledged.clear()
        self._pull(node)

    # -- pulls

    def _pull(self, node: _Node) -> None:
        """Begins a pull if the node has something, within its two pulls and the bytes under way."""
        if not node.relay_up or node.pulls >= 2 or self._in_flight + self.setup.parcel > self.setup.in_flight:
            return
        parcel = self._parcel(node)
        if not parcel:
            return
        size = len(parcel) * self.setup.group_bytes
        node.pulls += 1
        self._pulls += 1
        self._in_flight += size
        session = node.session
        took_s = self.setup.round_trip_s + size / self.setup.node_bandwidth
        node.last_arrival_s = max(node.last_arrival_s, self.now_s + took_s)
        self._later(node.last_arrival_s - self.now_s, lambda: self._arrived(node, parcel, size, session))

    def _parcel(self, node: _Node) -> list[_Group]:
        found: list[_Group] = []
        most = max(self.setup.parcel // self.setup.group_bytes, 1)
        for lane in node.lanes:
            while lane.unacknowledged and lane.unacknowledged[0].sequence <= lane.newest:
                lane.unacknowledged.popleft()
            while lane.waiting and len(found) < most:
                if self._version - lane.waiting[0].version > self.setup.max_staleness:
                    lane.waiting.popleft()
                    self.outcome.stale_at_source += 1
                    continue
                if lane.used_here + self.setup.group_bytes > self.setup.lane:
                    break
                lane.used_here += self.setup.group_bytes
                group = lane.waiting.popleft()
                lane.unacknowledged.append(group)
                found.append(group)
        return found

    def _arrived(self, node: _Node, parcel: Sequence[_Group], size: int, session: int) -> None:
        """The destination works on one parcel after another."""
        work_s = self.setup.parcel_s + size / self.setup.put_bandwidth
        idle = self._idle_asks_per_s * self.setup.ask_s  # what asks that bring nothing take of its time
        self._free_at_s = max(self._free_at_s, self.now_s) + work_s / (1 - idle)
        self._busy_s += work_s
        self._later(self._free_at_s - self.now_s, lambda: self._committed(node, parcel, size, session))

    def _committed(self, node: _Node, parcel: Sequence[_Group], size: int, session: int) -> None:
        node.pulls -= 1
        self._in_flight -= size
        self._bytes += size
        for group in parcel:
            lane = group.lane
            if session != node.session:  # its relay or node died while the parcel was under way
                lane.used_here -= self.setup.group_bytes
                continue
            if group.sequence <= lane.newest:
                raise RuntimeError(f"group {group.sequence} comes after {lane.newest}")
            lane.newest = group.sequence
            lane.here.append(group)
            if len(lane.here) == 1:
                self._ready.append(lane)
        self._learn()
        self._pull(node)
        self._pull_others()

    def _pull_others(self) -> None:
        """Goes on with the nodes that had to wait for bytes under way, in turn."""
        for _ in range(len(self.nodes)):
            if self._in_flight + self.setup.parcel > self.setup.in_flight:
                return
            self._next_node = (self._next_node + 1) % len(self.nodes)
            self._pull(self.nodes[self._next_node])

    # -- the learner

    def _learn(self) -> None:
        if self._learning:
            return
        batch: list[_Group] = []
        if sum(len(lane.here) for lane in self._ready) < self.setup.step_groups:
            return
        while len(batch) < self.setup.step_groups and self._ready:
            self._turn %= len(self._ready)
            lane = self._ready[self._turn]
            group = lane.here.popleft()
            if lane.here:
                self._turn += 1
            else:
                self._ready.pop(self._turn)
            if self._version - group.version > self.setup.max_staleness:
                self.outcome.stale_at_learner += 1
                self._release(group)
            else:
                batch.append(group)
        if len(batch) < self.setup.step_groups:
            for group in reversed(batch):
                if not group.lane.here:
                    self._ready.append(group.lane)
                group.lane.here.appendleft(group)
            return
        self._learning = True
        self._later(self.setup.step_s, lambda: self._stepped(batch))

    def _stepped(self, batch: Sequence[_Group]) -> None:
        self._learning = False
        self._version += 1
        self.outcome.steps += 1
        for group in batch:
            self.outcome.trained += 1
            group.lane.node.trained += 1
            self._ages.append(self.now_s - group.made_s)
            self._release(group)
        self._learn()
        for node in {id(group.lane.node): group.lane.node for group in batch}.values():
            self._pull(node)

    def _release(self, group: _Group) -> None:
        group.lane.used_here -= self.setup.group_bytes

    # -- the end

    def _finished(self) -> Outcome:
        setup, outcome = self.setup, self.outcome
        outcome.held = outcome.made - (
            outcome.trained + outcome.stale_at_source + outcome.stale_at_learner + outcome.lost_with_nodes
        )
        outcome.learner_busy = outcome.steps * setup.step_s / setup.seconds
        outcome.destination_busy = self._busy_s / setup.seconds + self._idle_asks_per_s * setup.ask_s
        outcome.pulls_per_s = self._pulls / setup.seconds
        outcome.idle_asks_per_s = self._idle_asks_per_s
        outcome.mb_per_s = self._bytes / 1e6 / setup.seconds
        ages = sorted(self._ages)
        if ages:
            outcome.age_p50_s, outcome.age_p99_s = ages[len(ages) // 2], ages[len(ages) * 99 // 100]
        outcome.environments_blocked = self._blocked_s / (setup.seconds * setup.nodes * setup.environments)
        shares = [node.trained for node in self.nodes if not (node.slow or node.died)]
        if any(shares):
            outcome.fairness = sum(shares) ** 2 / (len(shares) * sum(share * share for share in shares))
        return outcome

    def held_groups(self) -> int:
        """Groups that lie in a lane, are under way or in training, counted one by one; for the tests."""
        here = sum(len(lane.here) for lane in self._ready)
        at_source = {
            (id(group.lane), group.sequence)
            for node in self.nodes
            for lane in node.lanes
            for group in (*lane.waiting, *lane.unacknowledged)
            if group.sequence > lane.newest
        }
        return here + len(at_source)

    @property
    def in_training(self) -> int:
        """Groups of the step under way."""
        return self.setup.step_groups if self._learning else 0


def main(argv: Sequence[str] | None = None) -> int:
    """Simulates as the command line says, and prints the outcome; returns the exit code."""
    parser = argparse.ArgumentParser(description="Simulate the relays of a cluster.")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", action="store_true", help="one JSON document on standard output")
    for name, default in asdict(Setup()).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(default), default=default, metavar="X")
    arguments = vars(parser.parse_args(argv))
    seed, as_json = arguments.pop("seed"), arguments.pop("json")
    outcome = asdict(Simulation(Setup(**arguments), seed).run())
    if as_json:
        print(json.dumps(outcome))
    else:
        for name, value in outcome.items():
            print(f"{name:22} {value:,.3f}" if isinstance(value, float) else f"{name:22} {value:,}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
