"""The directory: one small actor per bridge, which knows where relays are and what the destination last said.

It is on no record's way. When it begins again, the destination's next report fills it.
"""

import msgspec

NAMESPACE = "shmbridge"


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


class Report(msgspec.Struct):
    """What the destination says, once a second.

    Attributes:
        node: the learner's node.
        sources: node -> its relay, as the destination knows it.
        stats: as `Destination.stats`.
        nodes: as `Destination.nodes`.
        errors: node -> why it does not answer.
        gone: the last nodes that left.
    """

    node: str
    pid: int
    policy_version: int = -1
    sources: dict[str, Placed] = {}
    stats: dict[str, float] = {}
    nodes: dict[str, dict[str, float]] = {}
    errors: dict[str, str] = {}
    gone: list[Gone] = []


_placed = msgspec.msgpack.Decoder(dict[str, Placed])
_report = msgspec.msgpack.Decoder(Report)


def names(bridge: str) -> tuple[str, str]:
    """Returns the names of the actors of a bridge that there is one of: the directory and the destination."""
    return f"shmbridge-directory-{bridge}", f"shmbridge-destination-{bridge}"


def encode(said: "Report | dict[str, Placed] | None") -> bytes:
    """Returns the bytes of a report or of the table of sources."""
    return msgspec.msgpack.encode(said)


def decode_placed(raw: bytes) -> dict[str, Placed]:
    """Returns the table of sources, by node."""
    return _placed.decode(raw)


def decode_report(raw: bytes) -> Report:
    """Returns a report."""
    return _report.decode(raw)


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
