"""A pytest plugin for the tests that atroposlib ships: the server that they start is a strict gateway.

They start `atroposlib.cli.run_api` and ask http://localhost:8000. Only these two are replaced. It is loaded
with `-p upstream_pointer`.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from typing import Any

import requests

_BRIDGE = os.environ["UPSTREAM_TESTS_BRIDGE"]
_THERE = "http://localhost:8000"
_numbers = itertools.count()
_url = _THERE
_ask = requests.Session.request


class Popen(subprocess.Popen):
    """The original's command starts a gateway, on a port of the kernel's choice and a bridge of its own."""

    def __init__(self, command: Any, *arguments: Any, **options: Any) -> None:
        global _url
        swap = isinstance(command, list) and "atroposlib.cli.run_api" in command
        if swap:
            bridge = f"{_BRIDGE}-{next(_numbers)}"
            command = [
                sys.executable,
                "-m",
                "shmbridge.cli",
                "gateway",
                "--json",
                "--port",
                "0",
                "--compat",
                "strict",
                "--bridge",
                bridge,
            ]
        super().__init__(command, *arguments, **options)
        if swap:
            assert self.stdout is not None
            _url = json.loads(self.stdout.readline())["url"]


def _request(session: requests.Session, method: str, url: str, **options: Any) -> requests.Response:
    return _ask(session, method, url.replace(_THERE, _url, 1), **{"timeout": 30, **options})


subprocess.Popen = Popen  # type: ignore[misc]
requests.Session.request = _request  # type: ignore[method-assign, assignment]
