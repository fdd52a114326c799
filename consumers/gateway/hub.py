"""The consumer of a gateway, with the recording that its options ask for."""

from __future__ import annotations

from typing import Any

from shmbridge import Consumer, Run
from shmbridge.consumers.gateway.options import GatewayOptions


def open_hub(options: GatewayOptions, run: Run | None, **more: Any) -> Consumer:
    """Returns the hub of the gateway's bridge; `more` goes to Consumer. Raises as Consumer and Recorder."""
    if options.record is None:
        return Consumer(options.bridge, run, lanes=options.lanes, **more)
    from shmbridge.archive.recorder import Recorder

    tap = Recorder(options.record)
    try:
        return Consumer(options.bridge, run, lanes=options.lanes, tap=tap, **more)
    except BaseException:
        tap.close()
        raise
