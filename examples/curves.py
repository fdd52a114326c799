"""Curves as a small SVG, the same bytes for the same numbers, and tables inside a page of the docs.

Knows nothing of demos and of rewards. Called by `demo_curves.py` and `process_rewards/compare.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

MOST_POINTS = 120  # of one curve in the file


@dataclass(frozen=True)
class Curve:
    """A line: its points, and what tells it from the others.

    Curves of one label share a colour and one line of the legend.
    """

    label: str
    x: Sequence[float]
    y: Sequence[float]


@dataclass(frozen=True)
class Panel:
    """A set of axes; both ends of y are fixed."""

    title: str
    xlabel: str
    ylabel: str
    curves: Sequence[Curve]
    goal: float | None = None  # drawn as a line across


def draw(panels: Sequence[Panel], path: Path) -> None:
    """Draw panels side by side into an SVG. Blocks for a second; needs matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    style = {"svg.fonttype": "none", "svg.hashsalt": path.stem, "font.size": 9, "path.simplify": True}
    with matplotlib.rc_context(style):
        figure, every = pyplot.subplots(
            1, len(panels), figsize=(4.6 * len(panels), 3.2), squeeze=False, layout="constrained"
        )
        for panel, axes in zip(panels, every[0], strict=True):
            colours: dict[str, str] = {}
            for curve in panel.curves:
                first = curve.label not in colours
                colour = colours.setdefault(curve.label, f"C{len(colours)}")
                points = slice(None, None, max(1, len(curve.x) // MOST_POINTS))
                label = curve.label if first else None
                axes.plot(
                    curve.x[points], curve.y[points], color=colour, label=label, linewidth=1.3, alpha=0.85
                )
            if panel.goal is not None:
                axes.axhline(panel.goal, color="black", linewidth=0.8, linestyle=":")
            axes.set(title=panel.title, xlabel=panel.xlabel, ylabel=panel.ylabel, ylim=(0, 1.02))
            axes.set_xlim(left=0)
            axes.grid(alpha=0.3)
            axes.legend(loc="best", fontsize=8)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, metadata={"Date": None})
        pyplot.close(figure)


def moving_mean(values: Sequence[float], window: int) -> list[float]:
    """Returns the mean of the last `window` values at each place, of fewer at the start."""
    sums = [0.0]
    for value in values:
        sums.append(sums[-1] + value)
    starts = [max(0, end - window) for end in range(1, len(sums))]
    return [(sums[end] - sums[start]) / (end - start) for end, start in enumerate(starts, start=1)]


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Returns a Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def write_between(page: Path, name: str, text: str) -> None:
    """Replaces what stands between `<!-- NAME -->` and `<!-- end of NAME -->` in a page.

    Raises:
        ValueError: the page does not have both, in this order.
    """
    begin, end = f"<!-- {name} -->\n", f"<!-- end of {name} -->"
    before, found, rest = page.read_text().partition(begin)
    _, ended, after = rest.partition(end)
    if not (found and ended):
        raise ValueError(f"{page} has no place for {name}: {begin.strip()} ... {end}")
    page.write_text(f"{before}{begin}{text}\n{end}{after}")
