"""The relays of a cluster as a table of text: a line for each node, then what is wrong."""

from collections.abc import Iterable

from shmbridge.relay.ray.directory import Report

_HEAD = (
    *("node", "role", "bridge", "lanes", "held", "backlog", "records/s", "MB/s", "relayed", "again"),
    *("refused", "stale", "heard", "weights"),
)
_LEFT = 3  # columns that begin at the left


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
