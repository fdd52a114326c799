"""The error for a batch that can never be filled, with the numbers and a hint which setting to raise."""

from shmbridge import sizing
from shmbridge.batching.batch_size import Want
from shmbridge.config import format_size
from shmbridge.errors import BatchTooBig
from shmbridge.hub.lanes import Stuck
from shmbridge.record.groups import Group
from shmbridge.shown import counted


def too_big(
    size: Want, here: list[Group], *, complete: int, partial: int, elsewhere: int, stuck: Stuck
) -> BatchTooBig:
    """Returns the error. `here`: groups queued; `elsewhere`: records its taker holds of earlier batches."""
    sizes = [record._extent_bytes for group in here for record in group.records]
    fragments = max((-(-len(group.records) * group.size // group.rows) for group in here), default=1)
    largest = max([*sizes, stuck.wanted_bytes])
    lanes, producers = counted(stuck.lanes, "lane"), counted(stuck.live, "living producer")
    hold, their = ("holds", "its") if stuck.lanes == 1 else ("hold", "their")
    return BatchTooBig(
        f"a batch of {size} cannot be filled: {complete} are complete, {partial} in part; "
        + (f"who waits for it holds {counted(elsewhere, 'record')} of batches before; " if elsewhere else "")
        + (
            f"{stuck.dropped} were dropped without release, see take_back_dropped(); "
            if stuck.dropped
            else ""
        )
        + f"{lanes} of {format_size(stuck.data_bytes)} in all {hold} {counted(stuck.held, 'record')} "
        f"of at most {format_size(largest)}, "
        f"and {their} {producers} {'has' if stuck.live == 1 else 'have'} no room for "
        f"{format_size(stuck.wanted_bytes)} more",
        hint=sizing.what_to_raise(
            -(-(size.as_groups(here) * fragments + elsewhere) // stuck.live),
            largest,
            min([*sizes, stuck.wanted_bytes]) == largest,
        )
        + (", raise Consumer(lanes=): more lanes wait" if stuck.crowded else ""),
    )
