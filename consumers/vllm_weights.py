"""The public names of the vLLM backend `shmbridge`; importing this module imports vLLM, and registers the
backend: a trainer's process without an engine loads no plugins of vLLM's.
"""

from shmbridge.consumers.vllm.plugin import BACKEND, register
from shmbridge.consumers.vllm.trainer import ShmBridgeTrainerInitInfo, ShmBridgeTrainerWeightTransferEngine
from shmbridge.consumers.vllm.worker import (
    ShmBridgeInitInfo,
    ShmBridgeUpdateInfo,
    ShmBridgeWeightTransferEngine,
)

__all__ = [
    "BACKEND",
    "ShmBridgeInitInfo",
    "ShmBridgeTrainerInitInfo",
    "ShmBridgeTrainerWeightTransferEngine",
    "ShmBridgeUpdateInfo",
    "ShmBridgeWeightTransferEngine",
    "register",
]

register()
