"""The GRPO learner: trajectory groups from a bridge in, policy weights back out, step by step.

    python -m shmbridge.consumers.grpo --bridge run1 --model Qwen/Qwen2.5-0.5B-Instruct --steps 400

It is the hub of its bridge and trains any Hugging Face causal language model. Run it from the command line,
or with torchrun once per device. `learner/train/grpo_update.py` has the mathematics, and
`learner/train/training_step.py` the order inside one step, which is a contract.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace

from shmbridge.cli.base import explain_missing

if __name__ == "__main__":
    explain_missing("grpo", "learner")

import shmbridge
from shmbridge.cli.base import refuse, run_program
from shmbridge.consumers.advantages.credit import NoAdvantages
from shmbridge.consumers.feed import lost_peer
from shmbridge.consumers.learner import Refusal, Untrainable
from shmbridge.consumers.learner.config.checks import refuse_idle, refuse_unreachable_limits
from shmbridge.consumers.learner.config.flags import parse
from shmbridge.consumers.learner.config.options import LearnerConfig
from shmbridge.consumers.learner.data.sources import HubSource, NoBatch, RankSource, opened
from shmbridge.consumers.learner.report.logs import MetricsLog, TensorboardLog, WandbRun, progress
from shmbridge.consumers.learner.report.samples import SAMPLES_FILE, SampleLog
from shmbridge.consumers.learner.stopping import Stopped, StopSignals
from shmbridge.consumers.learner.train.grpo_update import Learner
from shmbridge.consumers.learner.train.objective import Objective
from shmbridge.consumers.learner.train.publishing import (
    PublishWeights,
    engine_pushes,
    first_version,
    weights_segment,
)
from shmbridge.consumers.learner.train.starting_point import (
    Saver,
    Start,
    agreed_start,
    load_learner,
    registration,
    require_unchanged,
    write_options,
)
from shmbridge.consumers.learner.train.training_step import BrokenStep, RunHooks, TrainingStep, broken_step
from shmbridge.consumers.learner.world import PeerFailed, PeerLost, World, device_kind, joined, say, speaks

UNTRAINABLE = (NoAdvantages, Untrainable)  # errors of a batch that cannot be trained
REFUSALS = (NoAdvantages, Refusal, shmbridge.ShmBridgeError)
GAVE_UP = 3  # exit status: no batch came within the limits
PEER_LOST = 4  # exit status: another rank is gone
BROKEN = 5  # exit status: a step could not be computed


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the learner and returns the exit status. Blocks until all steps are done or a signal arrives."""
    config = parse(argv)
    with StopSignals() as stops:
        try:
            run(config, stops)
        except Stopped as stopped:
            say(f"stopped by {stopped}")
            return 128 + stopped.signum
        except NoBatch as error:
            if speaks():
                refuse("grpo", error)
            return GAVE_UP
        except PeerLost as error:
            refuse("grpo", error)
            return PEER_LOST
        except BrokenStep as error:
            print(error.details, end="", file=sys.stderr)
            refuse("grpo", error)
            return BROKEN
        except REFUSALS as error:
            refuse("grpo", error, _waits(config.run.bridge) if isinstance(error, UNTRAINABLE) else "")
            return 1
    return 0


def run(config: LearnerConfig, stops: StopSignals) -> None:
    """Joins the other ranks, loads, trains and saves. Blocks.

    Raises:
        Stopped, NoBatch, PeerLost, BrokenStep, and REFUSALS.
    """
    refuse_idle(config)
    refuse_unreachable_limits(config)
    Objective.of(config)  # refuses incompatible options before anything is loaded
    with joined(device_kind(config.compute.device), config.ranks.process_group_timeout) as world:
        start = agreed_start(config, world)
        with (
            WandbRun(config, start.source is not None, say)
            if config.logging.wandb and world.is_main
            else nullcontext() as wandb_run,
            TensorboardLog(config.run_dir, start.checkpoint, say)
            if config.logging.tensorboard and world.is_main
            else nullcontext() as tensorboard,
            MetricsLog(config.run_dir / "metrics.jsonl", wandb_run, tensorboard)
            if world.is_main
            else nullcontext() as log,
        ):
            train(config, start, world, log, stops)


