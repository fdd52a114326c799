"""One finding about this host, and what becomes of a check that fails itself."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

State = Literal["ok", "warn", "fail"]
_EXIT_CODES: dict[State, int] = {"ok": 0, "warn": 1, "fail": 2}


@dataclass(frozen=True, slots=True)
class Check:
    """What was found under a name that stays, in numbers, and one fix if something is wrong.

    `fail`: something of a bridge cannot run here; `warn`: it runs, with less than it could have.
    """

    name: str
    state: State
    text: str
    fix: str = ""


def guarded(name: str, look: Callable[[], Check | list[Check]]) -> list[Check]:
    """Returns what `look` finds; an error that it did not expect becomes a warning that names it."""
    try:
        found = look()
    except Exception as wrong:
        return [
            Check(
                name,
                "warn",
                f"could not be checked: {type(wrong).__name__}: {wrong}",
                "the other lines hold without this one; report it with the output of shmbridge doctor --json",
            )
        ]
    return found if isinstance(found, list) else [found]


def exit_code(checks: Iterable[Check]) -> int:
    """Returns 0 if all are ok, 1 if the worst is a warning, 2 if something cannot run."""
    return max((_EXIT_CODES[each.state] for each in checks), default=0)
