"""Draws the README's picture: the reward of a demo whose learner was killed, beside throughput of peers.

    python docs/figures/make_overview.py RUN_DIR [--results bench/results/amd-epyc-2-cores.json]

RUN_DIR is the folder of a demo, such as make_recording.py leaves behind. The bars are rows of one run of
`make bench`: groups of 8 x 2048 tokens, one producer, one consumer that reads every byte.
"""

import argparse
import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
from matplotlib import pyplot

from shmbridge.bench.plots import INK, OTHERS, OURS, PALE, STYLE

HERE = Path(__file__).parent
WINDOW = 100  # groups of the moving mean
PEERS = {
    "ring": "shmbridge",
    "iceoryx": "iceoryx2",
    "zmq_ipc": "ZeroMQ, ipc",
    "ray_actor": "Ray actor",
    "transfer_queue_store": "TransferQueue",
}
HTTP = "Atropos, BaseEnv over HTTP, 8 x 2048"


def main() -> None:
    """Writes overview.svg."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path)
    parser.add_argument(
        "--results", type=Path, default=HERE.parents[1] / "bench/results/amd-epyc-2-cores.json"
    )
    arguments = parser.parse_args()
    with mpl.rc_context(STYLE):
        figure, (left, right) = pyplot.subplots(1, 2, figsize=(10.4, 3.5), layout="constrained")
        reward(left, arguments.run)
        bars(right, json.loads(arguments.results.read_text())["rows"])
        figure.savefig(HERE / "overview.svg", metadata={"Date": None})
    print(HERE / "overview.svg")


def reward(axes: Any, run: Path) -> None:
    """The moving mean of the reward, as the environments measured it, and the moment of the kill."""
    logs = {path.stem.removeprefix("rewards-"): objects(path) for path in sorted(run.glob("rewards-*.jsonl"))}
    began_s = min(line["t"] for lines in logs.values() for line in lines)
    for (name, lines), color in zip(logs.items(), OTHERS, strict=False):
        seconds = [line["t"] - began_s for line in lines]
        axes.plot(
            seconds, moving_mean([line["mean"] for line in lines]), label=name, color=color, linewidth=1.8
        )
    steps = [line["time"] - began_s for line in objects(run / "metrics.jsonl")]
    gap_s, died_s = max((b - a, a) for a, b in pairwise(steps))
    axes.axvspan(died_s, died_s + gap_s, color=OURS, alpha=0.12, linewidth=0)
    axes.annotate(
        "kill -9 of the learner:\nno group is lost",
        (died_s + gap_s / 2, 0.32),
        (died_s + gap_s + 2, 0.12),
        color=OURS,
        arrowprops={"arrowstyle": "-", "color": OURS},
    )
    axes.set(ylim=(0, 1), xlim=(0, None), xlabel="seconds, on two CPU cores")
    axes.set_title("shmbridge demo: reward of two environments", loc="left", fontsize=11, fontweight="bold")
    axes.legend(loc="center right", frameon=False)


def bars(axes: Any, rows: list[dict[str, Any]]) -> None:
    """Million tokens a second, the label beside each bar."""
    found = {
        label: row["tokens_per_s"] / 1e6
        for name, label in PEERS.items()
        for row in rows
        if row.get("contender") == name
        and row["group"] == "peers"
        and (row["rows"], row["length"]) == (8, 2048)
        and row["lane_bytes"] == 64 << 20
    }
    found["HTTP + JSON (Atropos)"] = next(row["tokens_per_s"] / 1e6 for row in rows if row["label"] == HTTP)
    for place, (label, value) in enumerate(found.items()):
        ours = label == "shmbridge"
        axes.barh(place, value, color=OURS if ours else PALE, height=0.62)
        text = f"{value:,.0f}" if value >= 10 else f"{value:.2g}"
        axes.text(value + 8, place, text, va="center", color=INK, fontweight="bold" if ours else "normal")
    axes.set_yticks(range(len(found)), list(found))
    axes.tick_params(axis="y", labelcolor=INK, length=0)
    axes.invert_yaxis()
    axes.set(
        xlim=(0, 1.12 * max(found.values())), xlabel="one producer, one consumer, groups of 8 x 2048 tokens"
    )
    axes.grid(axis="y", visible=False)
    axes.set_title("Million tokens a second", loc="left", fontsize=11, fontweight="bold")


def objects(path: Path) -> list[dict[str, Any]]:
    """The whole lines of a JSON log; a kill may have torn the last one of a process."""
    found = []
    for line in path.read_text().splitlines():
        try:
            found.append(json.loads(line))
        except ValueError:
            continue
    return found


def moving_mean(values: list[float]) -> list[float]:
    """The mean of up to WINDOW values at each place."""
    return [
        sum(part) / len(part)
        for part in (values[max(0, end - WINDOW) : end] for end in range(1, len(values) + 1))
    ]


if __name__ == "__main__":
    main()
