"""How many groups until the answers are right: rewards of steps against rewards of the outcome, seed by seed.

    python examples/process_rewards/compare.py --docs docs

Runs one learner and one environment per variant and seed over a bridge of their own, the same but for the
rewards; writes `results.json` into the run directory and, if asked, the table and the figure into the docs.
`--from` writes them from a `results.json` there is.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import shmbridge

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

import curves  # noqa: E402  (of the folder above)

STEPS = 400  # of the learner's schedule, the same for all
GOAL = 0.9
NOT_REACHED = 3  # status of the environment
PAGE, FIGURE = Path("tutorials/process-rewards.md"), Path("figures/process-rewards.svg")

# variant -> further flags of the learner. The outcome is beside the step rewards, and is given no weight.
VARIANTS: dict[str, list[str]] = {
    "steps": ["--process-rewards", "step", "--process-weight", "1"],
    "graded": [],
    "binary": [],
}
TITLES = {"steps": "a reward for each step", "graded": "share of right steps", "binary": "right or wrong"}


@dataclass(frozen=True)
class Case:
    """One run: a variant and a seed, and its differences from the recipe."""

    variant: str
    seed: int
    folder: Path
    limit: int

    @property
    def bridge(self) -> str:
        return f"prm-{os.getpid()}-{self.variant}-{self.seed}"

    @property
    def log(self) -> Path:
        return self.folder / "environment.jsonl"

    def learner(self, model: Path) -> list[str]:
        """Returns the learner's command line: the demo's recipe, and the variant's own flags."""
        recipe = {
            "bridge": self.bridge,
            "model": model,
            "run-dir": self.folder / "run",
            "steps": STEPS,
            "seed": self.seed,
            "groups": 16,
            "group-size": 8,
            "lr": 2e-3,
            "warmup": 10,
            "entropy": 0.1,
            "max-token-len": 32,
            "threads": 1,
            "log-every": 50,
        }
        flags = [word for name, value in recipe.items() for word in (f"--{name}", str(value))]
        return [sys.executable, "-m", "shmbridge.consumers.grpo", *flags, *VARIANTS[self.variant]]

    def environment(self, model: Path) -> list[str]:
        """Returns the environment's command line."""
        return [
            sys.executable,
            str(HERE / "spell_back_env.py"),
            "--bridge",
            self.bridge,
            "--model",
            str(model),
            "--rewards",
            self.variant,
            "--seed",
            str(self.seed),
            "--log",
            str(self.log),
            "--limit",
            str(self.limit),
            "--goal",
            str(GOAL),
        ]


def start(name: str, command: list[str], folder: Path) -> subprocess.Popen[bytes]:
    """Starts a program that logs to NAME.log of a folder."""
    with (folder / f"{name}.log").open("ab") as log:
        return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)


def run(case: Case) -> dict[str, Any]:
    """Runs one case to its end; returns its curve. Blocks for minutes.

    Raises:
        RuntimeError: the learner or the environment failed; the message has the end of its log.
    """
    case.folder.mkdir(parents=True)
    model = case.folder / "model"
    maker = [sys.executable, str(HERE.parent / "tiny_model.py"), str(model), "--seed", str(case.seed)]
    subprocess.run(maker, check=True, stdout=subprocess.DEVNULL)
    began = time.monotonic()
    learner = start("learner", case.learner(model), case.folder)
    environment = start("environment", case.environment(model), case.folder)
    try:
        while environment.poll() is None and learner.poll() in (None, 0):
            time.sleep(0.1)
        ends = {"learner": (learner, (None, 0)), "environment": (environment, (None, 0, NOT_REACHED))}
        for name, (process, ends_well) in ends.items():
            if process.poll() not in ends_well:
                log = (case.folder / f"{name}.log").read_text(errors="replace").splitlines()[-12:]
                raise RuntimeError("\n".join([f"the {name} of {case.folder} failed:", *log]))
    finally:
        for process in (environment, learner):
            process.terminate()
        for process in (environment, learner):
            process.wait(30)
        shmbridge.clean(case.bridge, dry_run=False)
    curve = [json.loads(line) for line in case.log.read_text().splitlines()]
    reached = curve[-1]["groups"] if environment.returncode == 0 else None
    return {
        "variant": case.variant,
        "seed": case.seed,
        "reached": reached,
        "seconds": time.monotonic() - began,
        "curve": curve,
    }


def write(results: list[dict[str, Any]], docs: Path, limit: int) -> None:
    """Writes the table and the figure of the docs. Blocks for a second."""
    variants = [name for name in VARIANTS if any(result["variant"] == name for result in results)]
    cells: dict[int, dict[str, str]] = {}
    for result in results:
        cells.setdefault(result["seed"], {})[result["variant"]] = (
            f"{result['reached']:,}" if result["reached"] else f"not in {limit:,}"
        )
    rows = [[str(seed), *(row.get(name, "") for name in variants)] for seed, row in sorted(cells.items())]
    curves.write_between(
        docs / PAGE, "groups", curves.table(["seed", *(TITLES[name] for name in variants)], rows)
    )
    lines = [
        curves.Curve(
            TITLES[result["variant"]],
            [point["groups"] for point in result["curve"]],
            curves.moving_mean([point["exact"] for point in result["curve"]], 4),
        )
        for name in variants
        for result in results
        if result["variant"] == name
    ]
    panel = curves.Panel(
        "Twelve letters said back", "groups of 8 answers", "answers without a fault", lines, GOAL
    )
    curves.draw([panel], docs / FIGURE)


def main() -> int:
    parser = argparse.ArgumentParser(description="Groups until the answers are right, by kind of reward.")
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("--limit", type=int, default=3200, help="groups after which a run gives up [3200]")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time, a core each [1]")
    parser.add_argument(
        "--run-dir", type=Path, default=Path("runs") / time.strftime("process-rewards-%Y%m%d-%H%M%S")
    )
    parser.add_argument(
        "--from",
        dest="sources",
        type=Path,
        nargs="+",
        metavar="FILE",
        help="results.json of earlier runs: run nothing",
    )
    parser.add_argument(
        "--docs", type=Path, metavar="DIR", help="folder of the docs: table and figure go there"
    )
    options = parser.parse_args()
    os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    earlier = [result for source in options.sources or () for result in json.loads(source.read_text())]
    results = earlier or compare(options)
    if options.docs:
        write(results, options.docs, options.limit)
    return 0


def compare(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Runs all cases and prints the result of each. Blocks for minutes."""
    cases = [
        Case(variant, seed, options.run_dir / f"{variant}-{seed}", options.limit)
        for seed in options.seeds
        for variant in options.variants
    ]
    results = []
    with ThreadPoolExecutor(options.jobs) as pool:
        for result in pool.map(run, cases):
            results.append(result)
            (options.run_dir / "results.json").write_text(json.dumps(results))
            said = (
                f"{result['reached']} groups" if result["reached"] else f"not within {options.limit} groups"
            )
            print(
                f"{result['variant']:<8} seed {result['seed']}: {said} ({result['seconds']:.0f} s)",
                flush=True,
            )
    return results


if __name__ == "__main__":
    raise SystemExit(main())
