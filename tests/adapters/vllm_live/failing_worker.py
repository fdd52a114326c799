"""A worker extension for tests: while a file is there, the workers of the second data-parallel engine can
take no version.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from shmbridge.consumers.vllm.loading import ModelWeights

_stage = ModelWeights.stage


def _stage_or_fail(self: Any, *args: Any, **options: Any) -> None:
    if (
        Path(os.environ["SHMBRIDGE_TEST_FAIL"]).exists()
        and self._vllm_config.parallel_config.data_parallel_index == 1
    ):
        raise MemoryError("no room in the second engine")
    _stage(self, *args, **options)


ModelWeights.stage = _stage_or_fail  # type: ignore[method-assign]


class Extension:
    """Nothing is added: vLLM imports this module in each of its workers."""
