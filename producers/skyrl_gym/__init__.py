"""Runs any environment of SkyRL-Gym on a bridge.

    python -m shmbridge.producers.skyrl_gym --bridge run1 --server http://127.0.0.1:9004 --tokenizer DIR \\
        --repo-id train.parquet --env gsm8k_multi_turn

`play.py` reads SkyRL's data sets, plays their episodes in a `Rollout`, and finds what a model reasoned.
`environments.py` calls the environments, here or in a process of their own, which `env_server.py` is.
`adapter.py` is the same as an Atropos environment; it imports atroposlib, so import it by its own path.
"""

from shmbridge.producers.env_process import EnvProcessEnded
from shmbridge.producers.skyrl_gym.environments import (
    BadTask,
    EnvironmentFailed,
    EnvProcess,
    RemoteEnv,
    check_registered,
    made_here,
    server_command,
)
from shmbridge.producers.skyrl_gym.play import (
    THINK,
    SkyRLPlay,
    SkyRLTask,
    SkyRLTasks,
    TagPair,
    Trace,
    task_of,
    traces_of,
)

__all__ = [
    "THINK",
    "BadTask",
    "EnvProcess",
    "EnvProcessEnded",
    "EnvironmentFailed",
    "RemoteEnv",
    "SkyRLPlay",
    "SkyRLTask",
    "SkyRLTasks",
    "TagPair",
    "Trace",
    "check_registered",
    "made_here",
    "server_command",
    "task_of",
    "traces_of",
]
