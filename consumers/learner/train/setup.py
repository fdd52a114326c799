"""What a learner begins with: the checkpoint to go on from, the model, the optimizer, what environments are
told.

Knows the command line and the run directory; knows nothing of batches. Called by the GRPO learner
(`grpo.py`).
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils.logging import disable_progress_bar

import shmbridge
from shmbridge.consumers.learner.checkpoint import checkpoint
from shmbridge.consumers.learner.checkpoint.checkpoint import Progress
from shmbridge.consumers.learner.checkpoint.rng_state import seed_all, set_rng_state
from shmbridge.consumers.learner.data.microbatch import Layout
from shmbridge.consumers.learner.model import attention
from shmbridge.consumers.learner.model.forward import chunk_tokens_for
from shmbridge.consumers.learner.model.lora import (
    BadAdapter,
    Lora,
    PeftMissing,
    add_adapters,
    differences,
    has_adapters,
    is_adapter,
    prepare_adapters,
)
from shmbridge.consumers.learner.model.optimizer import cast_parameters
from shmbridge.consumers.learner.model.reference import Reference
from shmbridge.consumers.learner.model.schedule import BadSchedule, rate_schedule
from shmbridge.consumers.learner.model.sharding import Parallel, parallel_of
from shmbridge.consumers.learner.report.log import say
from shmbridge.consumers.learner.train.grpo_update import Learner, Objective
from shmbridge.consumers.learner.world import World


class Refused(Exception):
    """The learner cannot start like this; the message says why and what to do."""


def starting_point(options: argparse.Namespace) -> Path | None:
    """Returns the checkpoint to go on from, or None for a fresh start.

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


def agreed_starting_point(options: argparse.Namespace, world: World) -> Path | None:
    """Returns what rank 0 found in the run directory, on every rank.

    Raises as `starting_point`, or PeerFailed.
    """
    if options.groups < world.size:
        raise Refused(
            f"--groups {options.groups}: each of {world.size} ranks needs a group of every batch -> raise "
            "--groups"
        )
    if world.size > world.machine_size:
        raise Refused(
            f"{world.size} ranks, {world.machine_size} of them here: a bridge is one machine's -> start all "
            "on one"
        )
    with world.together():
        found = starting_point(options) if world.is_main else None
        if world.is_main:
            _make_run_dir(options.run_dir)
    told = world.told("" if found is None else str(found))
    return Path(told) if told else None


