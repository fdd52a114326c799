"""The thread that owns a policy: it collects requests into batches and loads new weights in between.

Used by `policy_server.py` from an asyncio loop, which it never blocks.

Weights change only here and only between batches, so every completion is sampled under one policy version.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

import torch

import shmbridge
from shmbridge.consumers.engines.published_tensors import copy_into
from shmbridge.consumers.pinned import PinnedWeights
from shmbridge.consumers.policy_server.sampler import PolicyModel, Row, Sampling, TokenLogprobs
from shmbridge.weights import WeightsReader

logger = logging.getLogger(__name__)

# While idle, it checks for new weights this often: one load from shared memory.
_IDLE_TICK_S = 0.05


class EngineClosed(RuntimeError):
    """The engine ended before it answered."""


@dataclass(frozen=True)
class Question:
    """One request: `answers` rows for each prompt."""

    prompts: Sequence[Sequence[int]]
    sampling: Sampling
    answers: int = 1
    prompt_logprobs: int | None = None  # score the prompts too, with this many alternatives

    @property
    def row_count(self) -> int:
        """Lines this question takes of a batch."""
        return len(self.prompts) * self.answers


@dataclass(frozen=True)
class Reply:
    """Finished rows, prompt by prompt, and the one policy version that sampled them."""

    rows: list[Row]
    version: int
    prompt_logprobs: list[list[TokenLogprobs | None]]  # per prompt; empty unless asked for


@dataclass(frozen=True)
class EngineStats:
    """Totals since the start."""

    batches_total: int
    rows_total: int
    tokens_total: int
    weights_loaded_total: int
    refused_version: int | None = None  # the newest version, if it does not fit this model
    last_error: str | None = None  # why


@dataclass(eq=False)
class _Job:
    question: Question
    future: Future[Reply] = field(default_factory=Future)  # running once it is in a batch
    arrived: float = field(default_factory=time.monotonic)
    rows: list[Row] = field(init=False)

    def __post_init__(self) -> None:
        asked = self.question
        self.rows = [
            Row(prompt, asked.sampling, None if asked.sampling.seed is None else asked.sampling.seed + index)
            for prompt in asked.prompts
            for index in range(asked.answers)
        ]

    def abandon(self) -> None:
        for row in self.rows:
            row.abandon()


class PolicyEngine:
    """Batches questions over one policy model in a thread of its own.

    Args:
        policy: the model; the engine's thread alone touches it after `start`.
        follower: loads new weights into it between batches; None keeps its weights.
        window_s: how long the oldest request waits for others to join its batch.
        max_rows: lines of one batch; a larger question is refused.
    """

    def __init__(
        self,
        policy: PolicyModel,
        follower: WeightsFollower | None = None,
        *,
        window_s: float = 0.010,
        max_rows: int = 256,
    ) -> None:
        self.max_rows = max_rows
        self._policy = policy
        self._follower = follower
        self._window_s = window_s
        self._changed = threading.Condition()
        self._waiting: deque[_Job] = deque()
        self._running: list[_Job] = []
        self._closing = False
        self._batches = self._rows = self._tokens = 0
        self._thread = threading.Thread(target=self._run, name="policy-engine", daemon=True)

    @property
    def version(self) -> int:
        """Policy version of the next batch, as far as known; never blocks."""
        return self._policy.version

    @property
    def alive(self) -> bool:
        """Whether the engine's thread is running."""
        return self._thread.is_alive() and not self._closing

    def stats(self) -> EngineStats:
        """Returns the totals; never blocks."""
        follower = self._follower
        if follower is None:
            return EngineStats(self._batches, self._rows, self._tokens, 0)
        refused, why = follower.refused or (None, None)
        return EngineStats(self._batches, self._rows, self._tokens, follower.loaded_total, refused, why)

    def start(self) -> None:
        """Starts the thread. Never blocks."""
        self._thread.start()

    async def ask(self, question: Question) -> Reply:
        """Answers one question; cancelling the call abandons its rows and no others.

        Raises:
            ValueError: more rows than a batch has; prompts are the caller's to check.
            EngineClosed: the engine ended first.
        """
        if question.row_count > self.max_rows:
            raise ValueError(f"{question.row_count} answers asked for at once; a batch has {self.max_rows}")
        job = _Job(question)
        with self._changed:  # held for a few instructions by the other side: this does not stop the loop
            if self._closing:
                raise EngineClosed("the policy engine is closed")
            self._waiting.append(job)
            self._changed.notify()
        try:
            return await asyncio.wrap_future(job.future)
        except asyncio.CancelledError:
            job.abandon()
            raise

    def close(self) -> None:
        """Abandons unanswered requests and ends the thread. Blocks for at most one token."""
        with self._changed:
            self._closing = True
            for job in self._running:
                job.abandon()
            self._changed.notify()
        if self._thread.is_alive():
            self._thread.join()

    # --- everything below runs in the engine's thread ------------------------------------------------------

    def _run(self) -> None:
        try:
            while (jobs := self._collect()) is not None:
                self._take_weights()
                if jobs:
                    self._answer(jobs)
                    self._running = []
        finally:
            self._closing = True
            self._dismiss()
            if self._follower is not None:
                self._follower.close()

    def _collect(self) -> list[_Job] | None:
        """Waits for the next batch: no jobs after an idle tick, None once closing."""
        with self._changed:
            if not self._waiting and not self._closing:
                self._changed.wait(_IDLE_TICK_S)
            while self._waiting and not self._closing and not self._full():
                patience = self._waiting[0].arrived + self._window_s - time.monotonic()
                if patience <= 0:
                    break
                self._changed.wait(patience)
            if self._closing:
                return None
            self._running = self._next_jobs()
            return self._running

    def _full(self) -> bool:
        return sum(job.question.row_count for job in self._waiting) >= self.max_rows

    def _next_jobs(self) -> list[_Job]:
        jobs: list[_Job] = []
        room = self.max_rows
        while self._waiting and self._waiting[0].question.row_count <= room:
            job = self._waiting.popleft()
            if job.future.set_running_or_notify_cancel():
                jobs.append(job)
                room -= job.question.row_count
        return jobs

    def _take_weights(self) -> None:
        if self._follower is not None and (version := self._follower.refresh()) is not None:
            self._policy.version = version

    def _answer(self, jobs: list[_Job]) -> None:
        try:
            replies = self._sample(jobs)
        except Exception as error:  # any error of torch belongs to the request that caused it
            if len(jobs) > 1:
                for job in jobs:
                    self._answer([job])
                return
            logger.exception("a batch of one request failed")
            jobs[0].future.set_exception(error)
            return
        self._count(jobs)
        for job, reply in zip(jobs, replies, strict=True):
            if any(row.finish_reason is None for row in reply.rows):
                job.future.set_exception(EngineClosed("the answer was abandoned half-way"))
            else:
                job.future.set_result(reply)

    def _sample(self, jobs: list[_Job]) -> list[Reply]:
        for job in jobs:
            _rewind(job.rows)
        self._policy.generate([row for job in jobs for row in job.rows])
        return [Reply(job.rows, self._policy.version, self._score(job.question)) for job in jobs]

    def _score(self, question: Question) -> list[list[TokenLogprobs | None]]:
        if question.prompt_logprobs is None:
            return []
        return [self._policy.score(prompt, question.prompt_logprobs) for prompt in question.prompts]

    def _count(self, jobs: list[_Job]) -> None:
        rows = [row for job in jobs for row in job.rows]
        self._batches += 1
        self._rows += len(rows)
        self._tokens += sum(len(row.token_ids) for row in rows)

    def _dismiss(self) -> None:
        waiting = [job for job in self._waiting if job.future.set_running_or_notify_cancel()]
        for job in (*self._running, *waiting):
            if not job.future.done():
                job.future.set_exception(EngineClosed("the policy server is stopping"))
        self._waiting.clear()


