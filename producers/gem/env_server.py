"""Serves one Atropos environment, which has the main thread of this process: `python -m ...gem.env_server`.

`OwnProcess` starts it. Its event loop runs in the main thread, so that the environment may use signals; calls
come in threads of an HTTP server, a connection for each `AtroposGemEnv` of the other process.
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
import threading
from collections.abc import Mapping
from types import UnionType
from typing import ClassVar

from shmbridge.producers.env_server import BOUNDS, Json, add_server_flags, end_with, serve
from shmbridge.producers.gem.atropos_env import AtroposGemEnv
from shmbridge.producers.gem.runtime import MAIN, environment_class
from shmbridge.producers.gem.turns import Action


class Envs:
    """The environments of this process, by number. Any thread; calls of one in turn."""

    CALLS: ClassVar[Mapping[str, Mapping[str, type | UnionType]]] = {
        "make": {"arguments": dict},
        "reset": {"episode": int, "seed": int | None},
        "step": {"episode": int, "action": dict},
        "beside": {"episode": int, "other": int},
        "random": {"episode": int},
        "close": {"episode": int},
    }

    def __init__(self, environment: str) -> None:
        self._environment = environment
        self._envs: dict[int, AtroposGemEnv] = {}
        self._numbers = itertools.count()

    def has(self, number: int) -> bool:
        """Returns whether there is this one."""
        return number in self._envs

    def make(self, asked: Json) -> Json:
        """Makes one."""
        env = AtroposGemEnv(self._environment, process=False, **asked["arguments"])
        number = next(self._numbers)
        self._envs[number] = env
        return {"episode": number}

    def reset(self, asked: Json) -> Json:
        """Begins an episode."""
        observation, info = self._envs[asked["episode"]].reset(asked["seed"])
        return {"observation": observation, "info": info}

    def step(self, asked: Json) -> Json:
        """Answers."""
        action = asked["action"]
        said = self._envs[asked["episode"]].step(
            Action(**action) if "token_ids" in action else action["text"]
        )
        return {"said": said}

    def beside(self, asked: Json) -> Json:
        """Begins an episode as a sibling of another one's, which was not answered yet."""
        observation, info = self._envs[asked["episode"]].begin_beside(self._envs[asked["other"]])
        return {"observation": observation, "info": info}

    def random(self, asked: Json) -> Json:
        """Returns an action."""
        return {"action": self._envs[asked["episode"]].sample_random_action()}

    def close(self, asked: Json) -> Json:
        """Closes one; twice is allowed."""
        env = self._envs.pop(asked["episode"], None)
        if env is not None:
            env.close()
        return {}


def _end_children_with_this() -> None:
    """Has what the environment forks, such as a pool of processes, end with this process, however it ends.

    The kernel means the thread that forked: only what the main thread forks is ended so.
    """
    forking = threading.local()

    def before() -> None:
        forking.parent = os.getpid() if threading.current_thread() is threading.main_thread() else None

    def in_child() -> None:
        if forking.parent is not None:
            end_with(forking.parent)

    os.register_at_fork(before=before, after_in_child=in_child)


def main() -> None:
    """Serves until it is told to end."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--environment", required=True, help='"package.module:Class" or "path/to/file.py:Class"'
    )
    parser.add_argument("--path", default="", help="folders of imports beside this process's own")
    add_server_flags(parser)
    options = parser.parse_args()
    if options.parent is not None:
        end_with(options.parent)
    sys.path += [each for each in options.path.split(os.pathsep) if each and each not in sys.path]
    _end_children_with_this()
    environment_class(options.environment)  # here: what it does with signals as it is imported
    MAIN.take()
    serving = (Envs(options.environment), options.port, options.ready_fd, BOUNDS)
    threading.Thread(target=serve, args=serving, name="shmbridge-gem-calls", daemon=True).start()
    MAIN.run()


if __name__ == "__main__":
    main()
