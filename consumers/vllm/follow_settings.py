"""What a server that follows a bridge is told, in vLLM's own `--additional-config`.

Knows nothing of engines.
"""

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
        pause: what becomes of requests in flight while new weights are loaded: "keep" holds them and lets
            them go on, "wait" lets them end first, "abort" ends them with what they have.
        recompute: kept requests go on over a KV cache computed again with the new weights. False: over the
            old one; and the prefix cache, which vLLM empties only while no request holds a part of it, may
            then serve entries of earlier versions.
    """

    bridge: str
    pause: Pause = "keep"
    recompute: bool = True


def follow_settings(additional_config: object) -> FollowSettings:
    """Returns the settings in what vLLM holds as `additional_config`; raises BadConfig."""
    given: Any = additional_config.get("shmbridge") if isinstance(additional_config, Mapping) else None
    if given is None:
        raise BadConfig("vLLM is to follow a bridge, and no bridge is named", hint=_EXAMPLE)
    try:
        settings = msgspec.convert(given, FollowSettings)
    except msgspec.ValidationError as error:
        raise BadConfig(f"shmbridge in --additional-config: {error}", hint=_EXAMPLE) from error
    check_bridge_name(settings.bridge)
    return settings