def _rewind(rows: Sequence[Row]) -> None:
    """Drops the tokens that a failed batch has sampled so far."""
    for row in rows:
        row.token_ids.clear()
        row.logprobs.clear()
        row.alternatives.clear()
        row.text, row.finish_reason = "", None


logger = logging.getLogger(__name__)

_LEASE_TIMEOUT_S = 1.0


class WeightsFollower:
    """Copies each new version into a module; for one thread.

    Args:
        source: where versions come from; a missing segment, or one whose learner died, is no error.
        module: the torch module; changed in place, whole versions only.
    """

    def __init__(self, source: WeightsReader, module: torch.nn.Module) -> None:
        self._source = source
        self._module = module
        self._pinned = PinnedWeights(source)
        self._considered: int | None = None  # a version that does not fit is not tried again at every batch
        self._loaded: int | None = None  # what the module holds: the next version is copied where it differs
        self._complaint = ""
        self._refused: tuple[int, str] | None = None
        self.loaded_total = 0

    @property
    def refused(self) -> tuple[int, str] | None:
        """The last version tried, and why it was refused; None if it was loaded. Any thread."""
        return self._refused

    def refresh(self) -> int | None:
        """Loads the newest version if it differs; returns it, or None if nothing changed.

        Blocks for the copy. An error of the segment is logged once and leaves the module unchanged.
        """
        try:
            newest = self._source.version
            if newest is None or newest == self._considered:
                return None
            return self._load()
        except shmbridge.ShmBridgeError as error:
            if (complaint := str(error)) != self._complaint:
                logger.warning("weights stay as they are: %s", complaint)
                self._complaint = complaint
            return None

    def _load(self) -> int:
        began = time.perf_counter()
        with self._source.lease(timeout_s=_LEASE_TIMEOUT_S) as weights:
            self._considered = weights.version
            self._pinned.pin(next(self._module.parameters()).device)
            changed = None if self._loaded is None else weights.changed_since(self._loaded)
            self._loaded = None
            try:
                weights.require_finite()
                copy_into(self._module, weights.tensors, weights.dtypes, only=changed)
            except shmbridge.WeightsMismatch as error:
                self._refused = weights.version, str(error)
                raise
            self._loaded, self._refused = weights.version, None
        self.loaded_total += 1
        self._complaint = ""
        logger.info("policy version %d in %.1f ms", weights.version, (time.perf_counter() - began) * 1e3)
        return weights.version

    def close(self) -> None:
        """Closes the segment; never blocks."""
        self._pinned.close()
        self._source.close()
