"""Where a run starts: at its own checkpoint, at the weights of its bridge, or at the configured model.

Rank 0 decides, before anything is loaded to a device or published. A bridge whose versions hold trained steps
is never silently given the model as it began: its run's checkpoint, or a word of the user, is needed.
"""

from __future__ import annotations

import secrets
import shutil
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar

import shmbridge
from shmbridge.consumers import pretrained
from shmbridge.consumers.engines.published_tensors import copy_into
from shmbridge.consumers.learner import checkpoint
from shmbridge.consumers.learner.checkpoint import Progress
from shmbridge.consumers.learner.config.checks import changes_on_resume
from shmbridge.consumers.learner.config.flags import CONFIG_FILE, noted_changes, read_earlier, write_config
from shmbridge.consumers.learner.config.options import LearnerConfig
from shmbridge.consumers.learner.model.load import StartupError, load_tokenizer
from shmbridge.consumers.learner.report.logs import write_facts
from shmbridge.consumers.learner.world import World, device_kind, say
from shmbridge.weights import lease_from_outside


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
