"""`ShmAgenticPipeline`: ROLL's agentic pipeline, whose advantages are those of the bridge.

    pipeline_cls: shmbridge.consumers.roll.pipeline.ShmAgenticPipeline

ROLL's `examples/start_agentic_pipeline.py` reads that key. Use it, rather than `ShmActorWorker`, for the
bridge's advantages in ROLL's metrics, and for its whitening, clipping and distillation on them. It wraps one
function of ROLL while `run` runs: see `precomputed.py`.
"""

from __future__ import annotations

from typing import Any

from roll.pipeline.agentic import agentic_pipeline

from shmbridge import BadArgument
from shmbridge.consumers.roll.precomputed import NAME, check_signature, installed
from shmbridge.consumers.roll.settings import REFUSED, REFUSED_BY_PIPELINE
from shmbridge.consumers.tested_versions import warn_if_untested
from shmbridge.consumers.trainer_settings import refuse


class ShmAgenticPipeline(agentic_pipeline.AgenticPipeline):
    """ROLL's pipeline for batches that may have a column `shm_advantages`.

    Args:
        pipeline_config: ROLL's `AgenticConfig`.

    Raises:
        BadArgument: ROLL computes advantages in another way than the tested one, or a setting is refused;
            nothing was started.
    """

    def __init__(self, pipeline_config: Any) -> None:
        warn_if_untested("roll", "0.3", "0.4")
        check_signature(getattr(agentic_pipeline, NAME))
        refuse((*REFUSED, *REFUSED_BY_PIPELINE), pipeline_config, BadArgument)
        super().__init__(pipeline_config)

    def run(self) -> None:
        """Trains. Blocks until the last step."""
        with installed(agentic_pipeline):
            super().run()
