"""What the learner writes of a run: metrics.jsonl, run.json, its progress, and TensorBoard's and W&B's logs.

The packages of the last two are imported when they are asked for.
"""

from __future__ import annotations

import json
import math
import os
import platform
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import shmbridge
from shmbridge.consumers.learner import Metrics, Refusal
from shmbridge.consumers.learner.checkpoint import load_progress
from shmbridge.consumers.learner.config.options import LearnerConfig
from shmbridge.consumers.learner.world import say

TENSORBOARD_FOLDER = "tensorboard"  # in the run directory
WANDB_ID_FILE = "wandb-run-id"  # in the run directory, so that a resumed learner continues its W&B run
FACTS_FILE = "run.json"  # in the run directory
_PACKAGES = ("torch", "transformers", "numpy", "vllm", "atroposlib")
_ABOUT = ("step", "env_name", "group_id")  # a sample
_MOST_TEXT = 4000  # characters of a cell


class OtherLog:
    """Another receiver of the metrics; its failures are counted, and the first is printed.

    Args:
        name: in the metric that counts its failures.
        title: its name for the user.
        say: prints a line for the user.
    """

    def __init__(self, name: str, title: str, say: Callable[[str], None]) -> None:
        self.name, self.failures_total = name, 0
        self._title, self._say = title, say

    def log(self, metrics: Metrics) -> None:
        """Takes one step's metrics. Does not raise."""
        raise NotImplementedError

    def log_samples(self, samples: Sequence[Metrics]) -> None:
        """Takes sampled groups of a step: lines of samples.jsonl. Does not raise; ignored by default."""

    def counters(self) -> Metrics:
        """Returns what goes into each line of metrics.jsonl about this log."""
        return {f"{self.name}_failures_total": self.failures_total}

    @contextmanager
    def guarded(self, what: str) -> Iterator[None]:
        """Counts an exception of the block, and hides it: no failure of a log may stop training."""
        try:
            yield
        except Exception as error:
            self.failures_total += 1
            if self.failures_total == 1:
                self._say(f"{self._title} cannot {what}, training goes on: {type(error).__name__}: {error}")


class MetricsLog:
    """Context manager over an append-only file of JSON lines; a kill leaves at most one torn line.

    Other receivers, `others`, get the same metrics; None entries are ignored.
    """

    def __init__(self, path: Path, *others: OtherLog | None) -> None:
        self.others = [each for each in others if each is not None]
        self._failures_total = 0
        self._torn = False
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
        size = os.fstat(self._file).st_size
        if size and os.pread(self._file, 1, size - 1) != b"\n":
            os.write(self._file, b"\n")  # a killed writer's half line must not merge with our first line

    def append(self, metrics: Metrics) -> None:
        """Appends one line in a single write; values that are not finite become null. Blocks for the disk.

        A line that cannot be written is lost: reported once, and counted in later lines.
        """
        for other in self.others:
            other.log(metrics)
        for other in self.others:
            metrics = metrics | other.counters()
        if self._failures_total:
            metrics["metrics_failures_total"] = self._failures_total
        line = json.dumps({name: plain(value) for name, value in metrics.items()}).encode() + b"\n"
        line = b"\n" + line if self._torn else line
        try:
            written = os.write(self._file, line)
        except OSError as error:
            self._failed(error.strerror)
            return
        self._torn = written < len(line)
        if self._torn:
            self._failed("the line was cut")

    def _failed(self, why: str | None) -> None:
        self._failures_total += 1
        if self._failures_total == 1:
            say(f"metrics.jsonl cannot be written, training goes on without: {why}")

    def __enter__(self) -> MetricsLog:
        return self

    def __exit__(self, *exc_info: object) -> None:
        os.close(self._file)


