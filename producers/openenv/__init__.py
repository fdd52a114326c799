"""Agents of any kind through OpenEnv's capture proxy: finished sessions become rows of a group.

`capture.py` serves the proxy and notes versions; `agents.py` makes rows of calls, and runs groups.
"""

from shmbridge.producers.openenv.agents import (
    AgentEpisode,
    AgentRollout,
    Call,
    Row,
    SessionUnusable,
    calls_of_harbor,
    calls_of_trace,
    group_of_agents,
    harbor_play,
    rows_of,
)
from shmbridge.producers.openenv.capture import Capture, VersionedGraph, noting

__all__ = [
    "AgentEpisode",
    "AgentRollout",
    "Call",
    "Capture",
    "Row",
    "SessionUnusable",
    "VersionedGraph",
    "calls_of_harbor",
    "calls_of_trace",
    "group_of_agents",
    "harbor_play",
    "noting",
    "rows_of",
]
