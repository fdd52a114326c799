"""The public names of the vLLM backend `shmbridge`; importing this module imports vLLM."""

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
