"""The control plane: messages over ZeroMQ, the hub's server, the participants' client."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shmbridge.control.client import AsyncControlClient as AsyncControlClient
    from shmbridge.control.client import ControlClient as ControlClient
    from shmbridge.control.client import RequestRefused as RequestRefused
    from shmbridge.control.client import control_address as control_address
    from shmbridge.control.environments import HubView as HubView
    from shmbridge.control.server import ControlServer as ControlServer

_FROM = {
    "AsyncControlClient": "client",
    "ControlClient": "client",
    "ControlServer": "server",
    "HubView": "environments",
    "RequestRefused": "client",
    "control_address": "client",
}
__all__ = [*_FROM, "client", "environments", "messages", "server"]


def __getattr__(name: str) -> Any:
    if name not in _FROM:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"shmbridge.control.{_FROM[name]}"), name)
