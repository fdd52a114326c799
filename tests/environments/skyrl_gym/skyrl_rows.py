"""Rows of SkyRL's format for the environment `counting`."""

from __future__ import annotations

from typing import Any


def task(**fields: Any) -> dict[str, Any]:
    """A row of three turns; `fields` take the place of its own, or are further ones."""
    prompt = [{"role": "user", "content": "count"}]
    return {"prompt": prompt, "env_class": "counting", "uid": "u", "max_turns": 3} | fields
