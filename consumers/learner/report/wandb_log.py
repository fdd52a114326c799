"""The learner's W&B run. The only file of the learner that imports wandb, if enabled."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

from shmbridge.consumers.learner import Metrics, Refusal
from shmbridge.consumers.learner.config.run_options import LearnerConfig
from shmbridge.consumers.learner.report.log import OtherLog, plain

ID_FILE = "wandb-run-id"  # in the run directory, so that a resumed learner continues its W&B run

_COLUMNS = (
    "step",
    "env_name",
    "group_id",
    "prompt",
    "completion",
    "score",
    "mean_advantage",
    "finish_reason",
)
_MOST_TEXT = 4000  # characters of a cell


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
                    *(sample[name] for name in ("step", "env_name", "group_id")),
                    (row.get("prompt") or sample["prompt"])[-_MOST_TEXT:],
                    row["completion"][:_MOST_TEXT],
                    row["score"],
                    _mean(row["advantages"]),
                    row["finish_reason"],
                ]
                for sample in samples
                for row in sample["trajectories"]
            ]
            table = self._table(columns=list(_COLUMNS), data=rows)
            self._run.log({"samples": table}, step=samples[0]["step"])

    def __enter__(self) -> WandbRun:
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self._run is not None:
            with self.guarded("end"):
                self._run.finish()

    def _start(self, wandb: Any, config: LearnerConfig, resumed: bool) -> None:
        config.run_dir.mkdir(parents=True, exist_ok=True)
        id_file = config.run_dir / ID_FILE
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
