"""Start of a training run: the learner, and the registration of its run."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch

import shmbridge
from shmbridge.consumers.learner import checkpoint
from shmbridge.consumers.learner.checkpoint import Progress, seed_all, set_rng_state
from shmbridge.consumers.learner.config.options import ComputeConfig, LearnerConfig
from shmbridge.consumers.learner.data.microbatch import Layout
from shmbridge.consumers.learner.model import attention
from shmbridge.consumers.learner.model.forward import chunk_tokens_for
from shmbridge.consumers.learner.model.load import (
    StartupError,
    device_of,
    load_model,
    load_reference,
    load_tokenizer,
)
from shmbridge.consumers.learner.model.reference import Reference
from shmbridge.consumers.learner.model.schedule import rate_schedule
from shmbridge.consumers.learner.model.sharding import Parallel, parallel_of
from shmbridge.consumers.learner.train.grpo_update import Learner, Objective
from shmbridge.consumers.learner.world import World, say


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
