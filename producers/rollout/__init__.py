"""Rollouts of plain Python environments: episodes sample from a token server and go into a lane as groups.

`runner.py` plays groups, `survivors.py` one group; `episode.py` is one trajectory. `servers.py` asks
inference servers in the forms of `sampling.py`. `program.py` has what command lines share.
"""

from shmbridge.producers.rollout.episode import (
    ChatFormat,
    ContextFull,
    Episode,
    EpisodeUnfinished,
    TokenText,
    abort_waits_s,
    group_of,
    known_versions,
    require_values,
)
from shmbridge.producers.rollout.program import (
    EXIT_CODE,
    add_rollout_flags,
    add_runner_flags,
    add_server_flags,
    exit_code,
    leave,
    orderly_sigterm,
    rollout_of,
    run_rollout,
    runner_settings,
    setting,
)
from shmbridge.producers.rollout.runner import NothingCame, Rollout, Runner, RunOptions, Task
from shmbridge.producers.rollout.sampling import (
    Message,
    NoTokens,
    Sampled,
    SampleServer,
    Sampling,
    ServerFailed,
)
from shmbridge.producers.rollout.servers import ChatServer, HttpServer
from shmbridge.producers.rollout.survivors import (
    CallThreads,
    EpisodesLost,
    Incomplete,
    Late,
    Limits,
    Losses,
    TooManyFailures,
    survivors,
)

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
    "exit_code",
    "group_of",
    "known_versions",
    "leave",
    "orderly_sigterm",
    "require_values",
    "rollout_of",
    "run_rollout",
    "runner_settings",
    "setting",
    "survivors",
]
