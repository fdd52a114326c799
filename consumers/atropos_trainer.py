"""Trains Atropos' example trainer from a bridge, with the advantages its own data path ignores.

    from example_trainer import trainers
    from shmbridge.consumers.atropos_trainer import BridgeData

    with BridgeData("run1") as data, data.installed_in(trainers):
        trainers.train_legacy(config)

Upstream's `get_data` polls `GET /batch` and makes advantages of the scores only. This one takes the same
place and returns the same tuple. This process is the hub, and no HTTP server is needed.

Groups of evaluation are not trained; the bridge counts them in `left_out_total{eval}`. A batch's records are
released when the next batch is asked for, so after the optimizer step of the batch, or at the end of the
`with` block. A trainer that is killed or fails before that gets the batch again; a group at which it fails
again and again is set aside, see `feed.py`.

Letters: B rows of one micro-batch, T its labels: the longest row of the batch less one, rounded up to a
multiple of 64.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType, TracebackType
from typing import Any, Literal, Self

import numpy as np
import torch
from torch import Tensor

import shmbridge
from shmbridge.config import check_bridge_name
from shmbridge.consumers.advantages.batch_facts import BatchFacts
from shmbridge.consumers.feed import Feed, Step
from shmbridge.consumers.trajectories import Credit, Trajectory
from shmbridge.schema import ATROPOS_NO_LOGPROB

log = logging.getLogger(__name__)

# (tokens, labels, advantages, temperatures, sampled log-probabilities), each a list of micro-batches
MicroBatches = tuple[list[Tensor], list[Tensor], list[Tensor], list[Tensor], list[Tensor] | None]

_MULTIPLE = 64
_UNTRAINED = -100  # upstream's mark
_REPLACED = ("get_data", "register_trainer", "check_atropos_api")


class BridgeData:
    """A bridge in the place of the Atropos API, for upstream's trainer; a context manager. For one thread.

    Args:
        bridge: its name; this process becomes its only consumer when the trainer registers.
        credit: how advantages are computed for rows that have none of their own.
        max_staleness: groups that are more versions behind are discarded and counted; None: no limit.
        timeout_s: seconds to wait for a batch; None: for ever, with a warning for each minute.
        lanes: environments to take from at once, as in Consumer.
    """

    def __init__(
        self,
        bridge: str,
        *,
        credit: Credit | None = None,
        max_staleness: int | None = None,
        timeout_s: float | None = None,
        lanes: int | Literal["auto"] = "auto",
    ) -> None:
        self.bridge = check_bridge_name(bridge)
        self.metrics: dict[
            str, float
        ] = {}  # of the last batch: its rows, and where their advantages came from
        self._credit = credit
        self._timeout_s = timeout_s
        self._options: dict[str, Any] = {"max_staleness": max_staleness, "lanes": lanes}
        self._feed: Feed | None = None
        self._step: Step | None = None  # handed out, and trained once the next is asked for
        self._rows = 0  # of a step
        self._said_uneven = False

    @contextmanager
    def installed_in(self, trainers: ModuleType) -> Iterator[Self]:
        """Puts this data in the place of the module's names `get_data`, `register_trainer` and
        `check_atropos_api` until the end of the block. Never blocks.

        Raises:
            AttributeError: the module lacks one of them; it is not upstream's `example_trainer.trainers`.
        """
        before = {name: getattr(trainers, name) for name in _REPLACED}
        try:
            for name in _REPLACED:
                setattr(trainers, name, getattr(self, name))
            yield self
        finally:
            for name, value in before.items():
                setattr(trainers, name, value)

    def check_atropos_api(self, url: str = "", timeout: float = 0.0) -> bool:
        """Returns True: there is no server to wait for. The arguments are upstream's, and not used."""
        return True

    def register_trainer(self, config: Any) -> None:
        """Opens the bridge and announces the run to its environments. Blocks as `Consumer`.

        Args:
            config: upstream's `TrainingConfig`; a step takes batch_size * gradient_accumulation_steps rows.

        Raises:
            ConsumerTaken: the bridge has a consumer.
        """
        rows = config.batch_size * config.gradient_accumulation_steps
        every = config.checkpoint_interval
        run = shmbridge.Run(
            batch_size=rows,
            max_token_len=config.seq_len,
            num_steps=config.training_steps,
            checkpoint_dir=config.save_path,
            save_checkpoint_interval=every if every > 0 else config.training_steps,
            wandb_group=config.wandb_group or "",
            wandb_project=config.wandb_project or "",
        )
        # upstream loads no checkpoint again, so none makes a step durable
        self._feed = Feed(
            self.bridge, rows=rows, run=run, release_at="step", credit=self._credit, **self._options
        )
        self._rows = rows

    def get_data(
        self, batch_size: int, seq_len: int, atropos_url: str = "", extract_inference_logprobs: bool = True
    ) -> tuple[list[MicroBatches], None]:
        """Releases the batch before, and returns the next one as upstream's `get_data` does.

        Blocks until it is there.

        Args:
            batch_size: rows of a micro-batch.
            seq_len, atropos_url: not used, as upstream.
            extract_inference_logprobs: whether log-probabilities are wanted.

        Returns:
            One step in a list, and None. Micro-batches in which nothing is trained are left out, and
            counted in `metrics`. Tokens and labels are int64 (B, T), labels -100 where nothing is
            trained; advantages float32, (B, 1) if no row's differ from token to token, else (1, T);
            temperatures float32 (B, 1, 1); log-probabilities float32 (B, T) in nats, 1.0 where not recorded;
            None if no row has any. The tensors are copies.

        Raises:
            ConsumerEmpty: no batch in time. Drained: none comes any more.
            RuntimeError: the trainer has not registered.
            ValueError: a row has an advantage of its own for each token, and micro-batches have several rows.
        """
        if self._feed is None:
            raise RuntimeError("get_data before register_trainer -> call register_trainer(config) first")
        self._trained()
        self._step = self._feed.take(self._timeout_s)
        rows, self.metrics = self._step.rows, self._step.metrics
        step = _step(rows, batch_size, extract_inference_logprobs)
        self.metrics["micro_batches_untrained"] = -(-len(rows) // batch_size) - len(step[0])
        self.metrics["rows"] = len(rows)
        if len(rows) != self._rows and not self._said_uneven:
            self._said_uneven = True
            log.warning(
                "a step has %d rows where batch_size x gradient_accumulation_steps are %d: groups stay "
                "whole, and upstream divides by the latter -> groups whose sizes add up to a step; said once",
                len(rows),
                self._rows,
            )
        return [step], None

    def publish_policy_version(self, version: int) -> None:
        """Tells environments the newest policy version. Never blocks. RuntimeError before registration."""
        if self._feed is None:
            raise RuntimeError("no bridge is open -> call register_trainer(config) first")
        self._feed.consumer.publish_policy_version(version)

    def close(self) -> None:
        """Closes the bridge; a batch that was not released goes to the next consumer. Idempotent."""
        self.__exit__(RuntimeError, None, None)

    def _trained(self) -> None:
        if self._feed is not None and self._step is not None:
            self._feed.trained(self._step)
        self._step = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self._trained()
        if self._feed is not None:
            self._feed.__exit__(kind, error, trace)
        self._feed = self._step = None


def _step(rows: list[Trajectory], size: int, with_logprobs: bool) -> MicroBatches:
    """Returns the micro-batches of one step; all have the same T."""
    longest = max(len(row.tokens) for row in rows)
    width = max(1, -(-(longest - 1) // _MULTIPLE)) * _MULTIPLE
    heat = BatchFacts(rows[0].batch).temperatures
    step: MicroBatches = (
        [],
        [],
        [],
        [],
        [] if with_logprobs and any(row.logprobs is not None for row in rows) else None,
    )
    for start in range(0, len(rows), size):
        some = rows[start : start + size]
        if not any(row.trained.any() for row in some):  # upstream's loss takes the maximum of its tokens
            continue
        tokens, labels = np.zeros((len(some), width), np.int64), np.full((len(some), width), _UNTRAINED)
        logprobs = np.full((len(some), width), ATROPOS_NO_LOGPROB, np.float32)
        for at, row in enumerate(some):
            length = max(len(row.tokens) - 1, 0)
            trained = row.trained[1:]
            tokens[at, : len(row.tokens)] = row.tokens[:width]
            labels[at, :length][trained] = row.tokens[1:][trained]
            if row.logprobs is not None:
                logprobs[at, :length][trained] = row.logprobs[1:][trained]
        step[0].append(torch.from_numpy(tokens))
        step[1].append(torch.from_numpy(labels))
        step[2].append(_advantages(some, width))
        step[3].append(torch.from_numpy(heat[start : start + size]).view(-1, 1, 1))
        if step[4] is not None:
            step[4].append(torch.from_numpy(logprobs))
    return step


def _advantages(rows: list[Trajectory], width: int) -> Tensor:
    """Returns (B, 1) if each row has one advantage for all of its trained tokens, else (1, T)."""
    each = [row.advantages[row.trained] for row in rows]
    if all(not values.size or values.min() == values.max() for values in each):
        return torch.tensor([[values[0] if values.size else 0.0] for values in each], dtype=torch.float32)
    if len(rows) > 1:
        meta = rows[0].meta
        raise ValueError(
            f"group {meta.group_id} of environment {meta.env_name!r} has an advantage for each token, and "
            f"upstream's loss takes these for one row at a time, not for {len(rows)} -> set batch_size=1 and "
            "gradient_accumulation_steps to the rows of a step: the gradient is the same"
        )
    found = torch.zeros(1, width)
    found[0, : len(rows[0].tokens) - 1] = torch.from_numpy(rows[0].advantages[1:])
    return found
