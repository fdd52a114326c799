"""The public path of shmbridge.record.row_checks: the same module."""

import sys

from shmbridge.record import row_checks
from shmbridge.record.row_checks import *  # noqa: F403

sys.modules[__name__] = row_checks
