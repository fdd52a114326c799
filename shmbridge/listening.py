"""Why a program cannot listen at an address, in one line."""

import errno
import os
import socket

from shmbridge.errors import BadArgument


def cannot_listen(host: str, port: int, error: OSError | UnicodeError, flag: str = "--port") -> BadArgument:
    """Returns the error for an address that could not be bound.

    Args:
        host, port: as they were given.
        error: what binding raised.
        flag: the one that gives the port.
    """
    where = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    if isinstance(error, socket.gaierror | UnicodeError):
        return BadArgument(
            f"host {host!r} has no address", hint="127.0.0.1 for this machine alone, 0.0.0.0 for all networks"
        )
    if error.errno == errno.EADDRINUSE:
        hint = f"another {flag}, or find who has it: ss -ltnp 'sport = :{port}'"
        return BadArgument(f"cannot listen on {where}: the port is in use", hint=hint)
    if error.errno == errno.EADDRNOTAVAIL:
        hint = "127.0.0.1 for this machine alone, 0.0.0.0 for all networks"
        return BadArgument(f"cannot listen on {where}: {host} is no address of this machine", hint=hint)
    if error.errno in (errno.EACCES, errno.EPERM):
        return BadArgument(
            f"cannot listen on {where}: uid {os.geteuid()} may not", hint=f"a {flag} of 1024 or above"
        )
    return BadArgument(f"cannot listen on {where}: {error.strerror or error}", hint=f"another {flag}")
