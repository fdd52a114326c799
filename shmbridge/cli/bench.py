"""`shmbridge bench`: measures this host with the installed package: the limit, the ring, and the installed
peers.
"""

import argparse
import itertools
import json
import signal
import sys
import time
from collections.abc import Collection
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import shmbridge
from shmbridge.cli.base import Command, Parser, refuse

if TYPE_CHECKING:
    from shmbridge.bench.contract import Plan
    from shmbridge.bench.figures import Figures

SLOW_TO_START = ("ray_actor", "transfer_queue_store")  # not measured with --quick
QUICK_AT_ONE_SIZE = ("mp_queue", "torch_queue")  # --quick measures them with the middle size only
LONG_S, QUICK_S = 0.4, 0.08  # length of a round


def _bench_arguments(parser: Parser) -> None:
    parser.add_argument("--quick", action="store_true", help="short rounds, and only what starts quickly")
    parser.add_argument(
        "--only",
        metavar="NAMES",
        help="contenders, with commas between them (default: all that are installed)",
    )
    parser.add_argument(
        "--plot", type=Path, metavar="FILE", help="draw throughput by size there: .png, .svg or .pdf"
    )
    parser.add_argument("--seconds", type=float, help=argparse.SUPPRESS)  # of a round
    parser.add_argument("--lengths", help=argparse.SUPPRESS)  # of trajectories


def _bench(arguments: argparse.Namespace) -> int:
    """Measures, and prints a table per size, or JSON.

    Ended by SIGTERM, it cleans up as on an interrupt.
    """
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        return _measured(arguments)
    finally:
        signal.signal(signal.SIGTERM, before)


def _measured(arguments: argparse.Namespace) -> int:
    from shmbridge.bench import baselines, machine
    from shmbridge.bench.figures import measure

    began, about = time.monotonic(), machine.about() | machine.this_run()
    wanted = _chosen(arguments.only, baselines.CONTENDERS)
    if arguments.plot and not _can_draw(arguments.plot):
        return 2
    absent = {name: how for name in wanted if (how := baselines.missing(name))}
    skipped = [
        name
        for name in wanted
        if arguments.quick and not arguments.only and name in SLOW_TO_START and name not in absent
    ]
    plans = _plans([name for name in wanted if name not in absent and name not in skipped], arguments)
    seconds = arguments.seconds or (QUICK_S if arguments.quick else LONG_S)
    rows: list[Figures] = []
    if not arguments.json:
        print(_header(about))
    for _, group in itertools.groupby(plans, key=lambda plan: plan.shape):
        of_size = list(group)
        if not arguments.json:
            print(f"\n{of_size[0].shape}\n{_HEADS}")
        for plan in of_size:
            try:
                rows.append(measure(plan, seconds=seconds, rounds=3 if arguments.quick else 5))
            except (shmbridge.ShmBridgeError, OSError, RuntimeError) as failed:
                print(f"{_name(plan.contender)}, {plan.shape}: not measured: {failed}", file=sys.stderr)
                continue
            if not arguments.json:
                print(_line(rows[-1]), flush=True)
    took = time.monotonic() - began
    if arguments.plot and rows:
        _plot(rows, arguments.plot)
    if arguments.json:
        about_run = {
            "machine": about,
            "quick": arguments.quick,
            "took_s": round(took, 1),
            "not_installed": absent,
            "left_out": skipped,
        }
        print(json.dumps(about_run | {"rows": rows}))
    else:
        print(_footer(absent, skipped, took))
    return 0 if rows else 3


def _chosen(only: str | None, contenders: Collection[str]) -> list[str]:
    """Returns the requested contenders. Exits with 2, naming all of them, if one is unknown."""
    names = list(contenders) if only is None else [name for name in only.split(",") if name]
    unknown = [name for name in names if name not in contenders]
    if unknown or not names:
        refuse("shmbridge bench", f"--only {only!r}: choose from {', '.join(contenders)}")
        raise SystemExit(2)
    return names


