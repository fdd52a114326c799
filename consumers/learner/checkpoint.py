"""Checkpoints of a learner. A folder with its final name is complete: it is renamed once it is written.

    <folder>/step-00000050/   model.safetensors, config.json, tokenizer files    what a sampler can load
                              optimizer.safetensors                              exp_avg.<parameter>, ...
                              rng.safetensors                                    rng_state()
                              learner.json                                       Progress

An adapter is saved as peft does, with the name of its base model. No pickle anywhere.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import re
import shutil
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from shmbridge.consumers.feed import HeldRecords
from shmbridge.consumers.learner import Refusal
from shmbridge.consumers.learner.model.optimizer import MasterAdamW
from shmbridge.consumers.learner.model.sharding import gathered, shared_like, whole_state

_NAME = re.compile(r"step-(\d{8,})")
_WRITING = ".writing-"
MOST_PRODUCERS = 1024  # limit of known last sequences; the least recently seen producers are dropped first
_CUDA = "cuda."
_NO_GAUSS = float("nan")


class CheckpointMismatch(Refusal):
    """A checkpoint is of another learner, of a newer release, or damaged."""


@dataclass(frozen=True)
class Progress:
    """A learner's progress, and the records that its weights contain. Older checkpoints lack some fields."""

    step: int  # optimizer steps done
    policy_version: int  # of these weights, published or not
    groups: int = 0  # consumed, by all steps
    trajectories: int = 0
    tokens: int = 0
    wall_s: float = 0.0  # over all processes of the run
    # producer id -> highest consumed sequence
    last_sequences: dict[str, int] = field(default_factory=dict)
    # producer id -> consumed sequences that may be redelivered
    held: dict[str, list[int]] = field(default_factory=dict)
    mounts: dict[str, str] = field(default_factory=dict)  # producer id of held records -> mount of its lane
    run_id: str = ""  # the run whose weights these are, as its bridge knows it


def save(
    folder: Path,
    progress: Progress,
    model: Any,
    tokenizer: Any,
    optimizer: torch.optim.Optimizer,
    *,
    keep: int = 2,
    rng: Mapping[str, torch.Tensor] | None = None,
    write: bool = True,
) -> Path:
    """Writes one checkpoint and returns its path; deletes the oldest beyond `keep`. Blocks for the disk.

    A kill at any point leaves the earlier checkpoints complete, and at most one temporary folder, which
    readers ignore and the next save removes. The files are on disk before the rename.

    Args:
        folder: where the checkpoints of one run lie; created when missing.
        progress: step and policy version of these weights, and the records they contain.
        model: a Hugging Face model, or a peft model, of which the adapter is saved.
        tokenizer: its tokenizer, saved beside it; None when the model came without one.
        optimizer: its state is saved under the model's parameter names.
        keep: number of newest checkpoints to keep, at least 1.
        rng: states of random generators by name; None: not saved.
        write: False only takes part in the collectives of a sharded model; another rank writes.
    """
    final = folder / f"step-{progress.step:08d}"
    state = whole_state(model, write)
    moments = _optimizer_tensors(model, optimizer, write)
    if not write:
        return final
    folder.mkdir(parents=True, exist_ok=True)
    for left_over in folder.glob(_WRITING + "*"):
        shutil.rmtree(left_over, ignore_errors=True)

    writing = folder / f"{_WRITING}{final.name}"
    model.save_pretrained(writing, safe_serialization=True, **({"state_dict": state} if state else {}))
    if tokenizer is not None:
        tokenizer.save_pretrained(writing)
    save_file(moments, writing / "optimizer.safetensors")
    if rng is not None:
        save_file(dict(rng), writing / "rng.safetensors")
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
    """Returns the complete checkpoints of a folder, oldest step first; empty if there are none."""
    found = {int(match[1]): path for path in folder.glob("step-*") if (match := _NAME.fullmatch(path.name))}
    return [found[step] for step in sorted(found)]


def load_progress(path: Path) -> Progress:
    """Returns a checkpoint's progress. Blocks for the disk. Raises `CheckpointMismatch`."""
    try:
        said = json.loads((path / "learner.json").read_text())
        step, policy_version = int(said.pop("step")), int(said.pop("policy_version"))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise _damaged(path, "learner.json", error) from error
    if unknown := said.keys() - {each.name for each in fields(Progress)}:
        raise CheckpointMismatch(
            f"{path} was written by a newer release: its learner.json has {', '.join(sorted(unknown))} -> "
            "update shmbridge"
        )
    return Progress(step, policy_version, **said)


def run_id_of(path: Path, progress: Progress) -> str:
    """Returns the id of a checkpoint's run; one made of its content if an older release stored none."""
    return progress.run_id or hashlib.sha256((path / "learner.json").read_bytes()).hexdigest()[:16]


def load_rng(path: Path) -> dict[str, torch.Tensor] | None:
    """Returns the states of the random generators, None if an older release saved none. Blocks for the disk.

    Raises:
        CheckpointMismatch: it is damaged.
    """
    return _tensors(path, "rng.safetensors") if (path / "rng.safetensors").exists() else None


