"""Where a run starts, and what it leaves to start from: its checkpoints.

A run starts at its own checkpoint, at the weights of its bridge, or at the configured model. Rank 0 decides,
before anything is loaded to a device or published. A bridge whose versions hold trained steps is never
silently given the model as it began: its run's checkpoint, or an option of the user, is needed.
"""

from __future__ import annotations

import dataclasses
import secrets
import shutil
import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar

import shmbridge
from shmbridge.consumers import pretrained
from shmbridge.consumers.engines.published_tensors import copy_into
from shmbridge.consumers.feed import BridgeAhead, bridge_info, trained_as
from shmbridge.consumers.learner import Metrics, Refusal, checkpoint
from shmbridge.consumers.learner.checkpoint import Consumed, Progress, rng_state, seed_all, set_rng_state
from shmbridge.consumers.learner.config.checks import changes_on_resume
from shmbridge.consumers.learner.config.flags import CONFIG_FILE, noted_changes, read_earlier, write_config
from shmbridge.consumers.learner.config.options import ComputeConfig, LearnerConfig
from shmbridge.consumers.learner.data.microbatch import Layout
from shmbridge.consumers.learner.model import attention
from shmbridge.consumers.learner.model.forward import chunk_tokens_for
from shmbridge.consumers.learner.model.load import (
    Reference,
    StartupError,
    device_of,
    load_model,
    load_reference,
    load_tokenizer,
)
from shmbridge.consumers.learner.model.optimizer import rate_schedule
from shmbridge.consumers.learner.model.sharding import Parallel, is_sharded, parallel_of
from shmbridge.consumers.learner.report.logs import write_facts
from shmbridge.consumers.learner.train.grpo_update import Learner, Objective
from shmbridge.consumers.learner.world import World, device_kind, say
from shmbridge.weights import lease_from_outside


class CannotSave(Refusal):
    """A checkpoint could not be written; the message says which and why."""


class Saver:
    """Saves each finished step at most once, and keeps the newest; `progress` is of a resumed checkpoint."""

    def __init__(
        self, folder: Path, learner: Learner, tokenizer: Any, keep: int, progress: Progress | None = None
    ) -> None:
        self.consumed = Consumed(progress or Progress(step=0, policy_version=-1))
        self._folder = folder
        self._learner = learner
        self._tokenizer = tokenizer
        self._keep = keep
        self._saved_step = self._taken_step = learner.step

    @property
    def consistent(self) -> bool:
        """Whether a step ended with all its batches recorded: only then may it be saved."""
        return self._learner.consistent and self._taken_step == self._learner.step

    @property
    def saved(self) -> bool:
        """Whether a checkpoint holds all that was trained; also if no step was."""
        return self._learner.step == self._saved_step

    def took(self, batches: Iterable[shmbridge.Batch], measured: Metrics) -> None:
        """Records this rank's batches of a step, with its metrics over all ranks. Blocks for the others."""
        metas: list[Any] = [meta for batch in batches for meta in batch.meta]
        if self._learner.world.size > 1:
            said = self._learner.world.all_gather(
                sorted({(meta.producer_id, meta.sequence) for meta in metas})
            )
            metas = [
                SimpleNamespace(producer_id=who, sequence=number) for each in said for who, number in each
            ]
        numbers = {name: int(measured[name]) for name in ("groups", "trajectories", "tokens")}
        self.consumed.took(metas, **numbers)
        self._taken_step = self._learner.step

    def save(self, policy_version: int) -> None:
        """Writes a checkpoint of a finished step that has none. Every rank calls it, rank 0 writes.

        Blocks until it is on disk.

        Raises:
            CannotSave: writing failed; raised on all ranks.
        """
        learner = self._learner
        if learner.step == self._saved_step or not self.consistent:
            return
        failure = ""
        try:
            self._write(policy_version)
        except (OSError, SafetensorError) as error:
            failure = str(error)
        if failure := learner.world.broadcast(failure):  # no rank may release batches that are not on disk
            raise CannotSave(
                f"no checkpoint of step {learner.step} in {self._folder}: {failure} -> make room there, "
                "then --resume"
            )
        self._saved_step = learner.step

    def rescue(self, policy_version: int) -> str:
        """Saves the last finished step after an error, without other ranks. Blocks; never raises.

        Returns a short text for the user: which step can be resumed.
        """
        learner = self._learner
        newest = (
            f"step {self._saved_step} is the newest checkpoint"
            if self._saved_step
            else "there is no checkpoint"
        )
        if learner.step == self._saved_step:
            return f"{newest}, and no step was finished since"
        if not self.consistent:
            return f"the update broke off, so nothing of it is saved: {newest}"
        if is_sharded(learner.model):
            return f"a sharded model is saved by all ranks together: {newest}"
        if not learner.world.is_main:
            return f"rank 0 saves step {learner.step}"
        try:
            self._write(policy_version)
        except Exception as error:  # the original error must be reported, whatever fails here
            return f"step {learner.step} could not be saved ({type(error).__name__}: {error}): {newest}"
        self._saved_step = learner.step
        return f"step {learner.step} is saved"

    def _write(self, policy_version: int) -> None:
        learner = self._learner
        checkpoint.save(
            self._folder,
            self.consumed.progress(learner.step, policy_version),
            learner.model,
            self._tokenizer,
            learner.optimizer,
            keep=self._keep,
            write=learner.world.is_main,
            rng=rng_state(),
        )


