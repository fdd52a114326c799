"""Policy weights through the bridge: a learner writes versions, inference engines read the newest complete
one in place.

Two slots: the writer fills the older one, then moves one word. A kernel lock holds a slot while it is read or
filled, so that a reader's death frees it and a writer's death leaves the last complete version. This module
has the public names; docs/reference/weights.md.
"""

from shmbridge.weights.reader import WeightsLease, WeightsReader, lease_from_outside
from shmbridge.weights.table import TensorSpec
from shmbridge.weights.writer import WeightsFilling, WeightsPart, WeightsWriter

__all__ = [
    "TensorSpec",
    "WeightsFilling",
    "WeightsLease",
    "WeightsPart",
    "WeightsReader",
    "WeightsWriter",
    "lease_from_outside",
]