def progress_line(metrics: Metrics, steps: int) -> str:
    """Returns a progress line for the user: step, learning metrics, time shares."""
    return (
        f"step {metrics['step']:>{len(str(steps))}}/{steps}  version {metrics['policy_version']}"
        f"  reward {metrics['reward_mean']:.3f}  loss {metrics['loss']:+.4f}"
        f"  entropy {metrics['entropy']:.3f}  grad {metrics['grad_norm']:.2f}"
        f"  ratio {metrics['ratio_mean']:.3f}  clip {metrics['clip_frac']:.1%}"
        f"  stale {metrics['staleness_mean']:.1f}/{metrics['staleness_max']}"
        f"  wait {metrics['wait_s']:.2f}s  train {metrics['forward_backward_s']:.2f}s"
        f"  publish {metrics['publish_s'] * 1e3:.0f}ms"
        + ("  UPDATE SKIPPED" if metrics["update_skipped"] else "")
    )


def plain(value: Any) -> Any:
    """Returns the value, or None if it is not finite: standard JSON has no NaN."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


@contextmanager
def progress(steps: int, done: int, every: int, *, bar: bool) -> Iterator[Callable[[Metrics], None]]:
    """Yields a function that shows one step, by its metrics.

    Args:
        steps: of the whole run.
        done: steps done before a resume.
        every: steps between two lines; the last step always has one.
        bar: a bar instead, where standard error is a terminal.
    """
    if not (bar and sys.stderr.isatty()):

        def print_line(metrics: Metrics) -> None:
            if metrics["step"] % every == 0 or metrics["step"] >= steps:
                print(progress_line(metrics, steps), flush=True)

        yield print_line
        return
    from tqdm import tqdm  # comes with transformers

    with tqdm(total=steps, initial=done, unit="step", dynamic_ncols=True) as drawn:

        def draw(metrics: Metrics) -> None:
            drawn.set_postfix_str(
                f"reward {metrics['reward_mean']:.3f}, loss {metrics['loss']:+.4f}, stale "
                f"{metrics['staleness_mean']:.1f}, wait {metrics['wait_s']:.2f}s",
                refresh=False,
            )
            drawn.update(metrics["step"] - drawn.n)

        yield draw


class TensorboardMissing(Refusal):
    """The tensorboard package is not installed; the message says how to get it."""


class TensorboardLog(OtherLog):
    """Context manager over one folder of event files. Blocks for the disk. Raises `TensorboardMissing`.

    Args:
        run_dir: the run directory.
        source: the checkpoint that the run resumes from; the log's later steps are hidden. None for a fresh
            start.
        say: prints a line for the user.
    """

    def __init__(self, run_dir: Path, source: Path | None, say: Callable[[str], None]) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise TensorboardMissing(
                f"--tensorboard needs its package ({error}) -> pip install 'shmbridge[tensorboard]'"
            ) from error
        super().__init__("tensorboard", "TensorBoard", say)
        purge_step = None if source is None else load_progress(source).step + 1
        self._writer: Any = SummaryWriter(str(run_dir / TENSORBOARD_FOLDER), purge_step=purge_step)

    def log(self, metrics: Metrics) -> None:
        """Writes one step's finite numbers, at their step and time."""
        with self.guarded("take metrics"):
            for name, value in metrics.items():
                if (
                    isinstance(value, (bool, int, float))
                    and math.isfinite(value)
                    and name not in ("step", "time")
                ):
                    tag = name if "/" in name else f"learner/{name}"
                    self._writer.add_scalar(tag, value, metrics["step"], walltime=metrics["time"])
            self._writer.flush()

    def __enter__(self) -> TensorboardLog:
        return self

    def __exit__(self, *exc_info: object) -> None:
        with self.guarded("take metrics"):
            self._writer.close()


class WandbMissing(Refusal):
    """The wandb package is not installed; the message says how to get it."""


