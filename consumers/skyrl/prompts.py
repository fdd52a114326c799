"""A data set of empty prompts: environments have the real ones, SkyRL's loop wants to draw some."""

from __future__ import annotations

from typing import Any


class EmptyPrompts:
    """What SkyRL's data loader needs of a PromptDataset, without a file.

    Args:
        size: prompts; SkyRL makes `size // train_batch_size` steps an epoch.
    """

    def __init__(self, size: int) -> None:
        if size < 1:
            raise ValueError(f"{size} prompts -> at least train_batch_size of them")
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, item: int) -> tuple[list[dict[str, str]], None, dict[str, Any], str]:
        if not 0 <= item < self.size:
            raise IndexError(item)
        return [{"role": "user", "content": ""}], None, {}, str(item)

    @staticmethod
    def collate_fn(items: list[tuple[Any, Any, Any, str]]) -> list[dict[str, Any]]:
        """Returns SkyRL's prompts, one dictionary each."""
        return [
            {"prompt": prompt, "env_class": env_class, "env_extras": extras, "uid": uid}
            for prompt, env_class, extras, uid in items
        ]
