"""Health checks of services, and a check that the run's bridge and ports are free; half a second at most
each.
"""

import contextlib
import http.client
import socket
from urllib.parse import urlsplit

import shmbridge
from shmbridge.errors import LaunchFailed
from shmbridge.launch.plan import Check, Plan

_LOOK_S = 0.5


def is_up(check: Check, bridge: str, alive_s: float) -> bool:
    """Returns whether a process that has been alive for `alive_s` seconds is up."""
    if check.kind == "alive":
        return alive_s >= check.within_s
    return _consumer_pid(bridge) is not None if check.kind == "hub" else _answers(check.url, check.token)


def look_around(plan: Plan) -> None:
    """Raises LaunchFailed if the run's bridge or one of its ports is in use: its owner would pass our health
    checks.
    """
    if (consumer := _consumer_pid(plan.bridge)) is not None:
        raise LaunchFailed(
            f"bridge {plan.bridge} has a living consumer, pid {consumer}",
            hint="end it, or use another bridge",
        )
    for service in plan.services:
        if service.check.kind == "http":
            parts = urlsplit(service.check.url)
            try:
                socket.create_connection((parts.hostname or "", parts.port or 80), _LOOK_S).close()
            except (OSError, UnicodeError):
                # The port is free; an invalid name is left to the service to report.
                continue
            taken = f"port {parts.port}, which is for {service.name}, is in use"
            raise LaunchFailed(taken, hint=f"set another {service.key}.port, or 0 for a free one")


def _consumer_pid(bridge: str) -> int | None:
    return next((info.consumer_pid for info in shmbridge.list_bridges() if info.name == bridge), None)


def _answers(url: str, token: str) -> bool:
    parts = urlsplit(url)
    try:
        with contextlib.closing(
            http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=_LOOK_S)
        ) as connection:
            connection.request(
                "GET", parts.path, headers={"Authorization": f"Bearer {token}"} if token else {}
            )
            return connection.getresponse().status == 200
    except (OSError, UnicodeError, http.client.HTTPException):
        return False