@dataclass(frozen=True)
class Start:
    """Where a run starts.

    Attributes:
        source: the checkpoint to load; None: the configured model.
        run_id: of the run, as its bridge knows it.
        seen: the bridge's run and trained version when this was decided.
        changed: options that a resumed run changes, in words; "" if there are none.
    """

    source: str | None
    run_id: str
    seen: tuple[str, int | None]
    changed: str = ""

    @property
    def checkpoint(self) -> Path | None:
        """The checkpoint's folder."""
        return None if self.source is None else Path(self.source)


def agreed_start(config: LearnerConfig, world: World) -> Start:
    """Returns rank 0's decision; rank 0 also begins the run directory. Blocks for disk and other ranks.

    Raises as `decided`, and PeerFailed for another rank.
    """
    if config.batch.groups < world.size:
        raise StartupError(
            f"--groups {config.batch.groups}: each of {world.size} ranks needs a group of every batch -> "
            "raise --groups"
        )
    if world.size > world.machine_size:
        raise StartupError(
            f"{world.size} ranks, {world.machine_size} of them here: a bridge is one machine's -> start all "
            "on one"
        )
    if not (world.is_main and sys.stderr.isatty()):
        # progress bars of file transfers: they clutter logs, and every rank would draw them
        disable_progress_bar()
    with world.together():
        start = decided(config) if world.is_main else None
        if start is not None:
            _begin_run_dir(config, world.size)
            if start.source is None:  # a resumed run's are written later: when a step trains with them
                write_options(config, start)
    told = world.broadcast(None if start is None else asdict(start))
    assert told is not None
    return Start(**told | {"seen": tuple(told["seen"])})


def decided(config: LearnerConfig) -> Start:
    """Returns where the run starts; prints what is repeated, taken over or begun anew.

    Blocks for the disk. With `--from-bridge` the weights become the run's first checkpoint, so that no later
    death loses them.

    Raises:
        BridgeAhead: the bridge's versions hold trained steps, and no checkpoint that belongs to them is here.
        StartupError: a fresh start in a run directory with checkpoints, which would mix two runs; or
            `--from-bridge` without weights.
        OtherRun: an option differs from the checkpoint's. WeightsMismatch: the bridge's weights are of
            another model. ConsumerTaken: the bridge has a living consumer.
    """
    options, bridge = config.checkpoints, _bridge(config.run.bridge)
    seen = trained_as(bridge)
    trained = seen[1]
    newest = next(reversed(checkpoint.complete(config.run_dir / "checkpoints")), None)
    again = newest is not None and options.from_bridge and _is_first(newest)
    if newest is not None and not (options.resume or again):
        afresh = " with --from-scratch" if trained is not None and not options.from_scratch else ""
        raise StartupError(
            f"{config.run_dir} already holds a run up to {newest.name} -> --resume goes on with it, "
            f"another --run-dir{afresh} starts afresh"
        )
    if newest is not None and not (again and trained is not None and _has_more(bridge, newest)):
        return _resumed(config, newest, bridge, seen)
    if trained is None or bridge is None:
        if options.from_bridge and not options.resume:
            raise StartupError(
                f"--from-bridge: bridge {config.run.bridge} has no trained weights -> leave it out, or add "
                "--resume: the run then begins with --model"
            )
        if options.resume:
            say(
                f"no checkpoint in {config.run_dir}, and no trained weights in bridge {config.run.bridge}: "
                f"a new run begins with {config.run.model}"
            )
        return Start(None, secrets.token_hex(8), seen)
    if options.from_bridge:
        return _from_bridge(config, bridge, seen)
    if options.from_scratch:
        say(
            f"--from-scratch: a new run begins with {config.run.model}; version {trained} of bridge "
            f"{config.run.bridge} is given up, its numbers go on"
        )
        return Start(None, secrets.token_hex(8), seen)
    raise _ahead(config, bridge, trained, "holds no checkpoint")


