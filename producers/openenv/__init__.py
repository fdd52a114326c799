"""Agents of any kind through OpenEnv's capture proxy: finished sessions become rows of a group.

`capture.py` serves the proxy and notes versions; `rows.py` makes rows of calls; `agents.py` runs groups.
"""

from shmbridge.producers.openenv.agents import AgentRollout, SessionUnusable, harbor_play
from shmbridge.producers.openenv.capture import Capture, VersionedGraph, noting
from shmbridge.producers.openenv.rows import (
    AgentEpisode,
    Call,
    Row,
    calls_of_harbor,
    calls_of_trace,
    group_of_agents,
    rows_of,
)

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