def load_optimizer(path: Path, model: Any, optimizer: torch.optim.Optimizer) -> None:
    """Puts the saved state back into an optimizer over the same model's parameters. Blocks for the disk.

    Raises:
        CheckpointMismatch: other parameters were trained, or in another dtype, or it is damaged.
    """
    saved = _tensors(path, "optimizer.safetensors")
    parameters = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    if unknown := {key.split(".", 1)[1] for key in saved} - parameters.keys():
        raise CheckpointMismatch(
            f"{path} has trained {min(unknown)} and {len(unknown) - 1} more that this learner does not train "
            "-> resume with the same --lora-* options"
        )
    if saved and isinstance(optimizer, MasterAdamW) != any(key.startswith("master.") for key in saved):
        raise CheckpointMismatch(f"{path} was trained in another dtype -> resume with the same --param-dtype")
    for key, value in saved.items():
        kind, name = key.split(".", 1)
        parameter = parameters[name]
        # The step counter stays on the CPU, where the optimizer keeps it; moments are on their parameter's
        # device.
        optimizer.state[parameter][kind] = value if kind == "step" else shared_like(value, parameter)


def _optimizer_tensors(model: Any, optimizer: torch.optim.Optimizer, write: bool) -> dict[str, torch.Tensor]:
    tensors = {
        f"{kind}.{name}": gathered(value, write)
        for name, parameter in model.named_parameters()
        for kind, value in optimizer.state.get(parameter, {}).items()
    }
    return {name: value.contiguous() for name, value in tensors.items() if value is not None}


def _tensors(path: Path, name: str) -> dict[str, torch.Tensor]:
    try:
        return load_file(path / name)
    except (OSError, SafetensorError) as error:
        raise _damaged(path, name, error) from error


def _damaged(path: Path, name: str, error: Exception) -> CheckpointMismatch:
    return CheckpointMismatch(
        f"{path / name} is damaged or not there ({type(error).__name__}: {error}) "
        f"-> put {path.name} elsewhere: --resume takes the one before it"
    )


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class Consumed:
    """Counts the records that each step takes.

    Its size is bounded by the held records, those the loaded checkpoint held, and `MOST_PRODUCERS` names, for
    any number of steps. Its saved form is bounded by the records that lanes hold, for any number of resumes.
    One thread, except `contains`.

    Args:
        before: the progress of the checkpoint that the run resumes from, or of a new run, with its run's id.
    """

    def __init__(self, before: Progress) -> None:
        self._in_checkpoint = HeldRecords(before.held, before.mounts)
        self._last = dict(before.last_sequences)
        self._held: set[tuple[str, int]] = set()
        self._groups, self._trajectories, self._tokens = before.groups, before.trajectories, before.tokens
        self._run_id = before.run_id
        self._begun_s = time.monotonic() - before.wall_s

    def contains(self, meta: Any) -> bool:
        """Returns whether the checkpoint's weights contain this record, which was not released."""
        return self._in_checkpoint.contains(meta)

    def took(self, metas: Iterable[Any], *, groups: int, trajectories: int, tokens: int) -> None:
        """Records a batch: the metadata of its records (repetitions allowed), and its size."""
        for meta in metas:
            producer, sequence = meta.producer_id, meta.sequence
            self._held.add((producer, sequence))
            self._last[producer] = max(self._last.pop(producer, -1), sequence)
        for producer in list(self._last)[: max(0, len(self._last) - MOST_PRODUCERS)]:
            del self._last[producer]
        self._groups += groups
        self._trajectories += trajectories
        self._tokens += tokens

    def released(self) -> None:
        """Records that all batches taken so far are released, so none can be redelivered."""
        self._held.clear()

    def progress(self, step: int, policy_version: int) -> Progress:
        """Returns the progress to save now. Reads lanes; never blocks.

        It keeps each record that the loaded checkpoint held until the record's lane shows it as released, or
        is gone. Such a record may not have been redelivered yet. After redelivery it is released after
        `contains`, or later if a rank of an earlier learner is alive.
        """
        held = self._in_checkpoint.that_may_come_again()
        held |= HeldRecords.of(self._held)
        return Progress(
            step=step,
            policy_version=policy_version,
            groups=self._groups,
            trajectories=self._trajectories,
            tokens=self._tokens,
            wall_s=round(time.monotonic() - self._begun_s, 3),
            last_sequences=dict(self._last),
            run_id=self._run_id,
            **held.state(),
        )


def seed_all(seed: int) -> None:
    """Seeds torch's, CUDA's, numpy's and Python's global generators."""
    torch.manual_seed(seed)
    np.random.seed(seed % 2**32)
    random.seed(seed)


def rng_state() -> dict[str, Tensor]:
    """Returns the states of torch's, CUDA's, numpy's and Python's global generators. Never blocks."""
    version, words, gauss = random.getstate()
    _, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    found = {
        "torch": torch.get_rng_state(),
        "numpy.keys": torch.from_numpy(np.asarray(keys, np.int64)),
        "numpy.rest": torch.tensor([position, has_gauss, cached], dtype=torch.float64),
        "python.words": torch.tensor([version, *words], dtype=torch.int64),
        "python.gauss": torch.tensor([_NO_GAUSS if gauss is None else gauss], dtype=torch.float64),
    }
    if torch.cuda.is_available():
        found |= {f"{_CUDA}{index}": state for index, state in enumerate(torch.cuda.get_rng_state_all())}
    return found


def set_rng_state(state: Mapping[str, Tensor]) -> None:
    """Restores the result of `rng_state`; skips CUDA devices that do not exist here."""
    torch.set_rng_state(state["torch"])
    position, has_gauss, cached = state["numpy.rest"].tolist()
    keys = state["numpy.keys"].numpy().astype(np.uint32)
    np.random.set_state(("MT19937", keys, int(position), int(has_gauss), cached))
    version, *words = state["python.words"].tolist()
    gauss = state["python.gauss"].item()
    random.setstate((version, tuple(words), None if gauss != gauss else gauss))
    devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    for index in range(devices):
        if (cuda := state.get(f"{_CUDA}{index}")) is not None:
            torch.cuda.set_rng_state(cuda, index)
