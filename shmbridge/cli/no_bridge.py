"""What is said about a bridge that does not exist: which ones do, and which was probably meant."""

import difflib
import sys

from shmbridge.program import refuse

_MOST = 8  # bridges that are named


def refuse_unknown_bridge(program: str, bridge: str) -> bool:
    """Returns whether the bridge does not exist; then says so, in one line on standard error."""
    from shmbridge.segments.segment import bridges

    there = sorted(bridges())
    if bridge in there:
        return False
    near = nearest_bridge(bridge, there)
    if not there:
        hint = "there are none; they begin with an environment or a learner"
    else:
        named = ", ".join(there[:_MOST]) + (f" and {len(there) - _MOST} more" if len(there) > _MOST else "")
        hint = f"did you mean {near}? There are {named}" if near else f"there are {named}"
    refuse(program, f"no bridge {bridge!r}", hint)
    return True


def say_none(program: str, bridge: str | None) -> None:
    """Says on standard error that the bridge does not exist any more; None: that there is none at all."""
    if bridge is None:
        print("no bridges", file=sys.stderr)
    else:
        refuse_unknown_bridge(program, bridge)


def nearest_bridge(bridge: str, there: list[str]) -> str | None:
    """Returns the bridge that was probably meant."""
    return next(iter(difflib.get_close_matches(bridge, there, n=1)), None)