def _make_run_dir(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise Refused(
            f"cannot write to --run-dir {folder}: {error.strerror} -> give one that can be written to"
        ) from error


def load_learner(
    source: Path | None, options: argparse.Namespace, world: World
) -> tuple[Learner, Any, Progress]:
    """Returns the learner, its tokenizer or None, and how far it is.

    Blocks for the disk, and for the other ranks.

    Raises:
        Refused: there is no such model, or no device for this rank. PeerFailed: for another one.
        LayoutUnfit: packed batches are wanted, and the model does not keep packed rows apart.
    """
    if options.threads:
        torch.set_num_threads(options.threads)
    if not (world.is_main and sys.stderr.isatty()):
        # of files read and written: in a log they hide what is said, and every rank would draw them
        disable_progress_bar()
    seed_all(options.seed)  # fresh adapters are drawn
    with world.together():
        device = device_of(options, world)
        # What is to be sharded comes to the device block by block.
        sharded = world.size > 1 and options.parallel == "fsdp2"
        if sharded and options.lora_rank:
            raise Refused("adapters and --parallel fsdp2 do not go together -> --parallel ddp")
        model = load_model(source or options.model, options, torch.device("cpu") if sharded else device)
        precision = getattr(torch, options.precision)
        if sharded:
            layout = attention.settle_for(device, model, options.batch_layout, precision, say)
        else:
            layout = attention.settle(model, options.batch_layout, precision, say)
        tokenizer = load_tokenizer(source or options.model)
        reference = _reference(model, source, options, device, layout)
    parallel = parallel_of(model, options.parallel, world, device)
    learner = new_learner(model, options, layout, parallel=parallel, reference=reference)
    progress = Progress(step=0, policy_version=-1)
    if source is not None:
        progress = checkpoint.load_progress(source)
        checkpoint.load_optimizer(source, model, learner.optimizer)
        learner.step = progress.step
    seed_all(options.seed + learner.step)
    if source is not None and world.is_main and (states := checkpoint.load_rng(source)) is not None:
        set_rng_state(states)  # of rank 0; the others begin again
    return learner, tokenizer, progress


def device_kind(options: argparse.Namespace) -> str:
    """Returns "cuda" or "cpu": what the options say, or what is there."""
    if options.device != "auto":
        return str(options.device)
    return "cuda" if torch.cuda.is_available() else "cpu"


def device_of(options: argparse.Namespace, world: World) -> torch.device:
    """Returns the device of this rank, which is the current one of its kind from now on.

    Raises:
        Refused: there is no GPU, or there are more ranks than GPUs.
    """
    if device_kind(options) == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise Refused("--device cuda: torch sees no GPU here -> --device cpu, or mend torch and the driver")
    if world.size == 1:
        return torch.device("cuda")
    if world.local_rank >= torch.cuda.device_count():
        raise Refused(
            f"local rank {world.local_rank} has no GPU: there are {torch.cuda.device_count()} -> "
            "start as many processes as GPUs with torchrun --nproc-per-node, or give --device cpu"
        )
    torch.cuda.set_device(world.local_rank)
    return torch.device("cuda", world.local_rank)


def load_model(source: Path | str, options: argparse.Namespace, device: torch.device) -> Any:
    """Returns the model on a device, in the dtype and with the adapters that the options say.

    Blocks for the disk.

    Raises:
        Refused: there is no such model, or it does not go with the options.
    """
    try:
        model = AutoModelForCausalLM.from_pretrained(source).float()
    except (OSError, ValueError, ImportError, RuntimeError, SafetensorError) as error:
        # the reason without a library's traceback
        here = "" if Path(source).exists() else "there is no such folder, and as a Hugging Face id: "
        raise Refused(f"cannot load a model from {source}: {here}{str(error).splitlines()[0]}") from error
    base = (parameter for name, parameter in model.named_parameters() if not is_adapter(name))
    cast_parameters(base, getattr(torch, options.param_dtype))
    _adapt(model, source, options)
    model.to(device)
    if options.gradient_checkpointing:
        # transformers 5.23 has another name, and warns of the old one. The reentrant form hides gradients
        # from DDP.
        enable = (
            getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
        )
        enable({"use_reentrant": False})
        _compute_again(model)
    return model


def _compute_again(model: Any) -> None:
    """Has layers work again in the backward pass, which they do in training alone, and without the dropout of
    training.

    With it, the policy that is trained would not be the one that sampled: every ratio would be noise.
    """
    for module in model.modules():
        if getattr(module, "gradient_checkpointing", False):
            module.training = True
            for name in [
                name for name, value in vars(module).items() if "drop" in name and isinstance(value, float)
            ]:
                setattr(module, name, 0.0)


def _adapt(model: Any, source: Path | str, options: argparse.Namespace) -> None:
    """Puts adapters in, or make those of a checkpoint ready."""
    loaded = has_adapters(model)
    if isinstance(source, Path) and loaded != bool(options.lora_rank):
        there, wanted = ("", "without") if loaded else ("no ", "with")
        raise Refused(
            f"{source} has {there}adapters, and the options ask for a model {wanted} -> the --lora-* of "
            "that run"
        )
    lora = Lora(
        options.lora_rank or 0,
        options.lora_alpha or 2.0 * (options.lora_rank or 0),
        options.lora_dropout,
        options.lora_targets,
    )
    if loaded:
        if isinstance(source, Path) and (others := differences(model, lora)):
            raise Refused(f"{source} was trained with {', '.join(others)} -> resume with the same")
        prepare_adapters(model)
    elif options.lora_rank:
        try:
            add_adapters(model, lora, str(source))
        except (PeftMissing, BadAdapter) as error:
            raise Refused(str(error)) from error


def load_tokenizer(source: Path | str) -> Any:
    """Returns the tokenizer that stands beside a model, or None. Blocks for the disk."""
    try:
        return AutoTokenizer.from_pretrained(source)
    except Exception as error:  # the library raises what it likes here, and training needs none
        say(f"no tokenizer beside {source}, so none in the checkpoints: {type(error).__name__}")
        return None


def _reference(
    model: Any, source: Path | None, options: argparse.Namespace, device: torch.device, layout: Layout
) -> Reference | None:
    """Returns what the KL term is against, None without one: the model of the command line, also after a
    checkpoint.

    It is whole on every rank's device, also where the model is sharded.
    """
    if not options.kl_coef:
        return None
    if source is None or has_adapters(model):
        return Reference(model, device)
    first = load_model(options.model, options, device)
    attention.settle(first, layout, getattr(torch, options.precision), say)
    return Reference(first, device)


def new_learner(
    model: Any,
    options: argparse.Namespace,
    layout: Layout = "padded",
    *,
    parallel: Parallel | None = None,
    reference: Reference | None = None,
) -> Learner:
    """Returns a learner at step 0 with the objective and the optimizer of the command line."""
    try:
        rate = rate_schedule(
            options.schedule,
            peak=options.lr,
            warmup=options.warmup,
            steps=options.steps,
            options=dict(options.schedule_option),
        )
    except BadSchedule as error:
        raise Refused(str(error)) from error
    return Learner(
        model,
        dataclasses.replace(
            Objective.from_options(options), layout=layout, chunk_tokens=_chunk_tokens(model, options)
        ),
        rate,
        weight_decay=options.weight_decay,
        max_grad_norm=options.max_grad_norm,
        parallel=parallel,
        reference=reference,
    )


def _chunk_tokens(model: Any, options: argparse.Namespace) -> int | None:
    if options.chunk_tokens is None:
        return chunk_tokens_for(model.get_input_embeddings().num_embeddings, options.micro_tokens)
    return options.chunk_tokens or None


def registration(options: argparse.Namespace, step: int) -> shmbridge.Run:
    """Returns what environments are told about this run when they register; its steps are batches of the
    bridge.
    """
    return shmbridge.Run(
        batch_size=options.groups * options.group_size,
        max_token_len=options.max_token_len,
        num_steps=options.steps * options.accumulate,
        starting_step=step * options.accumulate,
        checkpoint_dir=str(options.run_dir / "checkpoints"),
        save_checkpoint_interval=options.save_every * options.accumulate,
        wandb_group=options.wandb_group,
        wandb_project=options.wandb_project,
    )
