"""From the JSON of a run of the suites: results/<machine>.json, a Markdown page and plots.

`python -m shmbridge.bench.report FILE`.

A suite's figures are the content of its extra_info. This knows those of `measure`, `samples_us` (latency) and
`cpu_s_per_million_tokens`.
"""

import argparse
import json
import re
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from shmbridge.bench import baselines, machine, plots
from shmbridge.bench.figures import Figures
from shmbridge.config import format_size

INTO = Path(__file__).parent / "results"
ABOUT = (
    "cpu",
    "cores",
    "caches",
    "load_before",
    "kernel",
    "python",
    "shmbridge",
    "revision",
    "dirty",
    "seed",
    "pinned",
    "lane_bytes",
)
QUANTILES = 400  # of latency samples, in the kept JSON
WIDEST = 8  # facts of a suite in one line of a table
OF_MEASURE = "of_limit"  # keys that only figures of measure() have
TITLES = {
    "peers": "Peers",
    "sizes": "The ring, by size, from arrays",
    "forms": "The ring, by form",
    "producers": "The ring, by number of producers",
    "small records": "Small records",
    "packing": "Packing Python lists",
    "checked rows": "Checks of rows, over `put` from arrays without",
    "idle": "A consumer that waits",
    "memory": "The limit, by how far memory goes round, and by the stores of its writer",
    "checksum": "With a check over the bytes, made by the application",
}

Cell = Callable[[Figures], str]


def write(source: Path, into: Path = INTO) -> list[Path]:
    """Reads a file of pytest-benchmark and writes the results; the paths written.

    Plots are left out where matplotlib is not installed.
    """
    ran = json.loads(source.read_text())
    about = ran["machine_info"] | ran.get("commit_info", {})
    rows = [row for each in ran["benchmarks"] for row in _rows(each)]
    name = machine.slug()
    into.mkdir(parents=True, exist_ok=True)
    pictures = _plots(rows, into, name)
    kept = {
        "machine": {key: about[key] for key in (*ABOUT, "versions", "memory_bytes", "libc") if key in about},
        "taken": ran.get("datetime"),
        "quick": ran.get("quick", False),
        "not_installed": ran.get("not_installed", {}),
        "rows": [_thinned(row) for row in rows],
    }
    (into / f"{name}.json").write_text(json.dumps(kept, indent=1) + "\n")
    (into / f"{name}.md").write_text(markdown(kept, rows, [path.name for path in pictures]))
    return [into / f"{name}.json", into / f"{name}.md", *pictures]


def markdown(kept: dict[str, Any], rows: Sequence[Figures], pictures: Sequence[str] = ()) -> str:
    """The whole page."""
    about = kept["machine"]
    versions = ", ".join(
        f"{name} {version}"
        for name, version in about.get("versions", {}).items()
        if version != "not installed"
    )
    revision = f"{about.get('revision')}{' with changes' if about.get('dirty') else ''}"
    page = [
        f"# {about.get('cpu')}, {about.get('cores')} cores",
        "A quick look: short rounds, figures of no weight." if kept["quick"] else "",
        (
            f"Taken {kept['taken']}; load before {about.get('load_before')}; kernel {about.get('kernel')}; "
            f"Python {about.get('python')}; shmbridge {about.get('shmbridge')}, revision {revision}; seed "
            f"{about.get('seed')}; lanes of {format_size(about.get('lane_bytes', 0))}; cores "
            f"{about.get('pinned')}; caches {about.get('caches')}."
        ),
        f"{versions}.",
        (
            "Medians of rounds, and in brackets the slowest and the fastest. *Of limit* is the ratio to the "
            "C twin, measured in turn with each row. [How](../README.md)."
        ),
    ]
    absent = kept["not_installed"].items()
    if absent:
        lacking = ", ".join(f"{_label(name)} ({needs})" for name, needs in absent)
        page.append(f"Not installed, so not measured: {lacking}.")
    page += [f"![{_title(name)}]({name})" for name in pictures]
    for group in dict.fromkeys(row["group"] for row in rows):
        mine = [row for row in rows if row["group"] == group]
        page += [f"## {TITLES.get(group, group[:1].upper() + group[1:])}", _table(mine)]
        if any(row.get("producers_share_cores") for row in mine):
            page.append("More producers than cores: they share them.")
    return "\n\n".join(filter(None, page)) + "\n"


