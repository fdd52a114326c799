"""Makes `gem.make("atropos", environment=...)` an `AtroposGemEnv`: `register`."""

from __future__ import annotations

NAME = "atropos"


def register(name: str = NAME) -> None:
    """Registers `AtroposGemEnv` with gem; again does nothing. Blocks while gem is imported."""
    import gem
    from gem.envs.registration import ENV_REGISTRY

    if name not in ENV_REGISTRY:
        gem.register(name, "shmbridge.producers.gem.atropos_env:AtroposGemEnv")
