"""The demo's curves and numbers for the docs, from several runs of it.

    python examples/demo_curves.py --seeds 1 2 3 --run-dir runs/curves --docs docs  run the demo, then write
    python examples/demo_curves.py --runs runs/demo-a runs/demo-b --docs docs       write from runs there are

Writes `figures/demo.svg` and the table of `tutorials/demo.md`; ends with 1 if a run missed the goal: a mean
reward of 0.9 in the last tenth of its groups, as the environments measured it, before any filter.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import curves

from shmbridge.consumers.learner.report.run import NoRun, read_run, summary
from shmbridge.launch import demo

HERE = Path(__file__).parent
GOAL = 0.9
PAGE, FIGURE = Path("tutorials/demo.md"), Path("figures/demo.svg")


@dataclass(frozen=True)
class Told:
    """The figures in one run's logs."""

    name: str
    figures: demo.Figures
    numbers: dict[str, float | None]  # as `shmbridge report --json`

    @property
    def seconds(self) -> float:
        """From the first group to the last."""
        lines = self.figures.measured()
        return float(lines[-1]["t"] - lines[0]["t"])

    @property
    def total(self) -> demo.Tenths:
        return self.figures.tenths()


def read(folder: Path) -> Told:
    """Reads a run's folder.

    Raises:
        NoRun: it has no metrics, or no rewards that environments measured.
    """
    figures = demo.Figures.read(folder)
    numbers = summary(read_run(folder))
    if not figures.rewards or not figures.measured():
        raise NoRun(f"no rewards-*.jsonl in {folder}, or nothing in them -> a folder of `shmbridge demo`")
    return Told(folder.name, figures, numbers)


def panels(runs: list[Told]) -> list[curves.Panel]:
    """Returns the reward by time, in total and by environment."""

    def curve(run: Told, env: str | None, label: str) -> curves.Curve:
        lines, began = run.figures.measured(env), run.figures.measured()[0]["t"]
        rewards = curves.moving_mean([line["mean"] for line in lines], demo.WINDOW)
        return curves.Curve(label, [line["t"] - began for line in lines], rewards)

    xlabel, ylabel = "seconds since the first group", f"reward, mean of {demo.WINDOW} groups"
    by_env = [curve(run, env, env) for run in runs for env in run.figures.rewards]
    return [
        curves.Panel("Both environments", xlabel, ylabel, [curve(run, None, run.name) for run in runs], GOAL),
        curves.Panel("By environment, all runs", xlabel, ylabel, by_env, GOAL),
    ]


# Column -> what stands in it for one run.
COLUMNS: dict[str, Callable[[Told], str]] = {
    "run": lambda run: run.name,
    "reward, first tenth": lambda run: f"{run.total.first:.3f}",
    "reward, last tenth": lambda run: f"{run.total.last:.3f}",
    "time": lambda run: f"{run.seconds:.0f} s",
    "steps": lambda run: f"{run.figures.most('step')}",
    "tokens": lambda run: f"{run.numbers['tokens']:,.0f}",
    "staleness": lambda run: _number(run.numbers["staleness_mean"], ".1f"),
    "learner idle": lambda run: _number(run.numbers["idle_frac"], ".0%"),
    "host CPU per million tokens": lambda run: _number(run.numbers["host_cpu_s_per_mtoken"], ".2f", " s"),
}


def _number(value: float | None, form: str, unit: str = "") -> str:
    return "not recorded" if value is None else f"{value:{form}}{unit}"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Write the demo's curves and numbers into the docs.")
    parser.add_argument(
        "--runs", type=Path, nargs="+", default=[], metavar="DIR", help="folders of runs there are"
    )
    parser.add_argument(
        "--seeds", type=int, nargs="+", default=[], metavar="N", help="run the demo with these first"
    )
    parser.add_argument(
        "--run-dir", type=Path, default=Path("runs/curves"), help="where those runs go [runs/curves]"
    )
    parser.add_argument("--docs", type=Path, required=True, help="folder of the docs")
    options = parser.parse_args(argv)
    folders = [*options.runs]
    for seed in options.seeds:
        folders.append(options.run_dir / f"seed-{seed}")
        command = [
            sys.executable,
            "-m",
            "shmbridge",
            "demo",
            "--seed",
            str(seed),
            "--run-dir",
            str(folders[-1]),
        ]
        if (status := subprocess.run(command, check=False).returncode) != 0:  # it has printed the reason
            return status
    if not folders:
        parser.error("no runs: give --seeds, or --runs")
    try:
        runs = [read(folder) for folder in folders]
    except NoRun as error:
        print(f"demo_curves: {error}", file=sys.stderr)
        return 1
    found = curves.table(list(COLUMNS), [[say(run) for say in COLUMNS.values()] for run in runs])
    curves.draw(panels(runs), options.docs / FIGURE)
    curves.write_between(options.docs / PAGE, "curves", found)
    print(found)
    missed = [run.name for run in runs if not run.total.last >= GOAL]
    if missed:
        print(f"below {GOAL} in the last tenth: {', '.join(missed)}", file=sys.stderr)
    return 1 if missed else 0


if __name__ == "__main__":
    raise SystemExit(main())
