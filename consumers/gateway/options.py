"""The options of a gateway. No I/O."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from shmbridge.httpd.door import Bounds
from shmbridge.hub import Policy
from shmbridge.schema import Split

Compat = Literal["default", "strict"]
_BOUNDS = Bounds(connections=4096)


@dataclass(frozen=True, slots=True)
class GatewayOptions:
    """How one gateway behaves."""

    bridge: str
    # "strict" has the Atropos server's numbers and order; "default" mends what loses data there
    compat: Compat = "default"
    policy: Policy = "fair"  # how batches are formed in default mode; as Consumer's
    split: Split | None = "train"  # groups that /batch serves; None: all
    lane_bytes: int | str = "64M"  # of each remote environment's lane, reserved when it registers
    lanes: int = 256  # most lanes taken from at once
    token: str = ""  # bearer token that every request must have; empty: none
    host_names: tuple[str, ...] = ()  # names with a dot, besides the machine's own; checked without a token
    max_body_bytes: int = 256 << 20  # of one request, after gunzip
    held_bytes: int = 512 << 20  # memory of all posts that wait for room; further posts wait unread
    post_deadline_s: float = 240.0  # longest wait of a post, then 503; Atropos' environments wait 300 s
    # silence after which an environment loses weight and lane until its next request; after 60 times that,
    # its number
    env_timeout_s: float = 60.0
    bounds: Bounds = _BOUNDS  # of connections, heads and other bodies
    record: str | None = None  # folder that every record is written to before a trainer gets it
