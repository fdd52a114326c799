"""The settings of a server that follows a bridge, from vLLM's `--additional-config`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from shmbridge.config import check_bridge_name
from shmbridge.consumers.engines.engine import Pause
from shmbridge.errors import BadConfig

_EXAMPLE = """give the server --additional-config '{"shmbridge": {"bridge": "run1", "pause": "keep"}}'"""


class FollowSettings(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """The value of `shmbridge` in `--additional-config`.

    Args:
        bridge: whose weights segment is followed.
        pause: requests in flight while new weights are loaded: "keep" holds and continues them, "wait" lets
            them finish first, "abort" ends them with their tokens so far.
        recompute: kept requests continue with a KV cache recomputed under the new weights. False: with the
            old one; then the prefix cache, which vLLM empties only while no request uses it, may serve
            entries of earlier versions.
    """

    bridge: str
    pause: Pause = "keep"
    recompute: bool = True


def follow_settings(additional_config: object) -> FollowSettings:
    """Parses vLLM's `additional_config`; raises BadConfig."""
    given: Any = additional_config.get("shmbridge") if isinstance(additional_config, Mapping) else None
    if given is None:
        raise BadConfig("vLLM is to follow a bridge, and no bridge is named", hint=_EXAMPLE)
    try:
        settings = msgspec.convert(given, FollowSettings)
    except msgspec.ValidationError as error:
        raise BadConfig(f"shmbridge in --additional-config: {error}", hint=_EXAMPLE) from error
    check_bridge_name(settings.bridge)
    return settings
