"""Consumers of a bridge: learners, trainer adapters, servers; each imports its own heavy dependencies.

Its names are resolved on first use: importing this package imports no torch.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shmbridge.consumers.dataset import BridgeDataset as BridgeDataset
    from shmbridge.consumers.feed import BridgeAhead as BridgeAhead
    from shmbridge.consumers.feed import Drained as Drained
    from shmbridge.consumers.feed import Feed as Feed
    from shmbridge.consumers.feed import load_published as load_published
    from shmbridge.consumers.trajectories import UnfitRow as UnfitRow
    from shmbridge.consumers.weight_sync import WeightSync as WeightSync

_HOMES = {
    "BridgeAhead": "feed",
    "BridgeDataset": "dataset",
    "Drained": "feed",
    "Feed": "feed",
    "UnfitRow": "trajectories",
    "WeightSync": "weight_sync",
    "load_published": "feed",
}
__all__ = ["BridgeAhead", "BridgeDataset", "Drained", "Feed", "UnfitRow", "WeightSync", "load_published"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    value = globals()[name] = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
