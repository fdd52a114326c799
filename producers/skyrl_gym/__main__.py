"""The command line of SkyRL-Gym's environments: arguments, what is checked first, and how it ends.

Called as `python -m shmbridge.producers.skyrl_gym`.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack
from typing import Any

from shmbridge.cli.base import Parser, run_program
from shmbridge.producers.rollout import (
    Task,
    add_rollout_flags,
    exit_code,
    leave,
    rollout_of,
    run_rollout,
    setting,
)
from shmbridge.producers.skyrl_gym.environments import EnvProcess, check_registered, made_here, server_command
from shmbridge.producers.skyrl_gym.play import THINK, Make, SkyRLPlay, SkyRLTask, SkyRLTasks, TagPair

_PROGRAM = "shmbridge.producers.skyrl_gym"
EXAMPLES = """\
examples:
  python -m shmbridge.producers.skyrl_gym --bridge run1 --server http://127.0.0.1:9004 --tokenizer DIR \\
      --repo-id ~/data/gsm8k --env gsm8k_multi_turn --max-turns 3 --max-tokens 512

  # tools: an answer ends where the environment takes over
  python -m shmbridge.producers.skyrl_gym ... --repo-id searchR1.parquet --env search \\
      --stop '</search>' --stop '</answer>' \\
      --env-config search_url=http://127.0.0.1:8000/retrieve topk=3 timeout=30 log_requests=false

  # an environment of your own, registered by my_envs.py
  python -m shmbridge.producers.skyrl_gym ... --repo-id tasks.jsonl --import my_envs --env my_env

It begins at once; groups wait in the lane for a consumer. The score of a trajectory is the sum of its steps'
rewards. SIGTERM and Ctrl-C end it in order, with exit code 143 or 130; a second one ends it at once.
Exit code 1: groups failed, too many in a row or all. 2: it could not start, or was refused.
"""


def main(argv: list[str] | None = None) -> int:
    """Runs environments until the bridge drains, or as long as the flags say; returns the exit code."""
    options = _parser().parse_args(argv)
    return run_rollout(_PROGRAM, "skyrl-gym", lambda: asyncio.run(_run(options)))


async def _run(options: argparse.Namespace) -> int:
    tags = [TagPair(start, end) for start, end in options.thought_tags] or [THINK]
    env_config = dict(map(setting, options.env_config))
    with ExitStack() as stack:
        if options.env_python:
            command = server_command(options.repo_id, python=options.env_python, split=options.split)
            process = EnvProcess(command, modules=options.modules, env_config=env_config)
            stack.callback(process.close)
            rows: Any = await asyncio.to_thread(process.rows)
            tasks = SkyRLTasks(rows, env_class=options.env)
            make: Make = process.make
        else:
            tasks = SkyRLTasks.load(options.repo_id, split=options.split, env_class=options.env)
            check_registered(
                {task.data.env_class for task in map(tasks.__getitem__, range(len(tasks)))}, options.modules
            )

            def make(env_class: str, extras: dict[str, Any]) -> Any:
                return made_here(env_class, extras, env_config)

        play = SkyRLPlay(
            make,
            tags=tags,
            process_rewards=options.process_rewards,
            max_turns=options.max_turns,
            threads=options.env_threads,
        )
        source = tasks.repeated(epochs=options.epochs, seed=options.shuffle)
        async with rollout_of(options, options.env or "skyrl_gym", env_metrics=play.env_metrics) as rollout:
            await rollout.run(_read_apart(itertools.islice(source, options.max_groups)), play)
        return exit_code(rollout)


async def _read_apart(tasks: Iterator[Task[SkyRLTask]]) -> AsyncIterator[Task[SkyRLTask]]:
    """The tasks, read in a thread: their rows may be in a process that is started again just now."""
    while (task := await asyncio.to_thread(next, tasks, None)) is not None:
        yield task


def _parser() -> Parser:
    parser = Parser(
        "python -m shmbridge.producers.skyrl_gym",
        description="Play SkyRL-Gym environments; their groups go into shared memory.",
        examples=EXAMPLES,
    )
    add_rollout_flags(parser)
    add = parser.add_argument_group("SkyRL-Gym").add_argument
    add("--repo-id", required=True, metavar="PATH_OR_NAME",
        help="data set in SkyRL's format: a parquet, json or jsonl file, a folder, or a name")  # fmt: skip
    add("--split", default="train", help="part of the data set [train]")
    add("--env", metavar="NAME", help="environment of all rows [what each row says]")
    add("--import", dest="modules", action="append", default=[], metavar="MODULE",
        help="import it first, to register environments; may be repeated")  # fmt: skip
    add("--env-config", nargs="+", action="extend", default=[], metavar="KEY=VALUE",
        help="settings of the environment class")  # fmt: skip
    add("--max-turns", type=int, metavar="N", help="most turns, for environments that use it [the row's]")
    add("--epochs", type=int, metavar="N", help="end after the data set was played N times [no end]")
    add("--shuffle", type=int, metavar="SEED", help="another order in each epoch [the order of the rows]")
    add("--thought-tags", nargs=2, action="append", default=[], metavar=("START", "END"),
        help="tags around a reasoning trace; may be repeated [<think> </think>]")  # fmt: skip
    add("--no-process-rewards", dest="process_rewards", action="store_false",
        help="carry the score alone, not the reward of each step")  # fmt: skip
    add("--env-threads", type=int, default=256, metavar="N", help="calls of environments at once [256]")
    add(
        "--env-python",
        metavar="PATH",
        help="run the environments in a process of this interpreter [in this one]",
    )
    return parser


if __name__ == "__main__":
    leave(run_program("skyrl_gym", main))
