"""SkyRL's data sets as tasks: a row's prompt begins the episode, all else goes to its environment."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shmbridge.producers.rollout import Task
from shmbridge.producers.skyrl_gym.errors import BadTask
from shmbridge.producers.skyrl_gym.rows import rows_of

_FORMAT = (
    'a row is {"prompt": [{"role": ..., "content": ...}], "env_class": ..., and what its environment needs}'
)


@dataclass(frozen=True)
class SkyRLTask:
    """What an environment is made of.

    Attributes:
        env_class: name under which `skyrl_gym` knows it.
        extras: all of the row but prompt and env_class: reward_spec, extra_info, max_turns ...
    """

    env_class: str
    extras: Mapping[str, Any]


class SkyRLTasks:
    """The tasks of one data set, in its order. Any thread; asking for one blocks only if its rows do.

    Args:
        rows: of SkyRL's format; those of a list are checked now, others when they are asked for.
        env_class: the environment of all rows; None: what each row says.

    Raises:
        BadTask: a row lacks a prompt or an environment.
    """

    def __init__(self, rows: Sequence[Mapping[str, Any]], *, env_class: str | None = None) -> None:
        self._rows, self._env_class = rows, env_class
        if isinstance(rows, list):
            for number in range(len(rows)):
                self[number]

    @classmethod
    def load(cls, source: str, *, split: str = "train", env_class: str | None = None) -> SkyRLTasks:
        """Returns the tasks of a file, a folder, or a data set's name; see `rows_of`. Blocks.

        Raises:
            BadTask: it cannot be read, or a row is no task.
        """
        try:
            rows = rows_of(source, split)
        except (ValueError, OSError) as error:
            raise BadTask(
                str(error), hint="give a parquet, json or jsonl file, a folder, or a name"
            ) from error
        except ImportError as error:
            raise BadTask(
                f"{source} needs {error.name} to be read", hint=f"pip install {error.name}"
            ) from error
        return cls(rows, env_class=env_class)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, number: int) -> Task[SkyRLTask]:
        return task_of(self._rows[number], number, self._env_class)

    def repeated(self, *, epochs: int | None = None, seed: int | None = None) -> Iterator[Task[SkyRLTask]]:
        """Yields every task once in each epoch.

        Args:
            epochs: None: without end.
            seed: of a new order in each epoch; None: the order of the rows.
        """
        done = 0
        while epochs is None or done < epochs:
            numbers = list(range(len(self)))
            if seed is not None:
                random.Random(f"{seed} {done}").shuffle(numbers)
            for number in numbers:
                yield self[number]
            done += 1


def task_of(row: Mapping[str, Any], number: int, env_class: str | None = None) -> Task[SkyRLTask]:
    """Returns the task of one row; its instance_id is the row's number, as in SkyRL. Never blocks.

    Args:
        row: prompt, env_class, and what the environment needs.
        number: of the row in its data set.
        env_class: takes the place of the row's own.

    Raises:
        BadTask: a field is missing, or of another form; the message names row and field.
    """
    extras = {key: value for key, value in row.items() if key not in ("prompt", "env_class")}
    name = env_class or row.get("env_class")
    if "prompt" not in row:
        raise BadTask(
            f"row {number} has no prompt; it has {', '.join(map(str, row)) or 'nothing'}", hint=_FORMAT
        )
    if not _is_conversation(row["prompt"]):
        raise BadTask(
            f"row {number}: the prompt {str(row['prompt'])[:80]!r} is no list of messages", hint=_FORMAT
        )
    if not isinstance(name, str) or not name:
        raise BadTask(
            f"row {number} names no environment (env_class: {name!r})", hint="name one for all: --env"
        )
    return Task(row["prompt"], SkyRLTask(name, extras), str(number))


def _is_conversation(prompt: Any) -> bool:
    return (
        isinstance(prompt, (list, tuple))
        and len(prompt) > 0
        and all(
            isinstance(each, Mapping) and isinstance(each.get("role"), str) and "content" in each
            for each in prompt
        )
    )
