"""Where relays run: joins a Ray cluster, keeps a source on every environment node and the destination on the
learner's, and stops them. A supervisor that dies leaves the actors as they are; another one finds them.
"""

import contextlib
import functools
import hashlib
import logging
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import msgspec

from shmbridge.errors import BadArgument, RelayTaken, shown
from shmbridge.put import LONGEST_NODE
from shmbridge.relay.ray.actors import (
    BESIDE,
    DestinationActor,
    Options,
    WeightsSenderActor,
    find,
    get_or_make,
    make_receiver,
    make_source,
    receiver_name,
    sender_name,
)
from shmbridge.relay.ray.directory import (
    NAMESPACE,
    Directory,
    Gone,
    Placed,
    Report,
    decode_report,
    encode,
    names,
)

log = logging.getLogger(__name__)

# Labels of nodes: of those with environments; a name and a suffix of the bridge's name, for nodes that share
# a host or its memory; and the share of what may be on its way, beside a node of weight 1.
ENVIRONMENTS = ("shmbridge", "environments")
NAME_LABEL, SUFFIX_LABEL, WEIGHT_LABEL = "shmbridge-name", "shmbridge-suffix", "shmbridge-weight"

_ANSWER_S = 10.0
_STOP_S = 5.0
_LOOK_S = 3.0


@dataclass(frozen=True, slots=True)
class Node:
    """A living node of the cluster: its id in Ray, its name here, the bridge on it."""

    node_id: str
    name: str
    bridge: str
    labels: dict[str, str]


@dataclass(slots=True)
class Plan:
    """What is to run where.

    Attributes:
        bridge: name of the bridge; a node's label `shmbridge-suffix` is added to it there.
        sources: label of environment nodes; None: every node but the learner's.
        learner: label of the learner's node; None: the node of this process.
        options: of the destination.
    """

    bridge: str
    sources: tuple[str, str] | None = ENVIRONMENTS
    learner: tuple[str, str] | None = None
    options: Options = field(default_factory=Options)


def label(text: str) -> tuple[str, str]:
    """Returns the label `KEY=VALUE`. Raises BadArgument."""
    key, sign, value = text.partition("=")
    if not (key and sign and value):
        raise BadArgument(f"label {shown(text)} is not KEY=VALUE", hint="shmbridge=environments")
    return key, value


@contextlib.contextmanager
def joined(address: str, *, or_start: bool = False) -> Iterator[None]:
    """Joins the cluster at an address, "auto" the one of this machine; `or_start` one here if there is none.

    Blocks for seconds. Raises ConnectionError if nobody answers.
    """
    import ray

    quiet: dict[str, Any] = {"namespace": NAMESPACE, "log_to_driver": False, "logging_level": logging.ERROR}
    try:
        ray.init(address=address, **quiet)
    except ConnectionError:
        if address != "auto" or not or_start:
            raise
        ray.init(include_dashboard=False, **quiet)
        log.warning("no Ray cluster was found: one was started, which ends with this process")
    try:
        yield
    finally:
        ray.shutdown()


def living_nodes(bridge: str) -> list[Node]:
    """Returns the living nodes of the cluster, named by their labels, by `ray start`, or as their hosts."""
    import ray

    found: list[Node] = []
    for node in sorted(ray.nodes(), key=lambda each: each["NodeID"]):
        if node["Alive"]:
            labels, own = dict(node["Labels"]), node["NodeName"]
            name = labels.get(NAME_LABEL) or (
                own if own != node["NodeManagerAddress"] else node["NodeManagerHostname"]
            )
            found.append(Node(node["NodeID"], _fitting(name), bridge + labels.get(SUFFIX_LABEL, ""), labels))
    names_of = [node.name for node in found]
    return [
        node
        if names_of.count(node.name) == 1
        else Node(node.node_id, _told_apart(node), node.bridge, node.labels)
        for node in found
    ]


def _fitting(name: str) -> str:
    """Returns a node's name as a lane can say it: a longer one is cut, and ends in digits made of all of it,
    which are the same whenever the node comes.
    """
    raw = name.replace("\0", "?").encode(errors="replace")
    if len(raw) <= LONGEST_NODE:
        return raw.decode()
    return _with_end(raw, hashlib.blake2b(raw, digest_size=4).hexdigest())


def _told_apart(node: Node) -> str:
    return _with_end(node.name.encode(), node.node_id[:8])


def _with_end(raw: bytes, end: str) -> str:
    return f"{raw[: LONGEST_NODE - 1 - len(end)].decode(errors='ignore')}-{end}"


def _placed(node: Node) -> Placed:
    """Returns the source relay of a node, which its actor's name follows from."""
    actor = f"shmbridge-source-{node.bridge}-{node.node_id[:16]}"
    return Placed(actor, node.node_id, node.bridge, _weight(node.name, node.labels.get(WEIGHT_LABEL, "1")))


@functools.cache
def _weight(name: str, said: str) -> float:
    """Returns the weight that a node's label gives it; 1, logged once, for one that is no number above 0."""
    with contextlib.suppress(ValueError):
        if 0 < (weight := float(said)) < math.inf:
            return weight
    log.warning("node %s: label %s=%s is no number above 0: its weight is 1", name, WEIGHT_LABEL, said)
    return 1.0


