"""Which records of earlier processes can come again: those that their lanes, on this mount, do not show as
released.

A record that was released never comes again, and a producer's id names one lane for ever. A lane of another
mount, of another machine say, cannot be looked at from here, so its records stay. Knows sequences and mounts;
knows nothing of torch. Called by `learner/checkpoint/consumed.py` and `position.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from shmbridge.segments.inventory import unreleased
from shmbridge.segments.segment import mount_id


def may_come_again(held: Mapping[str, Iterable[int]], mounts: Mapping[str, str]) -> dict[str, set[int]]:
    """Returns those of the records that are not known to be released.

    Never blocks; looks at lanes and changes nothing.

    Args:
        held: sequences by producer id.
        mounts: the mount of each producer's lane; without one, its records stay.
    """
    here = mount_id()
    shown = unreleased(producer for producer in held if here and mounts.get(producer) == here)
    left = {
        producer: set(sequences) & shown.get(producer, set(sequences)) for producer, sequences in held.items()
    }
    return {producer: sequences for producer, sequences in left.items() if sequences}
