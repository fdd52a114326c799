"""What an adapter checks in its trainer's own configuration, and what it says of rows that count as fresh.

Each adapter has a table of `Refused` settings. A test walks the options of the installed trainer: each one is
in that table, or is named beside the test with what it does to a bridge's rows. Knows no trainer.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Refused:
    """A setting with which a trainer would train something else than the bridge carries, or do nothing.

    Args:
        key: its place in the trainer's configuration, names with dots between them.
        why: what the trainer would do.
        action: what to write instead.
        when: whether a value is refused, of the value and the whole configuration; as it is: if it is true.
    """

    key: str
    why: str
    action: str
    when: Callable[[Any, Any], bool] = lambda value, config: bool(value)


def refuse(table: Iterable[Refused], config: Any, error: Callable[[str], Exception]) -> None:
    """Raises an error for the first setting of the table that is refused. Never blocks.

    Args:
        table: the adapter's.
        config: the trainer's whole configuration; a key that it does not have counts as None.
        error: makes the exception of a sentence with key, value, reason and one next action.
    """
    for each in table:
        value = setting(config, each.key)
        if each.when(value, config):
            raise error(f"{each.key}={value}: {each.why} -> {each.action}")


def setting(config: Any, key: str) -> Any:
    """Returns the value at a key of `Refused`; None if it is not there. Never blocks."""
    return functools.reduce(lambda at, name: getattr(at, name, None), key.split("."), config)


def warn_of_stale_rows(bridge: str, stale: int, action: str) -> None:
    """Logs that stale rows are trained as if fresh, because the sampler's log-probabilities are not used.

    Never blocks. Call it for the first such step.

    Args:
        bridge: its name.
        stale: rows of the step that older weights sampled than those in training.
        action: how to have the sampler's.
    """
    log.warning(
        "bridge %r: %d rows of a step were sampled by older weights, and are trained as if fresh: their old "
        "log-probabilities are computed with the weights in training -> %s",
        bridge,
        stale,
        action,
    )