def train(
    config: LearnerConfig, start: Start, world: World, log: MetricsLog | None, stops: StopSignals
) -> None:
    """Loads the checkpoint, or the model of the configuration; trains; saves. Blocks; raises as `run`."""
    bridge, steps = config.run.bridge, config.run.steps
    learner, tokenizer, done = load_learner(start.checkpoint, config, world)
    done, begun_at = replace(done, run_id=start.run_id), learner.step
    saver = Saver(config.run_dir / "checkpoints", learner, tokenizer, config.checkpoints.keep, done)
    around = RunHooks(config.evaluation, config.early_stop, saver, tokenizer)
    if log is not None and (every := config.logging.sample_every):
        path = config.run_dir / SAMPLES_FILE
        around.samples = SampleLog(path, every, config.run.seed, tokenizer, say, tuple(log.others))
        log.others.append(around.samples)
    with (
        opened(config, registration(config, learner.step), around.screen, world, stops) as batches,
        weights_segment(bridge, config.weights, config.compute.precision, learner.model, world) as (
            publish,
            last_version,
        ),
        engine_pushes(bridge, config.weights, world) as around.engines,
        stops.noted() if world.size > 1 else nullcontext(),  # all ranks leave together
    ):
        around.screen.reported = batches.take_evaluations
        with world.together():
            if world.is_main:
                require_unchanged(start, bridge)
                if start.source is not None:
                    write_options(config, start)
        version = world.broadcast(first_version(done.policy_version, batches.policy_version, last_version))
        publish(version)
        batches.begin_run(version, start.run_id, done.policy_version if start.source else None)
        around.engines.begin(version)
        if begun_at < steps:
            say(f"bridge {bridge}: step {begun_at} of {steps}, version {version}, waiting")
        else:
            say(
                f"bridge {bridge}: step {begun_at} is reached and --steps is {steps}, so nothing is trained; "
                f"version {version} has these weights -> raise --steps to go on"
            )
        try:
            learn(learner, batches, publish, saver, log, config, stops, around)
        except (Stopped, NoBatch, *UNTRAINABLE, PeerFailed, shmbridge.ShmBridgeError):
            # save while still the hub, so that a successor starts from this step
            save_all(saver, batches)
            raise
        except REFUSALS:
            raise
        except Exception as error:
            if world.size > 1 and lost_peer(error):
                say(saver.rescue(batches.training_version))
                raise
            raise broken_step(
                error, config.compute, learner, lambda: saver.rescue(batches.training_version)
            ) from None
        save_all(saver, batches)
        if learner.step > begun_at:
            say(f"done: {learner.step} of {steps} steps, version {batches.policy_version}")


def save_all(saver: Saver, batches: HubSource | RankSource) -> None:
    """Saves the last finished step; if that is all, shared memory need not keep it. Raises as `run`."""
    saver.save(batches.training_version)
    if saver.saved:
        batches.saved()
        batches.end_run()


def learn(
    learner: Learner,
    source: HubSource | RankSource,
    publish_weights: PublishWeights,
    saver: Saver,
    log: MetricsLog | None,
    config: LearnerConfig,
    stops: StopSignals,
    around: RunHooks | None = None,
) -> None:
    """Takes batches until all steps are done or the bridge is drained. Blocks; raises as `run`.

    Args:
        log: gets each step's metrics, over all ranks; None on all ranks but one.
        around: evaluation and early stop; None: from the configuration.
    """
    if learner.step >= config.run.steps:
        return
    around = around or RunHooks(config.evaluation, config.early_stop, saver)
    step = TrainingStep(learner, source, publish_weights, saver, log, config, around)
    bar = log is not None and config.logging.progress
    with (
        source.batches() as batches,
        progress(config.run.steps, learner.step, config.logging.log_every, bar=bar) as show,
    ):
        reason = None
        while reason is None:
            batch = next(batches, None)
            if batch is not None:
                try:
                    step.take(batch)
                except Exception as error:
                    if not step.begin_again(error):
                        raise
                    continue
                if not step.full:
                    continue
            elif not step.begun:  # the bridge is drained; a begun step is the last one
                break
            step.settle()
            with stops.held():  # update to release is atomic with respect to signals
                metrics = step.make()
            if log is not None:
                show(metrics)
            # "" after the last step; None to continue
            reason = "" if learner.step >= config.run.steps else around.early_stop.reason(metrics)
            reason = learner.world.broadcast(reason)
        if reason and log is not None:
            say(f"stopped early: {reason}")
        step.finish()  # the hub must still be open to receive the release


def _waits(bridge: str) -> str:
    """Returns advice about a batch that cannot be trained; the error itself names the option to change."""
    return (
        "that batch is not released: with the same options --resume ends at it again, and `shmbridge clean "
        f"{bridge} --yes`, once the environments have ended, throws away all that waits"
    )


if __name__ == "__main__":
    raise SystemExit(run_program("learner", main))
