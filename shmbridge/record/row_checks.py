"""Checks stored beside a row's values, by which a trainer can tell that it has the very values that were put.

`Record.row_checks(name)` gives the stored ones.
"""

import os
import time

from shmbridge._ext.put import CHECKED_COLUMNS as CHECKED_COLUMNS
from shmbridge._ext.put import RowSampler
from shmbridge._ext.weights import check_of as check_of

VARIABLE = "SHMBRIDGE_CHECK_ROWS"
DEFAULT_EVERY = 32


def checked_every() -> int:
    """Returns the interval of rows that carry checks: 1 for every row, 0 for none.

    Set by SHMBRIDGE_CHECK_ROWS. Never blocks; ValueError if that is not such a number.
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
    """Returns a sampler of the rows of a new producer that carry checks."""
    return RowSampler(checked_every(), time.monotonic_ns())
