"""What vLLM calls in each of its processes: it is told of a weight transfer backend named shmbridge.

Imports nothing of it yet.
"""

from contextlib import suppress

BACKEND = "shmbridge"
_REGISTRIES = {
    "WeightTransferEngineFactory": ("shmbridge.consumers.vllm.worker", "ShmBridgeWeightTransferEngine"),
    "WeightTransferTrainerFactory": (
        "shmbridge.consumers.vllm.trainer",
        "ShmBridgeTrainerWeightTransferEngine",
    ),
}


def register() -> None:
    """Tells vLLM's two factories of the backend.

    Never blocks; idempotent, since vLLM may load plugins several times in a process.
    """
    from vllm.distributed.weight_transfer import factory

    for registry, (module, name) in _REGISTRIES.items():
        with suppress(ValueError):  # it is registered
            getattr(factory, registry).register_engine(BACKEND, module, name)
