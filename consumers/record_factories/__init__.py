"""A `Trajectory` as the fields of a trainer that this project has no adapter for.

    from shmbridge.consumers.record_factories import torchtitan_training_sample
    sample = TrainingSample(**torchtitan_training_sample(row))

Pure functions: a row in, a dict of the trainer's own field names out, in plain Python values. They import no
trainer and hold no lease; the batch may be released as soon as they returned. One copy of every token.
"""

from __future__ import annotations

from shmbridge.consumers.record_factories.prime_rl import prime_rl_micro_batch, prime_rl_training_sample
from shmbridge.consumers.record_factories.slime import slime_sample
from shmbridge.consumers.record_factories.torchtitan import torchtitan_training_sample

__all__ = ["prime_rl_micro_batch", "prime_rl_training_sample", "slime_sample", "torchtitan_training_sample"]