def require_unchanged(start: Start, bridge: str) -> None:
    """Raises BridgeAhead if the bridge was trained by another learner since the decision. Never blocks."""
    now = trained_as(bridge_info(bridge))
    if now[1] is not None and now != start.seen:
        raise BridgeAhead(
            f"bridge {bridge} went on to version {now[1]} while this learner was loading, by another learner",
            hint="end that one, and start this one again",
        )


def write_options(config: LearnerConfig, start: Start) -> None:
    """Writes the run's options into its directory; what a resume changes stays there as a comment.

    Blocks for the disk. Raises StartupError.
    """
    path = config.run_dir / CONFIG_FILE
    try:
        earlier = noted_changes(path) if start.source is not None else []
        write_config(config, path, [*earlier, start.changed] if start.changed else earlier)
    except OSError as error:
        raise _unwritable(config, error) from error


def _bridge(name: str) -> shmbridge.BridgeInfo | None:
    found = bridge_info(name)
    if found is not None and found.consumer_pid is not None:
        raise shmbridge.ConsumerTaken(
            f"bridge {name!r} has a living consumer: pid {found.consumer_pid}",
            hint="end it first, or use another bridge",
        )
    return found


def _is_first(path: Path) -> bool:
    """Whether a checkpoint was written by --from-bridge: it holds no step of its run."""
    return checkpoint.load_progress(path).step == 0


def _has_more(bridge: shmbridge.BridgeInfo | None, path: Path) -> bool:
    """Whether the bridge goes on from a first checkpoint: with its run, at its version or above."""
    if bridge is None or bridge.weights is None or bridge.weights.version is None:
        return False
    first = checkpoint.load_progress(path)
    is_same = bridge.run_id in ("", checkpoint.run_id_of(path, first))  # "": its learner stored none
    return is_same and bridge.weights.version >= first.policy_version


def _resumed(
    config: LearnerConfig, path: Path, bridge: shmbridge.BridgeInfo | None, seen: tuple[str, int | None]
) -> Start:
    progress, trained = checkpoint.load_progress(path), seen[1]
    run_id = checkpoint.run_id_of(path, progress)
    if bridge is not None and trained is not None:
        # A checkpoint of an earlier release has no id: it belongs to a bridge that has none either.
        if bridge.run_id != run_id and (progress.run_id or bridge.run_id):
            raise _ahead(config, bridge, trained, f"holds {path.name} of another run", other=True)
        if (behind := trained - progress.policy_version) > 0:
            groups = "on the groups that were held for it"
            if not config.holds_until_saved:
                groups = "on other groups, as far as theirs were released; --release-at checkpoint holds them"
            say(
                f"{path.name} has policy version {progress.policy_version}, bridge {config.run.bridge} "
                f"{trained}: up to {behind} {'step' if behind == 1 else 'steps'} after that checkpoint are "
                f"trained again, {groups}"
            )
    earlier = read_earlier(config.run_dir / CONFIG_FILE)
    if earlier is None:
        say(f"{config.run_dir} has no readable {CONFIG_FILE}: options are not compared with earlier ones")
        return Start(str(path), run_id, seen)
    changed = ", ".join(changes_on_resume(earlier, config))
    if changed:
        say(f"from step {progress.step} on with other options: {changed}")
        changed = f"from step {progress.step} on {changed}"
    return Start(str(path), run_id, seen, changed)


