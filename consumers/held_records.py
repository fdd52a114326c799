"""Records that a saved state contains and that nobody has released: `HeldRecords`.

A released record is never redelivered, and a producer's id identifies one lane for ever. A lane on another
mount, such as another machine's, cannot be read from here, so its records stay. Used by `feed.py`,
`dataset.py`, `learner/checkpoint.py` and `roll/pipeline.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Self

from shmbridge.segments.inventory import unreleased
from shmbridge.segments.segment import mount_id


class HeldRecords:
    """Sequences by producer id, and the mount of each producer's lane. For one thread.

    Args:
        held: sequences by producer id.
        mounts: of the producers' lanes; the records of one without stay.
    """

    def __init__(self, held: Mapping[str, Iterable[int]], mounts: Mapping[str, str]) -> None:
        self.held = {str(producer): set(map(int, numbers)) for producer, numbers in held.items()}
        self.mounts = {producer: mounts[producer] for producer in self.held if producer in mounts}

    @classmethod
    def of(cls, places: Iterable[tuple[str, int]], mounts: Mapping[str, str] | None = None) -> Self:
        """Returns records of producers and sequences; without `mounts` their lanes are on this one."""
        held: dict[str, set[int]] = {}
        for producer, sequence in places:
            held.setdefault(producer, set()).add(sequence)
        if mounts is None:
            mounts = dict.fromkeys(held, here) if (here := mount_id()) else {}
        return cls(held, mounts)

    def contains(self, meta: Any) -> bool:
        """Returns whether a record is one of these. Never blocks.

        Only a redelivered record can be: any other with that number is of a producer that counts from 0
        again.
        """
        return bool(meta.redelivered) and meta.sequence in self.held.get(meta.producer_id, ())

    def that_may_come_again(self) -> Self:
        """Returns those that are not known to be released.

        Never blocks; looks at lanes and changes nothing.
        """
        here = mount_id()
        shown = unreleased(name for name in self.held if here and self.mounts.get(name) == here)
        left = {name: numbers & shown.get(name, numbers) for name, numbers in self.held.items()}
        return type(self)({name: numbers for name, numbers in left.items() if numbers}, self.mounts)

    def __ior__(self, others: HeldRecords) -> Self:
        for name, numbers in others.held.items():
            self.held.setdefault(name, set()).update(numbers)
        self.mounts |= others.mounts
        return self

    def state(self) -> dict[str, Any]:
        """Returns `held` and `mounts` as lists, numbers and words. Never blocks."""
        held = {name: sorted(numbers) for name, numbers in self.held.items()}
        return {"held": held, "mounts": dict(self.mounts)}
