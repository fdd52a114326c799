"""Runs any environment of SkyRL-Gym on a bridge.

    python -m shmbridge.producers.skyrl_gym --bridge run1 --server http://127.0.0.1:9004 --tokenizer DIR \\
        --repo-id train.parquet --env gsm8k_multi_turn

`tasks.py` reads SkyRL's data sets, `play.py` plays their episodes in a `Rollout`, `traces.py` finds what a
model reasoned. `env_process.py` has environments in a process of their own. `adapter.py` is the same as an
Atropos environment; it imports atroposlib, so it is imported by its own path.
"""

from shmbridge.producers.env_process import EnvProcessEnded
from shmbridge.producers.skyrl_gym.env_process import EnvProcess, server_command
from shmbridge.producers.skyrl_gym.errors import BadTask, EnvironmentFailed
from shmbridge.producers.skyrl_gym.local_env import check_registered, made_here
from shmbridge.producers.skyrl_gym.play import SkyRLPlay
from shmbridge.producers.skyrl_gym.remote_env import RemoteEnv
from shmbridge.producers.skyrl_gym.tasks import SkyRLTask, SkyRLTasks, task_of
from shmbridge.producers.skyrl_gym.traces import THINK, TagPair, Trace, traces_of

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
