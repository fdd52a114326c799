"""The control plane: messages over ZeroMQ, the hub's server, the participants' client."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shmbridge.control.server import AsyncControlClient as AsyncControlClient
    from shmbridge.control.server import ControlClient as ControlClient
    from shmbridge.control.server import ControlServer as ControlServer
    from shmbridge.control.server import HubView as HubView
    from shmbridge.control.server import RequestRefused as RequestRefused
    from shmbridge.control.server import control_address as control_address

_NAMES = [
    "AsyncControlClient",
    "ControlClient",
    "ControlServer",
    "HubView",
    "RequestRefused",
    "control_address",
]
__all__ = [*_NAMES, "client", "environments", "messages", "server"]


def __getattr__(name: str) -> Any:
    if name not in _NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module("shmbridge.control.server"), name)
