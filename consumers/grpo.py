"""The GRPO learner: trajectory groups from a bridge in, policy weights back out, step by step.

    python -m shmbridge.consumers.grpo --bridge run1 --model Qwen/Qwen2.5-0.5B-Instruct --steps 400

It is the hub of its bridge and trains any Hugging Face causal language model; it knows nothing of
environments. Called from the command line only; the mathematics is next door in `grpo_update.py`.

The order inside one step is the contract with everybody else: update, publish the weights, publish their
version, release the batch. A learner killed before the release leaves the batch to its successor.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

import shmbridge
from shmbridge.consumers.attention import LayoutUnfit
from shmbridge.consumers.batch_source import HubSource
from shmbridge.consumers.batch_wait import NoBatch
from shmbridge.consumers.grpo_options import parser
from shmbridge.consumers.grpo_update import Learner
from shmbridge.consumers.learner_metrics import LearnerMetrics
from shmbridge.consumers.metrics_log import MetricsLog, progress_line, say
from shmbridge.consumers.objective import BadObjective, Objective
from shmbridge.consumers.publishing import PublishWeights, first_version, weights_segment
from shmbridge.consumers.saving import Saver
from shmbridge.consumers.startup import Refused, load_learner, registration, starting_point
from shmbridge.consumers.stopping import Stopped, StopSignals
from shmbridge.consumers.training_rows import NoAdvantages
from shmbridge.consumers.wandb_log import WandbMissing, WandbRun
from shmbridge.consumers.world import ALONE

GAVE_UP = 3  # exit status: no batch came within the limits


def main(argv: Sequence[str] | None = None) -> int:
    """Run the learner; return the exit status. Blocks until all steps are done or a signal comes."""
    options = parser().parse_args(argv)
    options.run_dir = options.run_dir or Path("runs") / options.bridge
    with StopSignals() as stops:
        try:
            run(options, stops)
        except Stopped as stopped:
            say(f"stopped by {stopped}")
            return 128 + stopped.signum
        except NoBatch as error:
            print(f"grpo: {error}", file=sys.stderr)
            return GAVE_UP
        except (Refused, BadObjective, LayoutUnfit, NoAdvantages, WandbMissing, shmbridge.ShmBridgeError) as error:
            print(f"grpo: {error}", file=sys.stderr)
            return 1
    return 0


def run(options: argparse.Namespace, stops: StopSignals) -> None:
    """Load, train, save. Blocks; raises `BadObjective`, `Refused`, `Stopped`, `NoBatch`, `NoAdvantages`, or what the bridge raises."""
    Objective.from_options(options)  # options that do not go together are refused before anything is loaded
    source = starting_point(options)
    with WandbRun(options, source is not None, say) if options.wandb else nullcontext() as wandb_run:
        train(options, source, wandb_run, stops)


def train(
    options: argparse.Namespace, source: Path | None, wandb_run: WandbRun | None, stops: StopSignals
) -> None:
    """Load from a checkpoint or the model that the options name, train, save. Blocks; raises as `run`."""
    learner, tokenizer, progress = load_learner(source, options, ALONE)
    saver = Saver(options.run_dir / "checkpoints", learner, tokenizer, options.keep)
    with (
        shmbridge.Consumer(
            options.bridge,
            run=registration(options, learner.step),
            policy=options.policy,
            allocation_wait_s=options.allocation_wait,
        ) as consumer,
        weights_segment(options, learner.model) as (publish, last_version),
        MetricsLog(options.run_dir / "metrics.jsonl", wandb_run) as log,
    ):
        version = first_version(progress.policy_version, consumer.policy_version, last_version)
        publish(version)
        consumer.publish_policy_version(version)
        say(f"bridge {options.bridge}: step {learner.step} of {options.steps}, version {version}, waiting")

        batches = HubSource(consumer, options, stops)
        try:
            learn(learner, batches, publish, saver, log, options, stops)
        except (Stopped, NoBatch, NoAdvantages, shmbridge.ShmBridgeError):
            saver.save(consumer.policy_version)  # still the hub: no successor starts from less
            raise
        saver.save(consumer.policy_version)
        say(f"done: {learner.step} of {options.steps} steps, version {consumer.policy_version}")


def learn(
    learner: Learner,
    source: HubSource,
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
    with source.batches() as batches:
        waiting_since = time.monotonic()
        for batch in batches:
            begun = time.monotonic()
            aged = describe.taken(batch, int(begun * 1e9), source.policy_version)
            measured = learner.accumulate(batch, source.policy_version) | aged
            computed = time.monotonic()
            version = source.policy_version + 1
            with stops.held():  # from the update to the release all or nothing
                metrics = learner.apply() | {"policy_version": version} | measured
                applied = time.monotonic()
                publish_weights(version)
                source.publish_version(version)
                published = time.monotonic()
                batch.release()
                metrics |= {
                    "wait_s": begun - waiting_since,
                    "forward_backward_s": computed - begun,
                    "update_s": applied - computed,
                    "publish_s": published - applied,
                    **describe.totals(measured, source.stats()),
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


if __name__ == "__main__":
    raise SystemExit(main())