def table_of_measure(rows: Sequence[Figures]) -> str:
    """Figures of `measure` as a Markdown table; columns in which all rows are alike and plain are left
    out.
    """
    columns: list[tuple[str, Cell]] = [
        ("", lambda row: _label(row["contender"])),
        ("group", lambda row: f"{row['rows']} x {row['length']}"),
        ("bytes", lambda row: format_size(row["group_bytes"])),
        ("from", lambda row: str(row["form"]).replace("_", " ")),
        ("producers", lambda row: str(row["producers"])),
        ("by", lambda row: str(row["take"])),
        ("read", lambda row: str(row["look"])),
        ("check", lambda row: str(row["checksum"])),
        ("lane", lambda row: format_size(row["lane_bytes"])),
        ("stores", lambda row: str(row["stores"])),
    ]
    plain = {
        "from": "arrays",
        "producers": "1",
        "by": "get",
        "read": "every byte",
        "check": "none",
        "lane": format_size(machine.LANE_BYTES),
        "stores": "plain",
    }
    columns = [(head, cell) for head, cell in columns if any(cell(row) != plain.get(head) for row in rows)]
    columns += [
        (
            "groups/s",
            lambda row: (
                f"{row['groups_per_s']:,.0f} ({row['groups_per_s_range'][0]:,.0f} - "
                f"{row['groups_per_s_range'][1]:,.0f})"
            ),
        ),
        ("tokens/s", lambda row: f"{row['tokens_per_s'] / 1e6:,.3g} M"),
        ("MB/s", lambda row: f"{row['mb_per_s']:,.0f}"),
        (
            "of limit",
            lambda row: f"{row['of_limit']:.1%}" if row["of_limit"] < 0.1 else f"{row['of_limit']:.0%}",
        ),
        ("producer CPU", lambda row: f"{row['producer_cpu_us_per_group']:,.4g} µs"),
        ("consumer CPU", lambda row: f"{row['consumer_cpu_us_per_group']:,.4g} µs"),
        ("CPU per M tokens", lambda row: f"{row['cpu_s_per_million_tokens']:.4g} s"),
    ]
    return _lines([head for head, _ in columns], [[cell(row) for _, cell in columns] for row in rows])


def _table(rows: Sequence[Figures]) -> str:
    parts = []
    measured = [row for row in rows if OF_MEASURE in row and "contender" in row]
    timed = [row for row in rows if "samples_us" in row]
    others = [row for row in rows if row not in measured and row not in timed]
    if measured:
        parts.append(table_of_measure(measured))
    if timed:
        heads = ["", "samples", "p50", "p90", "p99", "p99.9", "most"]
        cells = [
            [row["label"], f"{len(row['samples_us']):,}", *_percentiles(row["samples_us"])] for row in timed
        ]
        parts.append(_lines(heads, cells))
    for names in dict.fromkeys(tuple(_facts(row)) for row in others):
        alike = [row for row in others if tuple(_facts(row)) == names]
        cells = [[row["label"], *map(_value, _facts(row).values())] for row in alike]
        if len(names) > WIDEST:  # facts below each other
            columns = zip(*(cell[1:] for cell in cells), strict=True)
            shown = [[_fact(name), *values] for name, values in zip(names, columns, strict=True)]
            parts.append(_lines(["", *(row["label"] for row in alike)], shown))
        else:
            parts.append(_lines(["", *map(_fact, names)], cells))
    return "\n\n".join(parts)


def _facts(row: Figures) -> dict[str, Any]:
    """A suite's extra_info, with nested dicts flattened."""
    flat: dict[str, Any] = {}
    for key, value in row.items():
        if isinstance(value, dict):
            flat |= {f"{key}: {inner}": each for inner, each in _facts(value).items()}
        elif key not in ("label", "group", "tokens_per_operation"):
            flat[key] = value
    return flat


def _cpu(row: Figures) -> float | None:
    """CPU seconds per million tokens of a suite that measures whole ways; by process, they are added up."""
    said = row.get("cpu_s_per_million_tokens")
    return (
        None if said is None or OF_MEASURE in row else sum(said.values()) if isinstance(said, dict) else said
    )


