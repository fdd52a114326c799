"""The public path of shmbridge.consumers.learner.train.objective: the same module."""

import sys

from shmbridge.consumers.learner.train import objective
from shmbridge.consumers.learner.train.objective import *  # noqa: F403

sys.modules[__name__] = objective
