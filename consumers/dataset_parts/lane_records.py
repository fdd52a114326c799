"""Finds the records of earlier processes that may be redelivered: those that lanes on this mount do not show
as released.

A released record is never redelivered, and a producer's id identifies one lane for ever. A lane on another
mount, such as another machine's, cannot be read from here, so its records stay. Used by
`learner/checkpoint/consumed.py` and `position.py`.
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
