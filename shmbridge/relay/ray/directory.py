"""The directory: one small actor per bridge, which knows where relays are and what the destination last said.

It is on no record's way. When it begins again, the destination's next report fills it.
"""

from collections.abc import Iterable

import msgspec

NAMESPACE = "shmbridge"
_HEAD = (
    *("node", "role", "bridge", "lanes", "held", "backlog", "records/s", "MB/s", "relayed", "again"),
    *("refused", "stale", "heard", "weights"),
)
_LEFT = 3  # columns that begin at the left


class Placed(msgspec.Struct, frozen=True):
    """A source relay: its actor's name, its node's id in Ray, the bridge there, its weight among nodes."""

    actor: str
    node_id: str
    bridge: str
    weight: float = 1.0


class Gone(msgspec.Struct, frozen=True):
    """A node that left: how many records it had that were never relayed, of how many lanes at least, by its
    last word, `heard_s` before; `number` counts such nodes.
    """

    number: int
    node: str
    never_relayed: int
    lanes: int
    heard_s: float


class NodeWeights(msgspec.Struct):
    """Of one node: its newest whole version, the one under way, what has come.

    Attributes:
        version: -1 before the first that was sent from here.
        under_way: -1 if none is.
        versions: how many were written there.
        replaced: how many a newer one took the place of.
        bytes: of those that were written.
        last_s: how long the last one took, from its reading on.
        error: why the last one did not come, "" if it did.
    """

    version: int = -1
    under_way: int = -1
    versions: int = 0
    replaced: int = 0
    bytes: int = 0
    last_s: float = 0.0
    error: str = ""


class WeightsReport(msgspec.Struct):
    """What the learner's node says of weights, once a second; `error` is of that node itself."""

    node: str
    pid: int
    version: int = -1
    nodes: dict[str, NodeWeights] = {}
    error: str = ""


class Report(msgspec.Struct):
    """What the destination says, once a second.

    Attributes:
        node: the learner's node.
        sources: node -> its relay, as the destination knows it.
        stats: as `Destination.stats`.
        nodes: as `Destination.nodes`.
        errors: node -> why it does not answer.
        refused: source and its node -> why its last record was refused here, or has no lane; the first few.
        gone: the last nodes that left.
        weights: what the directory has beside it, of the weights' way out; None before the first word.
    """

    node: str
    pid: int
    policy_version: int = -1
    sources: dict[str, Placed] = {}
    stats: dict[str, float] = {}
    nodes: dict[str, dict[str, float]] = {}
    errors: dict[str, str] = {}
    refused: dict[str, str] = {}
    gone: list[Gone] = []
    weights: WeightsReport | None = None


def names(bridge: str) -> tuple[str, str]:
    """Returns the names of the actors of a bridge that there is one of: the directory and the destination."""
    return f"shmbridge-directory-{bridge}", f"shmbridge-destination-{bridge}"


def encode(said: "Report | WeightsReport | dict[str, Placed] | None") -> bytes:
    """Returns the bytes of a report or of the table of sources."""
    return msgspec.msgpack.encode(said)


def decode_placed(raw: bytes) -> dict[str, Placed]:
    """Returns the table of sources, by node."""
    return msgspec.msgpack.decode(raw, type=dict[str, Placed])


def decode_report(raw: bytes, weights: bytes | None = None) -> Report:
    """Returns a report, with that of weights if it is given."""
    report = msgspec.msgpack.decode(raw, type=Report)
    report.weights = None if weights is None else msgspec.msgpack.decode(weights, type=WeightsReport)
    return report


class Directory:
    """The actor: three tables of a few kilobytes, in memory. Its calls never block."""

    def __init__(self) -> None:
        self._sources: bytes | None = None
        self._report: bytes | None = None
        self._weights: bytes | None = None

    def place(self, sources: bytes) -> None:
        """Sets where the sources are: by the supervisor."""
        self._sources = sources

    def exchange(self, report: bytes) -> bytes:
        """Takes the destination's report, returns where the sources are."""
        self._report = report
        if self._sources is None:  # it has begun again
            self._sources = encode(decode_report(report).sources)
        return self._sources

    def report(self) -> bytes | None:
        """Returns the newest report, None before the first."""
        return self._report

    def exchange_weights(self, report: bytes) -> bytes | None:
        """Takes what is said of the weights' way out, returns where the sources are, None if not known."""
        self._weights = report
        return self._sources

    def weights(self) -> bytes | None:
        """Returns what was last said of the weights' way out, None before the first."""
        return self._weights


def table(now: Report, before: Report | None, seconds: float) -> str:
    """Returns the table of a report; rates since the one before it, so many seconds ago.

    Columns: lanes and un-released records there, records not sent yet, what came in a second and in all, what
    came again, was refused here, discarded there, the seconds since the last answer, and the version of the
    weights.
    """
    rows: list[tuple[str, ...]] = [_HEAD]
    weights = {} if now.weights is None else now.weights.nodes
    stats, last = now.stats, {} if before is None else before.stats
    rows.append(
        (
            *(now.node, "learner", "", _count(stats, "lanes"), "", _count(stats, "waiting")),
            *_rates(stats, last, seconds),
            *_totals(stats, stale=""),
            "",
            _version(None if now.weights is None else now.weights.version),
        )
    )
    for node in sorted(now.sources):
        about = now.nodes.get(node, {})
        earlier = {} if before is None else before.nodes.get(node, {})
        rows.append(
            (
                *(node, "source", now.sources[node].bridge),
                *(_count(about, "source_lanes"), _count(about, "source_held"), _count(about, "backlog")),
                *_rates(about, earlier, seconds),
                *_totals(about, stale=_count(about, "source_discarded_total{stale}")),
                f"{about['heard_s']:.1f} s" if "heard_s" in about else "never",
                _version(weights[node].version if node in weights else None),
            )
        )
    lines = list(_aligned(rows))
    lines.append(f"policy version {now.policy_version}")
    lines += [f"! {node}: {why}" for node, why in sorted(now.errors.items())]
    lines += [f"! {source}: {why}" for source, why in sorted(now.refused.items())]
    lines += [f"! {node}: weights: {about.error}" for node, about in sorted(weights.items()) if about.error]
    if now.weights is not None and now.weights.error:
        lines.append(f"! {now.weights.node}: weights: {now.weights.error}")
    lines += [
        f"! node {each.node} left: {each.never_relayed} records of {each.lanes} lanes were never relayed"
        for each in now.gone
    ]
    return "\n".join(lines)


def _version(version: int | None) -> str:
    return "" if version is None or version < 0 else str(version)


def _count(counters: dict[str, float], name: str) -> str:
    return f"{counters.get(name, 0):.0f}"


def _rates(now: dict[str, float], before: dict[str, float], seconds: float) -> tuple[str, str]:
    def rate(name: str) -> float:
        return max(now.get(name, 0) - before.get(name, 0), 0) / max(seconds, 1e-3) if before else 0.0

    return f"{rate('relayed_total'):.0f}", f"{rate('bytes_total') / 1e6:.1f}"


def _totals(counters: dict[str, float], stale: str) -> tuple[str, str, str, str]:
    refused = sum(count for name, count in counters.items() if name.startswith("refused_total"))
    return _count(counters, "relayed_total"), _count(counters, "duplicates_total"), f"{refused:.0f}", stale


def _aligned(rows: list[tuple[str, ...]]) -> Iterable[str]:
    widths = [max(len(row[at]) for row in rows) for at in range(len(_HEAD))]
    for row in rows:
        cells = [
            cell.ljust(width) if at < _LEFT else cell.rjust(width)
            for at, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        yield "  ".join(cells).rstrip()
