"""A data set of placeholders for verl's data loader: the environments behind a bridge own the prompts.

data:
  custom_cls: {path: pkg://shmbridge.consumers.verl.prompts, name: PlaceholderPrompts}
  train_files: 1000      # how many placeholders there are; verl counts an epoch by them
  val_files: 1
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import Dataset

__all__ = ["PlaceholderPrompts"]


class PlaceholderPrompts(Dataset[dict[str, Any]]):
    """As many empty prompts as `data_files` says. Never blocks.

    Args:
        data_files: how many; verl passes `data.train_files` or `data.val_files` on.
        max_samples: at most so many; -1: no limit.
    """

    def __init__(self, data_files: Any, *_: Any, max_samples: int = -1, **__: Any) -> None:
        try:
            self._count = int(data_files)
        except (TypeError, ValueError):
            raise ValueError(
                f"data.train_files={data_files!r} names files, and a bridge's environments own the prompts "
                "-> write a number of placeholders there, such as train_batch_size x steps"
            ) from None
        if 0 <= max_samples < self._count:
            self._count = max_samples

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {
            "raw_prompt": [],
            "index": index,
            "dummy_tensor": torch.zeros(1, dtype=torch.uint8),  # verl's batches need one tensor
        }
