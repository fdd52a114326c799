"""The public path of shmbridge.control.messages: the same module."""

import sys

from shmbridge.control import messages
from shmbridge.control.messages import *  # noqa: F403

sys.modules[__name__] = messages
