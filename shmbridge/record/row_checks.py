"""Checks of rows: stored beside a row's values, so that whoever trains with them can tell that they are
those.

Knows names and bytes; knows nothing of lanes and batches. `Record.row_checks(name)` gives the stored ones.
"""

import os
import time

from shmbridge._ext.column import CHECKED_COLUMNS as CHECKED_COLUMNS
from shmbridge._ext.plan import RowSampler
from shmbridge._ext.row_check import check_of as check_of

VARIABLE = "SHMBRIDGE_CHECK_ROWS"
DEFAULT_EVERY = 32


def checked_every() -> int:
    """One row in how many carries checks: 1 for every row, 0 for none.

    SHMBRIDGE_CHECK_ROWS says it. Never blocks; ValueError if that is no such number.
    """
    said = os.environ.get(VARIABLE, "").strip()
    if not said:
        return DEFAULT_EVERY
    if not said.isascii() or not said.isdigit() or int(said) >= 1 << 32:
        raise ValueError(
            f"{VARIABLE}={said!r} is not a number of rows -> 1 checks every row, {DEFAULT_EVERY} one in "
            f"{DEFAULT_EVERY}, 0 none"
        )
    return int(said)


def new_sampler() -> RowSampler:
    """Which rows of a new producer carry checks."""
    return RowSampler(checked_every(), time.monotonic_ns())
