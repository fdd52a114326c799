"""A user's function that sees every whole group before it goes into a batch."""

from collections.abc import Callable

from shmbridge.errors import BadArgument
from shmbridge.record.groups import Group
from shmbridge.shown import shown

Screen = Callable[[Group], bool]


def check_screen(keep: Screen | None) -> Screen | None:
    """Returns what Consumer.screen was given, or raises BadArgument."""
    if keep is not None and not callable(keep):
        raise BadArgument(f"keep={shown(keep)} cannot be called", hint="a function of a group, or None")
    return keep
