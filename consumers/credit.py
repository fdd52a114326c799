"""The public path of shmbridge.consumers.advantages.credit: the same module."""

import sys

from shmbridge.consumers.advantages import credit
from shmbridge.consumers.advantages.credit import *  # noqa: F403

sys.modules[__name__] = credit
