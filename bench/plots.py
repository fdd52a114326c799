"""Pictures of figures: throughput by size under its ceiling, by producers, latency, CPU per token.

Needs matplotlib; knows no JSON file.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

from shmbridge.bench.figures import Figures

INK, PALE, GRID, CEILING = "#1f2430", "#6b7280", "#e5e7eb", "#eef1f5"
OURS = "#d1495b"
OTHERS = ("#1b6ca8", "#2a9d8f", "#e09f3e", "#7b5ea7", "#4f772d", "#8d6e63", "#3d9fc4", "#a23b72", "#5c677d")
KIB, MIB = 1 << 10, 1 << 20

_Ends = list[tuple[float, float, str, str, str]]  # x, y, text, color, weight
STYLE: Any = {
    "font.family": "DejaVu Sans",
    "font.size": 10,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": PALE,
    "xtick.color": PALE,
    "ytick.color": PALE,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": GRID,
    "grid.linewidth": 0.8,
    "axes.axisbelow": True,
    "figure.dpi": 150,
    "savefig.dpi": 150,
    "figure.facecolor": "white",
    "svg.fonttype": "none",
    "lines.solid_capstyle": "round",
}


# lines of a latency plot
_FIRST = {"linewidth": 2.0, "linestyle": "-"}
_LAST = {"linewidth": 1.2, "linestyle": (0, (4, 2))}
_OTHER = {"linewidth": 1.6, "linestyle": (0, (1, 1))}


def throughput(rows: Sequence[Figures], labels: Mapping[str, str], path: Path, *, note: str = "") -> None:
    """MB/s against bytes of a group: the limit as a ceiling, the ring with its spread, each peer a thin line.

    One form per contender.
    """
    with _figure(
        path, "Throughput by group size", _join("one producer, one consumer, every byte read", note)
    ) as axes:
        ceiling = _by_size(rows, lambda row: row["limit_mb_per_s"] / 1e3)
        axes.fill_between(*ceiling, 0, color=CEILING, linewidth=0)
        axes.plot(*ceiling, color=PALE, linewidth=1.2, linestyle=(0, (4, 3)))
        ends: _Ends = [(ceiling[0][-1], ceiling[1][-1], labels.get("limit", "limit"), PALE, "normal")]
        names = sorted({row["contender"] for row in rows} - {"limit", "ring"})
        for name, color in [*zip(names, _colors(len(names)), strict=True), ("ring", OURS)]:
            mine = [row for row in rows if row["contender"] == name]
            if not mine:
                continue
            sizes, values = _by_size(mine, lambda row: row["mb_per_s"] / 1e3)
            ours = name == "ring"
            axes.plot(
                sizes,
                values,
                color=color,
                linewidth=2.6 if ours else 1.4,
                marker="o",
                markersize=5 if ours else 3.5,
                zorder=5 if ours else 3,
            )
            if ours:
                low, high = (
                    [row["groups_per_s_range"][side] * row["group_bytes"] / 1e9 for row in _sorted(mine)]
                    for side in (0, 1)
                )
                axes.fill_between(
                    _by_size(mine, lambda row: 0)[0], low, high, color=color, alpha=0.15, linewidth=0
                )
            ends.append((sizes[-1], values[-1], labels.get(name, name), color, "bold" if ours else "normal"))
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_ylabel("GB/s")
        axes.set_xlabel("bytes of a group")
        _size_ticks(axes, [row["group_bytes"] for row in rows])
        _plain_ticks(axes.yaxis)
        _label_ends(axes, ends)


def scaling(rows: Sequence[Figures], path: Path, *, note: str = "") -> None:
    """Tokens per second against the number of producers, one line per form."""
    shared = any(row["producers_share_cores"] for row in rows)
    below = _join("8 x 2048 tokens a group, one consumer", "producers share cores" if shared else "", note)
    with _figure(path, "Throughput by number of producers", below) as axes:
        forms = sorted({row["form"] for row in rows})
        ends: _Ends = []
        for form, color in zip(forms, (OURS, *OTHERS), strict=False):
            mine = sorted((row for row in rows if row["form"] == form), key=lambda row: row["producers"])
            x = [row["producers"] for row in mine]
            y = [row["tokens_per_s"] / 1e6 for row in mine]
            low, high = (
                [row["groups_per_s_range"][side] * row["rows"] * row["length"] / 1e6 for row in mine]
                for side in (0, 1)
            )
            axes.plot(x, y, color=color, linewidth=2.2, marker="o", markersize=5)
            axes.fill_between(x, low, high, color=color, alpha=0.15, linewidth=0)
            ends.append((x[-1], y[-1], f"from {form}", color, "bold"))
        axes.set_xscale("log", base=2)
        ticks = sorted({row["producers"] for row in rows})
        axes.set_xticks(ticks, [str(tick) for tick in ticks])
        axes.minorticks_off()
        axes.set_ylim(bottom=0)
        axes.set_xlabel("producers")
        axes.set_ylabel("million tokens/s")
        _label_ends(axes, ends)


def latency(samples_us: Mapping[str, Sequence[float]], path: Path, *, note: str = "") -> None:
    """Share of samples at or below a latency, for each name; median and 99th percentile are marked.

    Microseconds.

    Names that are alike up to their last colon share a color; the first of them is drawn thick, the last
    dashed, others dotted.
    """
    cases: dict[str, list[str]] = {}
    for name in samples_us:
        cases.setdefault(name.rpartition(": ")[0] or name, []).append(name)
    colors = zip(cases.values(), _colors(len(cases), OURS), strict=True)
    drawn = [
        (name, color, _FIRST if name == names[0] else _LAST if name == names[-1] else _OTHER)
        for names, color in colors
        for name in names
    ]
    with _figure(
        path,
        "Latency",
        _join("share of samples that took at most so long; dots: median and 99th percentile", note),
    ) as axes:
        for name, color, line in drawn:
            ordered = sorted(samples_us[name])
            shares = [(n + 1) / len(ordered) for n in range(len(ordered))]
            middle, late = (
                ordered[min(len(ordered) - 1, int(share * len(ordered)))] for share in (0.50, 0.99)
            )
            label = f"{name}   p50 {_number(middle)} µs, p99 {_number(late)} µs"
            axes.step(ordered, shares, where="post", color=color, label=label, **line)
            axes.plot([middle, late], [0.50, 0.99], "o", color=color, markersize=5)
        axes.set_xscale("log")
        axes.set_ylim(0, 1.02)
        axes.set_yticks([0, 0.25, 0.5, 0.75, 0.99], ["0", "25 %", "50 %", "75 %", "99 %"])
        axes.set_xlabel("microseconds")
        _plain_ticks(axes.xaxis)
        axes.legend(loc="upper left", frameon=False, fontsize=9, bbox_to_anchor=(0, -0.16), borderaxespad=0)


def cpu_per_token(cpu_s_per_million_tokens: Mapping[str, float], path: Path, *, note: str = "") -> None:
    """CPU seconds per million tokens, one bar per way, on a logarithmic axis; the shortest first."""
    ways = sorted(cpu_s_per_million_tokens.items(), key=lambda way: way[1], reverse=True)
    below = _join("producer, transport and consumer; each step of the axis is ten times as much", note)
    with _figure(path, "CPU per million tokens", below, height=1.7 + 0.42 * len(ways)) as axes:
        best = ways[-1][1]
        for at, (name, value) in enumerate(ways):
            axes.barh(
                at, value, height=0.62, color=OURS if "shmbridge" in name or value == best else "#9aa5b4"
            )
            times = "" if value == best else f"   {_number(value / best)} x"
            axes.annotate(
                f"{_number(value)} s{times}",
                (value, at),
                (6, 0),
                textcoords="offset points",
                va="center",
                fontsize=9,
            )
        axes.set_yticks(range(len(ways)), [name for name, _ in ways])
        axes.tick_params(axis="y", length=0, labelcolor=INK)
        axes.set_xscale("log")
        axes.set_xlim(best / 2, ways[0][1] * 12)
        axes.grid(visible=False, axis="y")
        axes.set_xlabel("CPU seconds")
        _plain_ticks(axes.xaxis)


@contextmanager
def _figure(path: Path, title: str, below: str, height: float = 4.6) -> Iterator[Any]:
    """One pair of axes with a title and a line below it; saved at the end of the block, in the format of the
    path's suffix.
    """
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    with mpl.rc_context(STYLE):
        # labels may stand outside: the saved box grows with them
        figure, axes = pyplot.subplots(figsize=(8.2, height))
        try:
            axes.set_title(title, loc="left", fontsize=14, fontweight="bold", pad=26)
            axes.text(
                0, 1.03, below, transform=axes.transAxes, fontsize=9, color=PALE, va="bottom", ha="left"
            )
            yield axes
            path.parent.mkdir(parents=True, exist_ok=True)
            metadata = {"Date": None} if path.suffix == ".svg" else None
            figure.savefig(path, bbox_inches="tight", pad_inches=0.2, metadata=metadata)
        finally:
            pyplot.close(figure)


def _join(*parts: str) -> str:
    return " · ".join(filter(None, parts))


def _colors(count: int, *first: str) -> list[str]:
    colors = (*first, *OTHERS)
    return [colors[n % len(colors)] for n in range(count)]


def _sorted(rows: Sequence[Figures]) -> list[Figures]:
    return sorted(rows, key=lambda row: int(row["group_bytes"]))


def _by_size(rows: Sequence[Figures], value: Any) -> tuple[list[int], list[float]]:
    """Sizes and the median of the value at each."""
    sizes = sorted({int(row["group_bytes"]) for row in rows})
    return sizes, [median(value(row) for row in rows if row["group_bytes"] == size) for size in sizes]


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _bytes(value: float) -> str:
    return f"{value / MIB:.3g} MiB" if value >= MIB else f"{value / KIB:.3g} KiB"


def _size_ticks(axes: Any, sizes: Sequence[int]) -> None:
    ticks = [1 << n for n in range(10, 27, 2) if min(sizes) / 1.5 <= 1 << n <= max(sizes) * 1.5]
    axes.set_xticks(ticks, [_bytes(tick) for tick in ticks])
    axes.minorticks_off()


def _plain_ticks(axis: Any) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    low, high = axis.get_data_interval()
    axis.set_major_locator(LogLocator(subs=(1, 2, 5) if high < 60 * low else (1,)))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))


def _label_ends(axes: Any, ends: _Ends) -> None:
    """Writes names at the right ends of lines, moved apart where they would overlap."""
    axes.figure.canvas.draw()
    gap = 12.5 * axes.figure.dpi / 72
    last, right = float("-inf"), max(x for x, *_ in ends)
    for x, y, text, color, weight in sorted(ends, key=lambda end: end[1]):
        _, at = axes.transData.transform((x, y))
        last = max(at, last + gap)
        edge, _ = axes.transData.transform((right, y))
        here, _ = axes.transData.transform((x, y))
        shift = ((edge - here) * 72 / axes.figure.dpi + 9, (last - at) * 72 / axes.figure.dpi)
        axes.annotate(
            text,
            (x, y),
            shift,
            textcoords="offset points",
            color=color,
            fontsize=9,
            fontweight=weight,
            va="center",
            annotation_clip=False,
            arrowprops={
                "arrowstyle": "-",
                "color": color,
                "linewidth": 0.6,
                "alpha": 0.45,
                "shrinkA": 0,
                "shrinkB": 3,
            },
        )
