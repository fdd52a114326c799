"""`shmbridge inspect`: the bridges, their living processes, the content of their lanes, and their weights."""

import argparse
from dataclasses import asdict

import msgspec

from shmbridge.config import format_size
from shmbridge.segments.inventory import BridgeInfo, list_bridges

HELP = "show bridges, their consumer, lanes, undelivered records and weights"
EXAMPLES = """examples:
  shmbridge inspect            all bridges
  shmbridge inspect run1       one bridge
  shmbridge inspect --json     for programs

exit codes: 0 shown; 3 no such bridge"""


def prepare_parser(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `inspect`."""
    parser.add_argument("bridge", nargs="?", help="one bridge; default: all")


def run(arguments: argparse.Namespace) -> int:
    """Prints a block per bridge."""
    found = [info for info in list_bridges() if arguments.bridge in (None, info.name)]
    if arguments.json:
        print(msgspec.json.encode([asdict(info) for info in found]).decode())
    elif not found:
        print(f"no bridge {arguments.bridge!r}" if arguments.bridge else "no bridges")
    else:
        print("\n".join(map(_block, found)))
    return 0 if found or not arguments.bridge else 3


def _block(info: BridgeInfo) -> str:
    consumer = f"consumer pid {info.consumer_pid}" if info.consumer_pid else "no consumer"
    lines = [
        (
            f"{info.name}  {consumer}  policy version {info.policy_version}  {len(info.lanes)} lanes, "
            f"{format_size(info.size_bytes)}"
        )
    ]
    for lane in info.lanes:
        state = ("live" if lane.alive else "dead") + (
            ", waits for a lane," if lane.name in info.waiting else ""
        )
        counts = (
            f"{lane.records:>10} records  {lane.held:>6} "
            f"held{f', {lane.dropped} dropped without release' if lane.dropped else ''}"
        )
        lines.append(
            f"  {printable(lane.producer_id):<32} {state} pid {lane.pid:<8} {counts}  "
            f"{format_size(lane.size_bytes)}"
        )
        if lane.data_writable:
            lines.append(
                "    its data is mapped writable by a reader, whose GPU registers no read-only memory"
            )
        if lane.unaccounted:
            by_slots = lane.released + lane.unaccounted
            lines.append(
                f"    {lane.released} releases counted, {by_slots} by its slots: lost, unless its consumer "
                "was killed"
            )
    if info.waiting:
        read = len(info.lanes) - len(info.waiting)
        lines.append(
            f"  {len(info.waiting)} of these wait for a lane: the consumer reads {read} at once -> start it "
            "with a higher --lanes (learner; launch: learner.options.lanes; Consumer(lanes=), "
            "BridgeDataset(lanes=))"
        )
    if (weights := info.weights) is not None:
        version = "no version yet" if weights.version is None else f"version {weights.version}"
        writer = f"writer pid {weights.writer_pid}" if weights.writer_pid else "no writer"
        lines.append(f"  weights {version}  {writer}  {format_size(weights.size_bytes)}")
    return "\n".join(lines)


def printable(text: str) -> str:
    """Returns the text with control and invisible characters escaped: any process may have chosen it."""
    return "".join(
        each if each.isprintable() else each.encode("unicode_escape", "surrogatepass").decode()
        for each in text
    )
