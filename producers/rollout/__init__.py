"""Rollouts of plain Python environments: episodes sample from a token server and go into a lane as groups.

`runner.py` runs them, `rollout.py` samples them; `episode.py` is one trajectory;
`http_server.py` asks servers as `apis.py` says.
"""

from shmbridge.producers.rollout.call_threads import CallThreads
from shmbridge.producers.rollout.chat_format import ChatFormat
from shmbridge.producers.rollout.chat_server import ChatServer
from shmbridge.producers.rollout.episode import (
    ContextFull,
    Episode,
    EpisodeUnfinished,
    abort_waits_s,
    known_versions,
    require_values,
)
from shmbridge.producers.rollout.group import group_of
from shmbridge.producers.rollout.http_server import HttpServer
from shmbridge.producers.rollout.options import (
    add_rollout_flags,
    add_runner_flags,
    add_server_flags,
    rollout_of,
    runner_settings,
)
from shmbridge.producers.rollout.rollout import Rollout
from shmbridge.producers.rollout.runner import NothingCame, Runner, RunOptions, Task
from shmbridge.producers.rollout.sampling import (
    Message,
    NoTokens,
    Sampled,
    SampleServer,
    Sampling,
    ServerFailed,
)
from shmbridge.producers.rollout.stop import EXIT_CODE, leave, orderly_sigterm
from shmbridge.producers.rollout.survivors import (
    EpisodesLost,
    Incomplete,
    Late,
    Limits,
    Losses,
    TooManyFailures,
    survivors,
)
from shmbridge.producers.rollout.token_text import TokenText

__all__ = [
    "EXIT_CODE",
    "CallThreads",
    "ChatFormat",
    "ChatServer",
    "ContextFull",
    "Episode",
    "EpisodeUnfinished",
    "EpisodesLost",
    "HttpServer",
    "Incomplete",
    "Late",
    "Limits",
    "Losses",
    "Message",
    "NoTokens",
    "NothingCame",
    "Rollout",
    "RunOptions",
    "Runner",
    "SampleServer",
    "Sampled",
    "Sampling",
    "ServerFailed",
    "Task",
    "TokenText",
    "TooManyFailures",
    "abort_waits_s",
    "add_rollout_flags",
    "add_runner_flags",
    "add_server_flags",
    "group_of",
    "known_versions",
    "leave",
    "orderly_sigterm",
    "require_values",
    "rollout_of",
    "runner_settings",
    "survivors",
]
