"""What an adapter checks in its trainer's configuration, and what it says of rows that count as fresh.

Each adapter has a table of `Refused` settings. A test walks the options of the installed trainer: each one is
in that table, or is named beside the test with what it does to a bridge's rows. Options of `Feed` have the
same words in every adapter: `check_words`. A trainer outside the tested releases is warned of. Knows no
trainer.
"""

from __future__ import annotations

import functools
import logging
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from numbers import Integral
from typing import Any, Literal, get_args

from shmbridge import BadArgument
from shmbridge.consumers.feed.earlier_run import Start
from shmbridge.schema import Split

log = logging.getLogger(__name__)

ReleaseAt = Literal["step", "checkpoint"]
Unfit = Literal["refuse", "leave_out"]

# The values of an option: its words, or the least number.
ALLOWED: dict[str, tuple[Any, ...] | int] = {
    "release_at": (None, *get_args(ReleaseAt)),
    "start": (None, *get_args(Start)),
    "split": (None, *get_args(Split)),
    "unfit": get_args(Unfit),
    "max_staleness": 0,
    "set_aside_after": 0,
    "longest_row": 1,
    "groups": 1,
    "rows": 1,
}
_OPTIONAL = {"max_staleness", "longest_row", "groups", "rows", "max_off_policy_steps"}  # None: without


def check_words(
    given: Mapping[str, Any],
    prefix: str = "",
    error: Callable[[str], Exception] = BadArgument,
    **more: tuple[Any, ...] | int,
) -> None:
    """Raises an error for the first option with a value that is not allowed. Never blocks.

    Args:
        given: options of `Feed` or of the adapter; those that neither has are not looked at.
        prefix: what the trainer's configuration has before their names.
        error: makes the exception of a sentence with name, value and what is allowed.
        more: the adapter's own, as `ALLOWED`: allowed words, or the least number; a word that is None may be
            left out.
    """
    for name, value in given.items():
        allowed = (ALLOWED | more).get(name)
        if isinstance(allowed, tuple) and not (value in allowed and type(value) in map(type, allowed)):
            words = [str(word) for word in allowed if word is not None]
            one = f"{prefix}{name}={words[0]}"
            raise error(f"{prefix}{name}={value!r} is none of {', '.join(words)} -> {one}")
        if isinstance(allowed, int) and not (value is None and name in _OPTIONAL):
            whole = isinstance(value, Integral) and not isinstance(value, bool)
            if not (whole and value >= allowed):
                least = f"{prefix}{name}={allowed}"
                raise error(f"{prefix}{name}={value!r} is no whole number of at least {allowed} -> {least}")


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


def warn_if_untested(package: str, first: str, before: str) -> bool:
    """Logs a warning if a package is outside the tested releases, and returns whether it is. Never blocks.

    Args:
        package: its name on the package index.
        first: the oldest tested release, such as "1.16".
        before: the first release that is not tested any more.
    """
    try:
        found = version(package)
    except PackageNotFoundError:
        log.warning("%s is not installed as a package; its adapter was tested with %s", package, first)
        return True
    outside = not _numbers(first) <= _numbers(found) < _numbers(before)
    if outside:
        log.warning(
            "%s %s is outside the releases this adapter was tested with, %s up to but not %s -> install one "
            "of these if something fails",
            package,
            found,
            first,
            before,
        )
    return outside


def _numbers(release: str) -> tuple[int, ...]:
    """Returns the leading numbers of a release: (1, 16, 0) of "1.16.0rc1"."""
    leading = re.match(r"\d+(?:\.\d+)*", release)
    return tuple(map(int, leading[0].split("."))) if leading else ()
