"""The supervisor's plan: services in the order of their starts, each with its command, health check and
restarts.

Plain data.
"""

import os
from pathlib import Path
from typing import Literal

import msgspec
from msgspec import Struct

from shmbridge.launch.config import Restart


class Check(Struct, kw_only=True):
    """When a service counts as up: `http` answers 200 at `url`, `hub` is a living consumer of the bridge,
    `alive` is `within_s` of life.

    For the first two, `within_s` is the deadline. `token` is the bearer token of the request, if one is
    needed.
    """

    kind: Literal["http", "hub", "alive"]
    within_s: float
    url: str = ""
    token: str = ""


class Service(Struct, kw_only=True):
    """One program.

    `env` is added to the launcher's own; if `restart` is None, its end is the end of the run, an orderly one
    if its status is 0 and it is the `hub`. `again` are words for its command from its second start on. `key`
    is its key in the config.
    """

    name: str
    role: Literal["server", "hub", "environment"]
    key: str
    command: list[str]
    check: Check
    stop_grace_s: float
    folder: str = ""
    env: dict[str, str] = {}
    restart: Restart | None = None
    again: list[str] = []


class Plan(Struct, kw_only=True):
    """A run: `stages` start one after the other, each when the one before is up, and stop in reverse
    order.
    """

    bridge: str
    run_dir: str
    stages: list[list[Service]]
    log_bytes: int = 64 << 20  # of each service
    notes: list[str] = []

    @property
    def services(self) -> list[Service]:
        """All services, in the order of their starts."""
        return [service for stage in self.stages for service in stage]

    def log(self, service: Service) -> Path:
        """Returns the file with the newest output of a service."""
        return Path(self.run_dir) / "logs" / f"{service.name}.log"

    def save(self, path: Path) -> None:
        """Writes the plan, readable by its owner only: commands may contain tokens."""
        write_private(path, msgspec.json.format(msgspec.json.encode(self)))

    @classmethod
    def load(cls, path: Path) -> "Plan":
        """Returns a plan written by `save`."""
        return msgspec.json.decode(path.read_bytes(), type=cls)


def write_private(path: Path, content: bytes) -> None:
    """Replaces a file by one that only this user can read."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    draft.touch(mode=0o600)
    draft.write_bytes(content)
    draft.replace(path)