def _can_draw(path: Path) -> bool:
    """Returns whether a picture can be written there; prints the reason if not."""
    if path.suffix not in (".png", ".svg", ".pdf") or not path.absolute().parent.is_dir():
        refuse("shmbridge bench", f"--plot {path}: a .png, .svg or .pdf in a folder that is there")
    elif find_spec("matplotlib") is None:
        refuse("shmbridge bench", "--plot needs matplotlib", "pip install matplotlib")
    else:
        return True
    return False


def _plans(names: list[str], arguments: argparse.Namespace) -> "list[Plan]":
    """Returns the plans, size by size; the ring from lists, too."""
    from shmbridge.bench.contract import Plan
    from shmbridge.bench.groups import LARGE, MIDDLE, SMALL, Shape

    shapes = (
        [Shape(length=int(length)) for length in arguments.lengths.split(",")]
        if arguments.lengths
        else [SMALL, MIDDLE, LARGE]
    )
    plans = []
    for shape in shapes:
        for name in names:
            if arguments.quick and not arguments.only and name in QUICK_AT_ONE_SIZE and shape != MIDDLE:
                continue
            plans += [Plan(name, shape, "arrays"), *([Plan(name, shape, "lists")] if name == "ring" else [])]
    return plans


_HEADS = (
    f"  {'':30}{'groups/s':>10}{'(range)':>20}{'MB/s':>9}{'of limit':>10}"
    f"{'producer CPU':>15}{'consumer CPU':>15}"
)


def _line(row: "Figures") -> str:
    low, high = row["groups_per_s_range"]
    name = _name(row["contender"]) + (f", from {row['form']}" if row["contender"] == "ring" else "")
    return (
        f"  {name:30}{row['groups_per_s']:>10,.0f}{f'({low:,.0f} - {high:,.0f})':>20}{row['mb_per_s']:>9,.0f}"
        f"{row['of_limit']:>10.1%}{row['producer_cpu_us_per_group']:>12,.1f} µs"
        f"{row['consumer_cpu_us_per_group']:>12,.1f} µs"
    )


def _header(about: dict[str, Any]) -> str:
    cores = about["pinned"]
    lines = [
        f"{about['cpu']}, {about['cores']} cores, load {about['load_before']} before",
        (
            f"shmbridge {about['shmbridge']} "
            f"({about['revision']}{', with changes' if about['dirty'] else ''}), Python {about['python']}, "
            f"numpy {about['versions']['numpy']}, seed {about['seed']}"
        ),
        f"producer on core {cores['producers'][0]}, consumer on {cores['consumer']}",
    ]
    if cores["consumer"] in cores["producers"]:
        lines.append("both sides share one core: these figures mean little")
    return "\n".join(lines)


def _footer(absent: dict[str, str], skipped: list[str], took: float) -> str:
    lines = [f"\n{_name(name)}: not installed -> {how}" for name, how in absent.items()]
    lines += [f"\n{', '.join(map(_name, skipped))}: left out of --quick"] if skipped else []
    return "".join(lines) + f"\n{took:.0f} s"


def _name(contender: str) -> str:
    from shmbridge.bench import baselines

    return baselines.load(contender).NAME


def _plot(rows: "list[Figures]", path: Path) -> None:
    from shmbridge.bench import baselines, plots

    labels = {name: _name(name) for name in baselines.CONTENDERS}
    plots.throughput([row for row in rows if row["form"] == "arrays"], labels, path, note="64 MiB in flight")


BENCH = Command(
    "measure the ring on this host, beside the memcpy limit and the transports that are installed",
    """examples:
  shmbridge bench --quick            a look, within a minute
  shmbridge bench                    longer rounds, all peers; some minutes
  shmbridge bench --only ring,limit  the ring alone
  shmbridge bench --plot bench.svg   and a picture (needs matplotlib)
  shmbridge bench --json             for programs

Each contender moves the same groups through 64 MiB in flight, one process per side, each on a core; the
reader reads every byte. `of limit` is the ratio to a C twin of memcpy and a flag, measured in turn with it.
Other load on the host shows as a wide range: run it again.

exit codes: 0 measured; 2 wrong arguments; 3 nothing could be measured""",
    _bench_arguments,
    _bench,
)
