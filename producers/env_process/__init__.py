"""Environments in a process of their own: `EnvServerProcess` starts it, `Connection` calls it.

`server.py` serves there. It needs the standard library and shmbridge's HTTP front door alone, which a script
may load by file.
"""

from shmbridge.producers.env_process.connection import Connection
from shmbridge.producers.env_process.process import EnvProcessEnded, EnvServerProcess

__all__ = ["Connection", "EnvProcessEnded", "EnvServerProcess", "server"]
