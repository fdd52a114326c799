"""What is said about a bridge that does not exist: which ones do, and which was probably meant."""

import difflib
import sys

from shmbridge.program import refuse

_MOST = 8  # bridges that are named


def refuse_unknown_bridge(program: str, bridge: str) -> bool:
    """Returns whether the bridge does not exist; then says so, in one line on standard error."""
    if hint := hint_if_unknown(bridge):
        refuse(program, f"no bridge {bridge!r}", hint)
    return bool(hint)


def hint_if_unknown(bridge: str) -> str:
    """Returns which bridges there are, and which was probably meant; "" if the bridge exists."""
    from shmbridge.segments import bridge_names

    there = sorted(bridge_names())
    if bridge in there:
        return ""
    if not there:
        return "there are none; they begin with an environment or a learner"
    named = ", ".join(there[:_MOST]) + (f" and {len(there) - _MOST} more" if len(there) > _MOST else "")
    near = next(iter(difflib.get_close_matches(bridge, there, n=1)), None)
    return f"did you mean {near}? There are {named}" if near else f"there are {named}"


def say_none(program: str, bridge: str | None) -> None:
    """Says on standard error that the bridge does not exist any more; None: that there is none at all."""
    if bridge is None:
        print("no bridges", file=sys.stderr)
    else:
        refuse_unknown_bridge(program, bridge)
