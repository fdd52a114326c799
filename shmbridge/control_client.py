"""The public path of shmbridge.control.client: the same module."""

import sys

from shmbridge.control import client
from shmbridge.control.client import *  # noqa: F403

sys.modules[__name__] = client
