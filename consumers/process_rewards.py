"""The public path of shmbridge.consumers.advantages.process_rewards: the same module."""

import sys

from shmbridge.consumers.advantages import process_rewards
from shmbridge.consumers.advantages.process_rewards import *  # noqa: F403

sys.modules[__name__] = process_rewards
