"""Consumers of a bridge: learners, trainer adapters, servers; each imports its own heavy dependencies.

`WeightSync` and `BridgeDataset` are resolved on first use, so that importing this package imports no torch.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shmbridge.consumers.dataset import BridgeDataset as BridgeDataset
    from shmbridge.consumers.weight_sync import WeightSync as WeightSync

_HOMES = {"BridgeDataset": "dataset", "WeightSync": "weight_sync"}
__all__ = ["BridgeDataset", "WeightSync"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    value = globals()[name] = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
