"""The GRPO learner: trajectory groups from a bridge in, policy weights back out, step by step.

    python -m shmbridge.consumers.grpo --bridge run1 --model Qwen/Qwen2.5-0.5B-Instruct --steps 400

It is the hub of its bridge and trains any Hugging Face causal language model; it knows nothing of
environments. Called from the command line only; the mathematics is next door in `grpo_update.py`.

The order inside one step is the contract with everybody else: update, publish the weights, publish their
version, release the batch. A learner killed before the release leaves the batch to its successor.
"""

from __future__ import annotations

import argparse
import functools
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import shmbridge
from shmbridge.consumers import checkpoint
from shmbridge.consumers.batch_wait import BatchWait, NoBatch, patience_of
from shmbridge.consumers.checkpoint import Progress
from shmbridge.consumers.grpo_options import parser
from shmbridge.consumers.grpo_update import Learner, Objective, learning_rate_at
from shmbridge.consumers.learner_metrics import LearnerMetrics
from shmbridge.consumers.metrics_log import MetricsLog, progress_line
from shmbridge.consumers.stopping import Stopped, StopSignals
from shmbridge.consumers.training_rows import NoAdvantages
from shmbridge.consumers.wandb_log import WandbMissing, WandbRun
from shmbridge.weights import WeightsWriter

GAVE_UP = 3  # exit status: no batch came within the limits

PublishWeights = Callable[[int], None]  # takes a version; returns once samplers can see the weights


class Refused(Exception):
    """The learner cannot start like this; the message says why and what to do."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the learner; return the exit status. Blocks until all steps are done or a signal comes."""
    options = parser().parse_args(argv)
    options.run_dir = options.run_dir or Path("runs") / options.bridge
    with StopSignals() as stops:
        try:
            run(options, stops)
        except Stopped as stopped:
            _say(f"stopped by {stopped}")
            return 128 + stopped.signum
        except NoBatch as error:
            print(f"grpo: {error}", file=sys.stderr)
            return GAVE_UP
        except (Refused, NoAdvantages, WandbMissing, shmbridge.ShmBridgeError) as error:
            print(f"grpo: {error}", file=sys.stderr)
            return 1
    return 0


def run(options: argparse.Namespace, stops: StopSignals) -> None:
    """Load, train, save. Blocks; raises `Refused`, `Stopped`, `NoBatch`, `NoAdvantages`, or what the bridge raises."""
    source = starting_point(options)
    with WandbRun(options, source is not None, _say) if options.wandb else nullcontext() as wandb_run:
        train(options, source, wandb_run, stops)


def train(
    options: argparse.Namespace, source: Path | None, wandb_run: WandbRun | None, stops: StopSignals
) -> None:
    """Load from a checkpoint or the model that the options name, train, save. Blocks; raises as `run`."""
    if options.threads:
        torch.set_num_threads(options.threads)
    model, tokenizer = load_model(source or options.model, options)
    learner = new_learner(model, options)
    progress = Progress(step=0, policy_version=-1)
    if source is not None:
        progress = checkpoint.load_progress(source)
        checkpoint.load_optimizer(source, model, learner.optimizer)
        learner.step = progress.step
    torch.manual_seed(options.seed + learner.step)

    saver = Saver(options.run_dir / "checkpoints", learner, tokenizer, options.keep)
    with (
        shmbridge.Consumer(
            options.bridge,
            run=registration(options, learner.step),
            policy=options.policy,
            allocation_wait_s=options.allocation_wait,
        ) as consumer,
        weights_segment(options, model) as (publish, last_version),
        MetricsLog(options.run_dir / "metrics.jsonl", wandb_run) as log,
    ):
        version = first_version(progress.policy_version, consumer.policy_version, last_version)
        publish(version)
        consumer.publish_policy_version(version)
        _say(f"bridge {options.bridge}: step {learner.step} of {options.steps}, version {version}, waiting")

        try:
            learn(learner, consumer, publish, saver, log, options, stops)
        except (Stopped, NoBatch, NoAdvantages, shmbridge.ShmBridgeError):
            saver.save(consumer.policy_version)  # still the hub: no successor starts from less
            raise
        saver.save(consumer.policy_version)
        _say(f"done: {learner.step} of {options.steps} steps, version {consumer.policy_version}")


def starting_point(options: argparse.Namespace) -> Path | None:
    """Return the checkpoint to go on from, or None for a fresh start.

    Raises:
        Refused: a fresh start in a run directory that already holds checkpoints, which would mix two runs.
    """
    found = checkpoint.complete(options.run_dir / "checkpoints")
    if found and not options.resume:
        raise Refused(
            f"{options.run_dir} already holds a run up to {found[-1].name}; "
            "--resume goes on with it, another --run-dir starts afresh"
        )
    return found[-1] if found else None


def load_model(source: Path | str, options: argparse.Namespace) -> tuple[Any, Any]:
    """Return the model, in float32 on its device, and its tokenizer or None. Blocks for the disk."""
    device = options.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        model = AutoModelForCausalLM.from_pretrained(source).float().to(device)
    except (OSError, ValueError) as error:  # a wrong path or name: the reason without a library's traceback
        raise Refused(f"cannot load a model from {source}: {str(error).splitlines()[0]}") from error
    if options.gradient_checkpointing:
        model.gradient_checkpointing_enable()
        model.train()
    try:
        tokenizer = AutoTokenizer.from_pretrained(source)
    except Exception as error:  # the library raises what it likes here, and training needs none
        _say(f"no tokenizer beside {source}, so none in the checkpoints: {type(error).__name__}")
        tokenizer = None
    return model, tokenizer


