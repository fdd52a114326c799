"""A bridge in lines of text, 80 columns wide: what is wrong, the consumer, the lanes, the weights."""

from collections.abc import Mapping

from shmbridge.config import format_size
from shmbridge.errors import counted
from shmbridge.segments import BridgeInfo
from shmbridge.watch.cells import cells, cut, padded
from shmbridge.watch.diagnosis import Severity, findings, headline, in_words, waited_for
from shmbridge.watch.rows import Row, rows
from shmbridge.watch.snapshot import BridgeLook, look

_TITLES = ("environment", "pid", "state", "rec/s", "held", "fill", "last put", "waits", "lag")
_LABEL, _STATE = 24, 16  # characters of a label, and of pid and state; longer ones take a label's room
_OF_ID = 8  # characters of a producer's id that a node's name leaves


def block(info: BridgeInfo, before: BridgeLook | None, every_lane: bool) -> str:
    """Returns a bridge as text. Never blocks.

    Args:
        info: the bridge, just listed.
        before: an earlier look, for rates; None: none are shown.
        every_lane: show every lane, not only sums and troubles.
    """
    now = look(info.name)
    lines = [f"{info.name}  {counted(len(info.lanes), 'lane')}, {format_size(info.size_bytes)}"]
    if now is not None:
        lines += [f"  {sentence}" for sentence in sentences(now, before)]
        lines.append(f"  {'  '.join(consumer_parts(now))}")
        if (shares := waited_for(now, before)) is not None:
            each_side = ", ".join(f"{side} {share:.0%}" for side, share in shares.items())
            lines.append(f"  waited for, of the time: {each_side}")
        if now.lanes:
            lines.append(_line(_TITLES))
            lines += [_line(_cells(row)) for row in rows(now, before, every_lane=every_lane)]
        for each in now.lanes:
            if lost := reasons_in_words(each.episodes_lost):
                lines.append(f"  {printable(each.producer_id)}: episodes lost: {lost}")
    for lane in info.lanes:
        if lane.dropped:
            lines.append(
                f"  {printable(lane.producer_id)}: {counted(lane.dropped, 'lease')} dropped without release"
            )
        if lane.data_writable:
            lines.append(
                f"  {printable(lane.producer_id)}: its data is mapped writable by a reader, whose GPU "
                "registers no read-only memory"
            )
        if lane.unaccounted:
            by_slots = lane.released + lane.unaccounted
            lines.append(
                f"  {printable(lane.producer_id)}: {lane.released} releases counted, {by_slots} by slots: "
                "lost, unless its consumer was killed"
            )
    if info.receipts:
        lines.append(
            f"  {counted(info.receipts, 'receipt')} of lanes that are gone, for a relay or run that goes on"
        )
    if (weights := info.weights) is not None:
        version = "no version yet" if weights.version is None else f"version {weights.version}"
        writer = f"writer pid {weights.writer_pid}" if weights.writer_pid else "no writer"
        lines.append(f"  weights {version}  {writer}  {format_size(weights.size_bytes)}")
    return "\n".join(lines)


def sentences(now: BridgeLook, before: BridgeLook | None = None) -> list[str]:
    """Returns what is wrong, worst first, or what a healthy bridge does; from the second on "also: ...".

    Never blocks.
    """
    first, *more = (printable(str(each)) for each in findings(now, before) or [headline(now, before)])
    return [first, *(f"also: {each}" for each in more)]


def trouble(bridge: str) -> str:
    """Returns in one line what is wrong with a bridge now; "" if nothing is. Never blocks."""
    if (now := look(bridge)) is None:
        return "its segments were removed -> close this end, and open it again"
    return "; ".join(sentences(now)) if headline(now).severity is Severity.TROUBLE else ""


def consumer_parts(now: BridgeLook) -> list[str]:
    """Returns what the consumer does, the policy version, and the room on the mount. Never blocks."""
    consumer = now.consumer
    parts = ["no consumer" if now.is_consumer_known else "consumer not known"]
    if consumer is not None:
        doing = str(consumer.state)
        if doing == "running" and consumer.asking_s is not None:
            doing = f"waiting for {in_words(consumer.asking_s)}"
        doing += ", paused" * consumer.paused + ", draining" * consumer.draining
        parts = [f"consumer pid {consumer.pid} {doing}"]
        if consumer.handed_age_s is not None:
            parts.append(f"last batch {in_words(consumer.handed_age_s)} ago")
    if now.policy_version is not None:
        since = "" if now.published_age_s is None else f", {in_words(now.published_age_s)} ago"
        parts.append(f"policy version {now.policy_version}{since}")
    parts.append(f"mount {format_size(now.mount_free)} free of {format_size(now.mount_bytes)}")
    return parts


def _cells(row: Row) -> tuple[str, ...]:
    return (
        _label(row),
        "" if row.pid is None else str(row.pid),
        row.state,
        "" if row.rate is None else f"{row.rate:.1f}",
        str(row.held),
        f"{row.fill:.0%}",
        "" if row.newest_age_s is None else in_words(row.newest_age_s),
        "" if row.wait is None else f"{row.wait:.0%}",
        "" if row.lag is None else str(row.lag),
    )


def _label(row: Row) -> str:
    """What a row stands for, cut so that the node its records come from is seen."""
    if row.pid is None:
        return cut(f"{printable(row.label)} ({row.lanes})", _LABEL)
    node = cut(printable(f" from {row.origin_node}"), _LABEL - _OF_ID) if row.origin_node else ""
    return cut(printable(row.label), _LABEL - cells(node)) + node


def _line(columns: tuple[str, ...]) -> str:
    label, pid, state, *numbers = columns
    who = f"{pid:>7} {state:<8}" if pid or len(state) <= 8 else f"{state:>{_STATE}}"
    room = _LABEL + _STATE - len(who)
    return f"  {padded(cut(label, room), room)} {who}" + "".join(
        f" {number:>{width}}" for number, width in zip(numbers, (6, 5, 4, 8, 5, 3), strict=True)
    )


def reasons_in_words(counts: Mapping[str, int]) -> str:
    """Returns the reasons that happened, with their counts: "3 failed, 1 too old". Never blocks."""
    return ", ".join(f"{count} {reason.replace('_', ' ')}" for reason, count in counts.items() if count)


def printable(text: str) -> str:
    """Returns the text with control and invisible characters escaped: any process may have chosen it."""
    return "".join(
        each if each.isprintable() else each.encode("unicode_escape", "surrogatepass").decode()
        for each in text
    )
