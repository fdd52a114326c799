"""Every option of a trainer that touches rewards, masks, advantages, log-probabilities or groups is known."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from shmbridge.consumers.feed import Refused

EFFECTS = ("as the bridge", "no effect")


def accounted_for(options: Iterable[str], refused: Iterable[Refused], table: Mapping[str, str]) -> None:
    """Asserts that each option is refused, or in the table; and that what is refused or in it exists.

    Args:
        options: those of the installed trainer, as its configuration names them.
        refused: the adapter's.
        table: "as the bridge: ..." (what it does is done to the bridge's own values) or "no effect: ..." (it
            changes nothing of what is trained), with the reason -> options, separated by spaces.
    """
    found, keys, rows = set(options), {each.key for each in refused}, [row.split() for row in table.values()]
    named = {option for row in rows for option in row}
    assert all(effect.startswith(EFFECTS) and ": " in effect for effect in table), table.keys()
    assert len(named) == sum(map(len, rows)), "an option stands twice"
    new = sorted(found - named - keys)
    assert not new, (
        f"unknown: {', '.join(new)} -> read what the trainer does with it; refuse it, or add it here"
    )
    gone = sorted((named | keys) - found)
    assert not gone, f"the trainer has no {', '.join(gone)} any more -> take it out"
    assert not keys & named, f"refused, and in the table: {', '.join(sorted(keys & named))}"