def _percentiles(samples: Sequence[float]) -> list[str]:
    ordered = sorted(samples)
    return [
        f"{_value(ordered[min(len(ordered) - 1, int(share * len(ordered)))])} µs"
        for share in (0.5, 0.9, 0.99, 0.999, 1)
    ]


def _lines(heads: Sequence[str], cells: Sequence[Sequence[str]]) -> str:
    rule = ["---", *["---:"] * (len(heads) - 1)]
    return "\n".join(f"| {' | '.join(row)} |" for row in [heads, rule, *cells])


def _fact(name: str) -> str:
    return re.sub("_us(?=_|$)", " µs", name).replace("_", " ")


def _value(value: Any) -> str:
    if isinstance(value, list):
        return " - ".join(map(_value, value))
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    return f"{value:,.0f}" if abs(value) >= 1000 or isinstance(value, int) else f"{value:.4g}"


def _row(benchmark: dict[str, Any]) -> Figures:
    """extra_info with the benchmark's group and median time, and its name unless the suite gave a label."""
    name = benchmark["name"]
    own = {
        "label": name,
        "group": benchmark.get("group") or name.partition("[")[0],
        "median_us": 1e6 * benchmark["stats"]["median"],
    }
    return {**own, **benchmark.get("extra_info", {})}


def _rows(benchmark: dict[str, Any]) -> list[Figures]:
    """One, or one for each name where a suite took samples of several in turn."""
    row = _row(benchmark)
    several = row.get("samples_us")
    if not isinstance(several, dict):
        return [row]
    own = {key: row[key] for key in ("label", "group", "median_us")}
    return [
        own | {"label": f"{row['label']}: {name}", "samples_us": samples} for name, samples in several.items()
    ]


def _thinned(row: Figures) -> Figures:
    """Samples as quantiles: a picture can be drawn again from them."""
    if "samples_us" not in row:
        return row
    ordered = sorted(row["samples_us"])
    keep = (
        [ordered[n * (len(ordered) - 1) // QUANTILES] for n in range(QUANTILES + 1)]
        if len(ordered) > QUANTILES
        else ordered
    )
    return row | {"samples_us": keep, "samples": len(ordered)}


def _label(contender: str) -> str:
    return baselines.load(contender).NAME if contender in baselines.CONTENDERS else contender


def _title(picture: str) -> str:
    return picture.rpartition(".")[0].rpartition("-")[2]


def _plots(rows: Sequence[Figures], into: Path, name: str) -> list[Path]:
    if find_spec("matplotlib") is None:
        return []
    made: list[Path] = []

    def draw(kind: str, picture: Callable[[Path], None], wanted: object) -> None:
        if wanted:
            made.append(into / f"{name}-{kind}.svg")
            picture(made[-1])

    labels = {contender: baselines.load(contender).NAME for contender in baselines.CONTENDERS}
    sizes = [row for row in rows if row["group"] in ("sizes", "peers") and OF_MEASURE in row]
    ours = [row for row in sizes if row["group"] == "sizes"]
    theirs = [row for row in sizes if row["contender"] not in ("ring", "limit") or not ours]
    draw(
        "throughput",
        lambda path: plots.throughput([*ours, *theirs], labels, path, note="64 MiB in flight"),
        sizes,
    )
    several = [row for row in rows if row["group"] == "producers" and OF_MEASURE in row]
    draw("producers", lambda path: plots.scaling(several, path), several)
    samples = {row["label"]: row["samples_us"] for row in rows if "samples_us" in row}
    draw("latency", lambda path: plots.latency(samples, path), samples)
    cpu = {row["label"]: said for row in rows if (said := _cpu(row)) is not None}
    draw("cpu", lambda path: plots.cpu_per_token(cpu, path), cpu)
    return made


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("source", type=Path, help="what pytest wrote with --benchmark-json")
    parser.add_argument("--into", type=Path, default=INTO, help="folder of the results")
    options = parser.parse_args()
    for path in write(options.source, options.into):
        print(path)


if __name__ == "__main__":
    main()
