"""Checkpoints of a learner: written aside, then renamed, so that a folder with its final name is whole.

    <folder>/step-00000050/   model.safetensors, config.json, tokenizer files    what a sampler can load
                              optimizer.safetensors                              exp_avg.<parameter>, ...
                              learner.json                                       Progress

No pickle anywhere. Knows nothing of batches, losses or the bridge. Called by the GRPO learner (`grpo.py`).
"""

from __future__ import annotations

import json
import os
import re
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

_NAME = re.compile(r"step-(\d{8,})")
_WRITING = ".writing-"


@dataclass(frozen=True)
class Progress:
    """How far a learner is."""

    step: int  # optimizer steps done
    policy_version: int  # version under which these weights were published


def save(
    folder: Path,
    progress: Progress,
    model: Any,
    tokenizer: Any,
    optimizer: torch.optim.Optimizer,
    *,
    keep: int = 2,
) -> Path:
    """Write one checkpoint and return its path; older ones beyond `keep` go. Blocks for the disk.

    Killed at any point, this leaves the earlier checkpoints whole and at most one folder that no reader takes
    for a checkpoint; the next save removes it. The files are on the disk before the name is.

    Args:
        folder: where the checkpoints of one run lie; created when missing.
        progress: step and policy version of these weights.
        model: a Hugging Face model.
        tokenizer: its tokenizer, saved beside it; None when the model came without one.
        optimizer: its state is saved under the model's parameter names.
        keep: newest checkpoints to leave in the folder, at least 1.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for left_over in folder.glob(_WRITING + "*"):
        shutil.rmtree(left_over, ignore_errors=True)

    final = folder / f"step-{progress.step:08d}"
    writing = folder / f"{_WRITING}{final.name}"
    model.save_pretrained(writing, safe_serialization=True)
    if tokenizer is not None:
        tokenizer.save_pretrained(writing)
    save_file(_optimizer_tensors(model, optimizer), writing / "optimizer.safetensors")
    (writing / "learner.json").write_text(json.dumps(asdict(progress)) + "\n")

    for file in writing.rglob("*"):
        _sync(file)
    _sync(writing)
    writing.rename(final)
    _sync(folder)

    for old in complete(folder)[: -max(1, keep)]:
        shutil.rmtree(old, ignore_errors=True)
    return final


def complete(folder: Path) -> list[Path]:
    """Return the whole checkpoints of a folder, oldest step first; empty when there are none."""
    found = {int(match[1]): path for path in folder.glob("step-*") if (match := _NAME.fullmatch(path.name))}
    return [found[step] for step in sorted(found)]


def load_progress(path: Path) -> Progress:
    """Return how far the learner was that wrote this checkpoint."""
    return Progress(**json.loads((path / "learner.json").read_text()))


def load_optimizer(path: Path, model: Any, optimizer: torch.optim.Optimizer) -> None:
    """Put the saved state back into an optimizer over the same model's parameters. Blocks for the disk."""
    saved = load_file(path / "optimizer.safetensors")
    parameters = dict(model.named_parameters())
    for key, value in saved.items():
        kind, name = key.split(".", 1)
        parameter = parameters[name]
        # The step counter stays on the CPU, where the optimizer keeps it; moments live with their parameter.
        optimizer.state[parameter][kind] = value if kind == "step" else value.to(parameter.device)


def _optimizer_tensors(model: Any, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    return {
        f"{kind}.{name}": value.contiguous()
        for name, parameter in model.named_parameters()
        for kind, value in optimizer.state.get(parameter, {}).items()
    }


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