def _from_bridge(config: LearnerConfig, bridge: shmbridge.BridgeInfo, seen: tuple[str, int | None]) -> Start:
    """Writes the bridge's newest weights as the run's first checkpoint."""
    if config.adapters.lora_rank:
        raise StartupError(
            "--from-bridge: published weights have their adapters merged, and cannot be split again -> leave "
            "--lora-rank out, and train the whole model; or --from-scratch; or --resume with the --run-dir "
            "of that run"
        )
    if bridge.weights is None or bridge.weights.version is None:
        raise StartupError(
            f"--from-bridge: bridge {bridge.name} is at version {bridge.policy_version}, and has no weights "
            "segment: its learner published none (--no-weights), or it was removed -> --from-scratch, or "
            "--resume with the --run-dir of that run"
        )
    folder, run_id = config.run_dir / "checkpoints", bridge.run_id or secrets.token_hex(8)
    model = pretrained.load(AutoModelForCausalLM, config.run.model).float()
    with lease_from_outside(bridge.name) as lease:
        version = lease.version
        try:
            copy_into(model, lease.tensors, lease.dtypes)
        except shmbridge.WeightsMismatch as error:
            raise shmbridge.WeightsMismatch(
                f"--from-bridge: --model {config.run.model}, version {version}: {error.message}",
                hint="give the model that the bridge's run trained",
            ) from None
        rounded = {dtype for dtype in lease.dtypes.values() if dtype != "float32"}
    for name, parameter in model.named_parameters():
        if not bool(torch.isfinite(parameter).all()):
            raise StartupError(
                f"--from-bridge: tensor {name} of version {version} of bridge {bridge.name} has values that "
                "are not finite -> --from-scratch, or --resume with the --run-dir of that run"
            )
    _begin_run_dir(config, None)
    try:
        for first in checkpoint.complete(folder):
            shutil.rmtree(first)
        path = checkpoint.save(
            folder,
            Progress(step=0, policy_version=version, run_id=run_id),
            model,
            load_tokenizer(config.run.model),
            torch.optim.AdamW(model.parameters()),
        )
    except (OSError, SafetensorError) as error:
        raise StartupError(
            f"--from-bridge: version {version} of bridge {bridge.name} cannot be saved in {folder}: {error} "
            "-> make room there, or give another --run-dir"
        ) from error
    start = Start(str(path), run_id, seen)
    write_options(config, start)
    say(
        f"--from-bridge: a new run begins with the weights of version {version} of bridge {bridge.name}"
        f"{', which were published in ' + ' and '.join(sorted(rounded)) if rounded else ''}, saved as "
        f"{path.name}; optimizer, schedule and step count are new, and groups that the earlier learner had "
        "not released are trained, also if it had trained them"
    )
    if seen[1] is not None and version < seen[1]:
        say(f"bridge {bridge.name} has been trained up to version {seen[1]}: all after {version} is given up")
    return start


def _ahead(
    config: LearnerConfig, bridge: shmbridge.BridgeInfo, trained: int, found: str, *, other: bool = False
) -> BridgeAhead:
    ways = [
        "--resume with the --run-dir that has that run's checkpoints",
        f"--from-scratch begins with {config.run.model} again, and gives version {trained} up",
    ]
    newest = None if bridge.weights is None else bridge.weights.version
    if newest is not None and not config.adapters.lora_rank:  # merged adapters cannot be split again
        has = f"{trained}," if newest >= trained else f"{newest}, the newest that it has,"
        ways.insert(1, f"--from-bridge takes the weights of version {has} with a new optimizer")
    if other:
        ways = [ways[0], *(f"in another --run-dir {each}" for each in ways[1:])]
        ways.append(f"another --bridge for the run in {config.run_dir}")
    return BridgeAhead(
        f"bridge {bridge.name} has been trained up to version {trained}, and the run directory "
        f"{config.run_dir} {found}",
        hint="; ".join(filter(None, ways)),
    )


