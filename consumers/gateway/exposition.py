"""A gateway's counters as samples for Prometheus, beside those that observers see of its bridge."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping

from shmbridge.counters import COUNTERS
from shmbridge.watch.exporter import Sample

_OF_BRIDGE = "bridge_"  # the consumer's counters in a gateway's, if it is the hub
# Those that observers do not see; the names of all others of the consumer are theirs.
_OWN = {
    each.stats: each.prometheus for each in COUNTERS if each.stats and not each.words and each.per == "bridge"
}


def samples(bridge: str, counters: Mapping[str, float]) -> Iterator[Sample]:
    """Yields the gateway's counters, and those of its consumer that no observer sees. Never blocks.

    Args:
        bridge: its name.
        counters: as in `/stats`; the part of a name in braces becomes the label `reason`. The sum over such
            reasons is left out: Prometheus adds.
    """
    with_reasons = {key.partition("{")[0] for key in counters if "{" in key}
    for key, value in counters.items():
        name, _, reason = key.partition("{")
        if not math.isfinite(value) or key in with_reasons:
            continue
        labels = [("bridge", bridge), *([("reason", reason.rstrip("}"))] if reason else [])]
        if not key.startswith(_OF_BRIDGE):
            yield Sample("shmbridge_gateway_" + re.sub(r"\W", "_", name), tuple(labels), value)
        elif (known := _OWN.get(key.removeprefix(_OF_BRIDGE))) is not None:
            yield Sample(known, tuple(labels), value)
