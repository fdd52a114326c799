"""What a user of the gateway chooses. No I/O."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from shmbridge.batching.scheduler import Policy

Compat = Literal["default", "strict"]


@dataclass(frozen=True, slots=True)
class GatewayOptions:
    """How one gateway behaves.

    Args:
        bridge: name of the bridge.
        compat: "strict" answers with the numbers and the order of the Atropos server; "default" mends what
            loses data there.
        policy: how batches are formed in default mode; as Consumer's.
        lane_bytes: of each remote environment's lane, reserved when it registers.
        lanes: most lanes taken from at once.
        token: what a request must bear; empty: nothing.
        host_names: names with a dot that it is reached by, besides the machine's own; asked for where there
            is no token.
        max_body_bytes: of one request, after gunzip.
        held_bytes: memory of all posts that wait in here for room at one time; more wait unread, on their
            connections.
        body_pause_s: how long a body that has begun may bring nothing: a poster that was stopped holds no
            room that others wait for.
        post_deadline_s: how long a post waits for room before it is answered with 503. Atropos' environments
            wait 300 s.
        env_timeout_s: silence after which a remote environment loses its weight and its lane; it gets them
            back when it speaks. After sixty times as long it is forgotten.
    """

    bridge: str
    compat: Compat = "default"
    policy: Policy = "fair"
    lane_bytes: int | str = "64M"
    lanes: int = 256
    token: str = ""
    host_names: tuple[str, ...] = ()
    max_body_bytes: int = 256 << 20
    held_bytes: int = 512 << 20
    body_pause_s: float = 30.0
    post_deadline_s: float = 240.0
    env_timeout_s: float = 60.0