def _begin_run_dir(config: LearnerConfig, ranks: int | None) -> None:
    """Makes the run directory, and notes a start on that many ranks; None: notes none."""
    try:
        config.run_dir.mkdir(parents=True, exist_ok=True)
        if ranks is not None:
            on_gpu = device_kind(config.compute.device) == "cuda" and torch.cuda.is_available()
            write_facts(config.run_dir, f"{ranks} x {torch.cuda.get_device_name()}" if on_gpu else "cpu")
    except OSError as error:
        raise _unwritable(config, error) from error


def _unwritable(config: LearnerConfig, error: OSError) -> StartupError:
    return StartupError(
        f"cannot write to --run-dir {config.run_dir}: {error.strerror} -> give one that can be written to"
    )


def load_learner(source: Path | None, config: LearnerConfig, world: World) -> tuple[Learner, Any, Progress]:
    """Returns the learner, its tokenizer or None, and its progress.

    Blocks for the disk, and for the other ranks.

    Raises:
        BadArgument: there is no such model. StartupError: this rank has no device. PeerFailed: the same on
            another rank.
        LayoutUnfit: packed batches are wanted, and the model does not keep packed rows apart.
    """
    compute = config.compute
    if compute.threads:
        torch.set_num_threads(compute.threads)
    seed_all(config.run.seed)  # fresh adapters are initialised at random
    with world.together():
        device = device_of(compute, world)
        # A model to be sharded is moved to the device block by block.
        sharded = world.size > 1 and config.ranks.parallel == "fsdp2"
        if sharded and config.adapters.lora_rank:
            raise StartupError("adapters and --parallel fsdp2 do not go together -> --parallel ddp")
        first = torch.device("cpu") if sharded else device
        model = load_model(source or config.run.model, compute, config.adapters, first)
        precision = getattr(torch, compute.precision)
        if sharded:
            layout = attention.settle_for(device, model, compute.batch_layout, precision, say)
        else:
            layout = attention.settle(model, compute.batch_layout, precision, say)
        tokenizer = load_tokenizer(source or config.run.model)
        reference = load_reference(model, source, config, device, layout)
    parallel = parallel_of(model, config.ranks.parallel, world, device)
    learner = new_learner(model, config, layout, parallel=parallel, reference=reference)
    progress = Progress(step=0, policy_version=-1)
    if source is not None:
        progress = checkpoint.load_progress(source)
        checkpoint.load_optimizer(source, model, learner.optimizer)
        learner.step = progress.step
    seed_all(config.run.seed + learner.step)
    if source is not None and world.is_main and (states := checkpoint.load_rng(source)) is not None:
        set_rng_state(states)  # rank 0's states; the other ranks start with new seeds
    return learner, tokenizer, progress


def new_learner(
    model: Any,
    config: LearnerConfig,
    layout: Layout = "padded",
    *,
    parallel: Parallel | None = None,
    reference: Reference | None = None,
) -> Learner:
    """Returns a learner at step 0 with the configured objective and optimizer."""
    rate = rate_schedule(
        config.optimizer.schedule,
        peak=config.optimizer.lr,
        warmup=config.optimizer.warmup,
        steps=config.run.steps,
        options=config.optimizer.schedule_option,
    )
    return Learner(
        model,
        dataclasses.replace(
            Objective.of(config), layout=layout, chunk_tokens=_chunk_tokens(model, config.compute)
        ),
        rate,
        weight_decay=config.optimizer.weight_decay,
        max_grad_norm=config.optimizer.max_grad_norm,
        parallel=parallel,
        reference=reference,
    )


def _chunk_tokens(model: Any, compute: ComputeConfig) -> int | None:
    if compute.chunk_tokens is None:
        return chunk_tokens_for(model.get_input_embeddings().num_embeddings, compute.micro_tokens)
    return compute.chunk_tokens or None


def registration(config: LearnerConfig, step: int) -> shmbridge.Run:
    """Returns the registration for environments; its steps are batches of the bridge."""
    return shmbridge.Run(
        batch_size=config.batch.groups * config.batch.group_size,
        max_token_len=config.registration.max_token_len,
        num_steps=config.run.steps * config.batch.accumulate,
        starting_step=step * config.batch.accumulate,
        checkpoint_dir=str(config.run_dir / "checkpoints"),
        save_checkpoint_interval=config.checkpoints.save_every * config.batch.accumulate,
        wandb_group=config.registration.wandb_group,
        wandb_project=config.registration.wandb_project,
    )
