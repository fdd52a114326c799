"""The control plane: messages over ZeroMQ, the hub's server, the participants' client."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shmbridge.control.environments import HubView as HubView
    from shmbridge.control.server import AsyncControlClient as AsyncControlClient
    from shmbridge.control.server import ControlClient as ControlClient
    from shmbridge.control.server import ControlServer as ControlServer
    from shmbridge.control.server import RequestRefused as RequestRefused
    from shmbridge.control.server import control_address as control_address

_FROM = {
    "AsyncControlClient": "server",
    "ControlClient": "server",
    "ControlServer": "server",
    "HubView": "environments",
    "RequestRefused": "server",
    "control_address": "server",
}
__all__ = [
    "AsyncControlClient",
    "ControlClient",
    "ControlServer",
    "HubView",
    "RequestRefused",
    "control_address",
    "environments",
    "messages",
    "server",
]


def __getattr__(name: str) -> Any:
    if name not in _FROM:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"shmbridge.control.{_FROM[name]}"), name)