def new_learner(model: Any, options: argparse.Namespace) -> Learner:
    """Return a learner at step 0 with the objective and the optimizer of the command line."""
    objective = Objective(
        clip_low=options.clip_low,
        clip_high=options.clip_high,
        entropy=options.entropy,
        temperature=options.temperature,
        micro_tokens=options.micro_tokens,
        precision=getattr(torch, options.precision),
        use_advantages=options.use_advantages,
        fallback_to_grpo=options.fallback_to_grpo,
    )
    rate = functools.partial(learning_rate_at, peak=options.lr, warmup=options.warmup, steps=options.steps)
    return Learner(
        model, objective, rate, weight_decay=options.weight_decay, max_grad_norm=options.max_grad_norm
    )


def registration(options: argparse.Namespace, step: int) -> shmbridge.Run:
    """Return what environments are told about this run when they register."""
    return shmbridge.Run(
        batch_size=options.groups * options.group_size,
        max_token_len=options.max_token_len,
        num_steps=options.steps,
        starting_step=step,
        checkpoint_dir=str(options.run_dir / "checkpoints"),
        save_checkpoint_interval=options.save_every,
        wandb_group=options.wandb_group,
        wandb_project=options.wandb_project,
    )


def learn(
    learner: Learner,
    consumer: shmbridge.Consumer,
    publish_weights: PublishWeights,
    saver: Saver,
    log: MetricsLog,
    options: argparse.Namespace,
    stops: StopSignals,
) -> None:
    """Take batches until all steps are done or the bridge is drained. Blocks; raises as `run`."""
    if learner.step >= options.steps:
        return
    describe = LearnerMetrics(options.groups)
    batches = consumer.batches(
        groups=options.groups, layout="packed", max_staleness=options.max_staleness, prefetch=1, hold="step"
    )
    missing = functools.partial(who_is_missing, consumer, options.groups)
    with BatchWait(batches, patience_of(options), missing, _say) as waited_for:
        waiting_since = time.monotonic()
        for batch in waited_for:
            stops.check()
            begun = time.monotonic()
            aged = describe.taken(batch, int(begun * 1e9), consumer.policy_version)
            measured = learner.accumulate(batch) | aged
            computed = time.monotonic()
            version = consumer.policy_version + 1
            with stops.held():  # from the update to the release all or nothing
                metrics = learner.apply() | {"policy_version": version} | measured
                applied = time.monotonic()
                publish_weights(version)
                consumer.publish_policy_version(version)
                published = time.monotonic()
                batch.release()
                metrics |= {
                    "wait_s": begun - waiting_since,
                    "forward_backward_s": computed - begun,
                    "update_s": applied - computed,
                    "publish_s": published - applied,
                    **describe.totals(measured, consumer.stats()),
                    "time": time.time(),
                }
                log.append(metrics)
                if learner.step % options.save_every == 0:
                    saver.save(version)
            if learner.step % options.log_every == 0 or learner.step >= options.steps:
                print(progress_line(metrics, options.steps), flush=True)
            if learner.step >= options.steps:
                return
            waiting_since = time.monotonic()


def who_is_missing(consumer: shmbridge.Consumer, groups: int) -> str:
    """Return what a batch waits for, in a few words. Any thread; never blocks."""
    stats = consumer.stats()
    live, dead = int(stats["lanes_live"]), int(stats["lanes_dead"])
    lanes = (
        f"{live} of {live + dead} lanes have a living producer"
        if live + dead
        else "no environment has a lane"
    )
    state = ", the bridge is paused" if consumer.paused else ""
    return f"{lanes}, {int(stats['queue_groups'])} of {groups} groups are there{state}"


def first_version(*seen: int | None) -> int:
    """Return a version above all seen: a version names one set of weights, whoever published before."""
    return max((version for version in seen if version is not None), default=-1) + 1


@contextmanager
def weights_segment(options: argparse.Namespace, model: Any) -> Iterator[tuple[PublishWeights, int | None]]:
    """Yield a function that publishes the model's weights, and the last version in the segment so far."""
    if options.no_weights:
        yield (lambda version: None), None
        return
    dtype = getattr(torch, options.precision)
    writer = WeightsWriter(options.bridge)

    def publish(version: int) -> None:
        parameters = model.named_parameters()
        writer.publish(version, [(name, p.detach().to("cpu", dtype).contiguous()) for name, p in parameters])

    try:
        yield publish, writer.last_version
    finally:
        writer.close()


class Saver:
    """Saves each finished step at most once.

    Args:
        folder: where the checkpoints of this run lie.
        learner: whose state is saved.
        tokenizer: saved beside the model; None for none.
        keep: newest checkpoints to leave.
    """

    def __init__(self, folder: Path, learner: Learner, tokenizer: Any, keep: int) -> None:
        self._folder = folder
        self._learner = learner
        self._tokenizer = tokenizer
        self._keep = keep
        self._saved_step = learner.step

    def save(self, policy_version: int) -> None:
        """Write a checkpoint unless this step has one. Blocks for the disk."""
        learner = self._learner
        if learner.step == self._saved_step:
            return
        progress = Progress(step=learner.step, policy_version=policy_version)
        checkpoint.save(
            self._folder, progress, learner.model, self._tokenizer, learner.optimizer, keep=self._keep
        )
        self._saved_step = learner.step


def _say(text: str) -> None:
    print(f"grpo: {text}", flush=True)


if __name__ == "__main__":
    raise SystemExit(main())