class WandbRun(OtherLog):
    """Context manager over one W&B run. One thread. Raises `WandbMissing` without the package.

    W&B's environment variables apply. It may block for the network at the start and at the end.

    Args:
        config: the learner's; stored as the run's configuration.
        resumed: whether the learner resumes from a checkpoint.
        say: prints a line for the user.
    """

    def __init__(self, config: LearnerConfig, resumed: bool, say: Callable[[str], None]) -> None:
        try:
            import wandb
        except ImportError as error:
            raise WandbMissing(f"--wandb needs the wandb package ({error}) -> pip install wandb") from error
        super().__init__("wandb", "W&B", say)
        self._run: Any = None
        self._table: Any = getattr(wandb, "Table", None)
        with self.guarded("start"):
            self._start(wandb, config, resumed)

    def log(self, metrics: Metrics) -> None:
        """Hands over one step's metrics, at their step; values that are not finite are left out."""
        if self._run is not None:
            known = {name: value for name, value in metrics.items() if value is plain(value)}
            with self.guarded("take metrics"):
                self._run.log(known, step=metrics["step"])

    def log_samples(self, samples: Sequence[Metrics]) -> None:
        """Hands over sampled groups as a table, a row per trajectory; long texts are cut."""
        if self._run is None or not samples:
            return
        with self.guarded("take samples"):
            rows = [
                [
                    *(sample[name] for name in _ABOUT),
                    (row.get("prompt") or sample["prompt"])[-_MOST_TEXT:],
                    row["completion"][:_MOST_TEXT],
                    row["score"],
                    _mean(row["advantages"]),
                    row["finish_reason"],
                ]
                for sample in samples
                for row in sample["trajectories"]
            ]
            columns = [*_ABOUT, "prompt", "completion", "score", "mean_advantage", "finish_reason"]
            table = self._table(columns=columns, data=rows)
            self._run.log({"samples": table}, step=samples[0]["step"])

    def __enter__(self) -> WandbRun:
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self._run is not None:
            with self.guarded("end"):
                self._run.finish()

    def _start(self, wandb: Any, config: LearnerConfig, resumed: bool) -> None:
        config.run_dir.mkdir(parents=True, exist_ok=True)
        id_file = config.run_dir / WANDB_ID_FILE
        again = id_file.read_text().strip() if resumed and id_file.exists() else None
        self._run = wandb.init(
            project=config.registration.wandb_project or None,
            group=config.registration.wandb_group or None,
            name=config.logging.wandb_name or config.run.bridge,
            job_type="learner",
            config=_flat(config),
            dir=os.environ.get("WANDB_DIR") or str(config.run_dir),
            id=again,
            resume="allow" if again else None,
            settings=wandb.Settings(console="off"),
        )
        id_file.write_text(str(self._run.id))


def _flat(config: LearnerConfig) -> Metrics:
    """Returns all options by name, as texts and numbers for W&B."""
    options = {name: value for section in config.document().values() for name, value in section.items()}
    options["run_dir"] = str(config.run_dir)
    return {
        name: value if isinstance(value, (bool, int, float, str, type(None))) else str(value)
        for name, value in options.items()
    }


def _mean(advantages: Sequence[float | None]) -> float | None:
    """Returns the mean over trained tokens; None if there is none."""
    known = [each for each in advantages if each is not None]
    return sum(known) / len(known) if known else None


def write_facts(folder: Path, device: str) -> None:
    """Adds this start to run.json: when, by which versions, on which machine. Blocks; raises OSError.

    Args:
        folder: the run directory.
        device: what the learner computes on, in words.
    """
    path, packages = folder / FACTS_FILE, {}
    for name in _PACKAGES:
        with suppress(PackageNotFoundError):
            packages[name] = version(name)
    try:
        starts = list(json.loads(path.read_text())["starts"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        starts = []  # the first one, or a damaged file
    starts.append(
        {
            "started": time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime()),
            "shmbridge": shmbridge.__version__,
            "python": platform.python_version(),
            "packages": packages,
            "host": platform.node(),
            "system": f"{platform.system()} {platform.release()} {platform.machine()}",
            "cores": len(os.sched_getaffinity(0)),
            "device": device,
        }
    )
    unfinished = folder / f".{FACTS_FILE}.part"
    unfinished.write_text(json.dumps({"starts": starts}, indent=1) + "\n")
    unfinished.replace(path)
