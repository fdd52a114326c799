"""The plugin that vLLM calls in each process: registers the backend shmbridge without importing it."""

from contextlib import suppress

BACKEND = "shmbridge"
_REGISTRIES = {
    "WeightTransferEngineFactory": ("shmbridge.consumers.vllm.backend", "ShmBridgeWeightTransferEngine"),
    "WeightTransferTrainerFactory": (
        "shmbridge.consumers.vllm.backend",
        "ShmBridgeTrainerWeightTransferEngine",
    ),
}


def register() -> None:
    """Registers the backend with vLLM's two factories. Never blocks; idempotent, as vLLM requires."""
    from vllm.distributed.weight_transfer import factory

    for registry, (module, name) in _REGISTRIES.items():
        with suppress(ValueError):  # already registered
            getattr(factory, registry).register_engine(BACKEND, module, name)