class Placement:
    """Keeps a plan's actors running. One thread; each call blocks for as long as Ray takes."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._directory: Any = None
        self._learner: Node | None = None
        self._look_s = 0.0  # when to look again whether the destination answers
        self._placed: dict[str, Placed] = {}
        self._silent: set[str] = set()  # nodes that did not answer the destination
        self._gone_said: int | None = None

    def reconcile(self) -> list[tuple[str, str]]:
        """Puts relays where they are missing; returns (node, what was done there).

        Raises BadArgument without a learner's node.
        """
        done: list[tuple[str, str]] = []
        nodes = living_nodes(self._plan.bridge)
        learner = self._learner_of(nodes)
        if (self._learner != learner or time.monotonic() > self._look_s) and self._destination(learner):
            if self._learner != learner:
                done.append((learner.name, f"destination of bridge {learner.bridge}"))
            self._learner, self._look_s = learner, time.monotonic() + _LOOK_S
        wanted = {node.name: node for node in nodes if node != learner and self._has_environments(node)}
        for name, node in wanted.items():
            placed = _placed(node)
            if self._placed.get(name) != placed:
                self._source(placed, name)
                self._placed[name] = placed
                done.append((name, f"source of bridge {node.bridge}"))
            elif name in self._silent:  # its actor may have been ended for good
                self._source(placed, name)
        for name in self._placed.keys() - wanted:
            del self._placed[name]
            done.append((name, "left"))
        self._tell()
        return done

    def report(self) -> Report | None:
        """Returns what the destination last said to the directory; None before that, or if it is late."""
        said = report(self._plan.bridge)
        self._silent = set() if said is None else set(said.errors)
        if said is not None and said.weights is not None:
            self._silent |= {node for node, about in said.weights.nodes.items() if about.error}
        return said

    def new_gone(self, said: Report) -> list[Gone]:
        """Returns the nodes that left since the last call with a report."""
        new = [each for each in said.gone if self._gone_said is not None and each.number > self._gone_said]
        self._gone_said = max((each.number for each in said.gone), default=0)
        return new

    def _learner_of(self, nodes: list[Node]) -> Node:
        import ray

        wanted, here = self._plan.learner, ray.get_runtime_context().get_node_id()
        fit = [
            node for node in nodes
            if (node.node_id == here if wanted is None else node.labels.get(wanted[0]) == wanted[1])
        ]  # fmt: skip
        if len(fit) != 1:
            raise BadArgument(
                f"{len(fit)} of {len(nodes)} nodes are the learner's",
                hint="start relay on that node, or give it a label: --learner-label KEY=VALUE",
            )
        return fit[0]

    def _has_environments(self, node: Node) -> bool:
        wanted = self._plan.sources
        return wanted is None or node.labels.get(wanted[0]) == wanted[1]

    def _destination(self, node: Node) -> bool:
        """Puts the destination there if there is none; returns whether it answers."""
        import ray

        name = names(self._plan.bridge)[1]
        options = msgspec.msgpack.encode(self._plan.options)
        actor = get_or_make(DestinationActor, name, node.node_id, node.bridge, node.name, options)
        try:
            there = decode_report(ray.get(actor.report.remote(), timeout=_ANSWER_S)).node
        except ray.exceptions.RayError as wrong:
            log.warning("the destination of bridge %s does not answer: %s", self._plan.bridge, wrong)
            return False
        if there != node.name:
            raise RelayTaken(
                f"bridge {self._plan.bridge!r} has its destination on node {there}, not on {node.name}",
                hint=f"shmbridge relay --bridge {self._plan.bridge} --stop, and start again",
            )
        if self._plan.options.weights:
            get_or_make(
                WeightsSenderActor, sender_name(self._plan.bridge), node.node_id, node.bridge, node.name
            )
        return True

    def _source(self, placed: Placed, name: str) -> None:
        make_source(placed, name)
        if self._plan.options.weights:
            make_receiver(placed)

    def _tell(self) -> None:
        import ray

        if self._learner is None:
            return
        try:
            if self._directory is None:
                self._directory = get_or_make(Directory, names(self._plan.bridge)[0], self._learner.node_id)
            ray.get(self._directory.place.remote(encode(self._placed)), timeout=_ANSWER_S)
        except ray.exceptions.RayError as wrong:
            log.warning("the directory of bridge %s does not answer: %s", self._plan.bridge, wrong)
            self._directory = None


def report(bridge: str) -> Report | None:
    """Returns what the destination of a bridge last said; None if there is none, or it is late."""
    import ray

    try:
        directory = find(names(bridge)[0])
        answers = [directory.report.remote(), directory.weights.remote()]
        raw, weights = ray.get(answers, timeout=_ANSWER_S)
    except (ValueError, ray.exceptions.RayError):
        return None
    return None if raw is None else decode_report(raw, weights)


def stop(bridge: str) -> list[str]:
    """Ends the actors of a bridge, the destination first; returns their names. No record is touched.

    Their names follow from the bridge and the nodes: a destination that has just begun knows no source yet.
    """
    import ray

    directory, destination = names(bridge)
    placed = [_placed(node) for node in living_nodes(bridge)]
    sources = [name for each in placed for name in (each.actor, receiver_name(each))]
    pulled = {each.actor for each in placed}
    every = ray.util.list_named_actors(all_namespaces=True)  # the caller may have joined in another one
    there = {each["name"] for each in every if each["namespace"] == NAMESPACE}
    ended = []
    for name in (destination, sender_name(bridge), *sources, directory):
        if name not in there:
            continue
        try:
            actor = find(name)
        except ValueError:
            continue
        if name in pulled:
            actor.notify.options(concurrency_group=BESIDE).remote()
        if name != directory:
            with contextlib.suppress(ray.exceptions.RayError):
                ray.get(actor.stop.remote(), timeout=_STOP_S)
        ray.kill(actor)
        ended.append(name)
    return ended
