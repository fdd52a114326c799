"""Servers that load each new version by themselves: the embedded policy server, and vLLM with this package's
middleware.

Nothing is pushed: `update` polls `GET /policy_version` or `GET /health` until the server reports the version.
"""

from __future__ import annotations

import time
from typing import Any

from shmbridge.consumers.engines.engine import Engine, EngineFailed, Update, version_of
from shmbridge.consumers.engines.http_calls import answer_of

_TIMEOUT_S = 10.0  # of one request
_FIRST_S, _LONGEST_S = 0.002, 0.1  # between two requests


class Following(Engine):
    """One server, at a URL."""

    def __init__(self, url: str) -> None:
        self.address = url.rstrip("/")

    def update(self, update: Update) -> None:
        """Waits until the server has loaded or refused this version. Blocks; raises EngineFailed."""
        until, tick = time.monotonic() + update.timeout_s, _FIRST_S
        while True:
            said = _said_version(self.address)
            version = version_of(said.get("version"))
            if version == update.version:
                return
            refused = said.get("refused_version") == update.version
            if refused or time.monotonic() >= until:
                error = said.get("last_error")
                raise EngineFailed(
                    f"{self.address} is at version {version}, "
                    + (
                        f"and refused {update.version}"
                        if refused
                        else f"not {update.version}, after {update.timeout_s:.0f} s"
                    )
                    + (f": {error}" if error else ""),
                    hint=f"does it follow bridge {update.bridge!r}? see its log",
                )
            time.sleep(tick)
            tick = min(2 * tick, _LONGEST_S)

    def version(self) -> int | None:
        """Returns the version that the server samples with. Blocks; raises EngineFailed."""
        return version_of(_said_version(self.address).get("version"))


def _said_version(url: str) -> dict[str, Any]:
    """Returns the server's "version", and "refused_version" and "last_error" if present.

    Blocks; raises EngineFailed, also if the server reports no version.
    """
    # the policy server reports it in /health
    for path, word in (("/policy_version", "version"), ("/health", "weight_version")):
        if word in (said := answer_of(url, path, timeout_s=_TIMEOUT_S)):
            return said | {"version": said[word]}
    raise EngineFailed(
        f"{url} does not say which policy version it has", hint="is that a server that follows a bridge?"
    )
