"""Policy weights through the bridge: a learner writes versions, inference engines read the newest complete
one in place.

Two slots: the writer fills the one that is not newest, then moves one word. A slot is held by a kernel lock
while it is read or filled, so that a reader's death frees it and a writer's death leaves the last complete
version. Here are the public names; docs/reference/weights.md.
"""

from shmbridge.weights.reader import WeightsLease, WeightsReader
from shmbridge.weights.shard_writer import WeightsPart
from shmbridge.weights.table import TensorSpec
from shmbridge.weights.writer import WeightsFilling, WeightsWriter

__all__ = ["TensorSpec", "WeightsFilling", "WeightsLease", "WeightsPart", "WeightsReader", "WeightsWriter"]
