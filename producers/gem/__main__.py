"""The command line around `GemGame`. Called as `python -m shmbridge.producers.gem`."""

from __future__ import annotations

import argparse
import asyncio
import importlib
from itertools import islice

from shmbridge.cli.base import Parser, run_program
from shmbridge.producers.gem.game import NAME, GemGame, register
from shmbridge.producers.rollout import add_rollout_flags, exit_code, leave, rollout_of, run_rollout, setting

_PROGRAM = "shmbridge.producers.gem"
EXAMPLES = """\
examples:
  python -m shmbridge.producers.gem --bridge run1 --server http://127.0.0.1:9004 --tokenizer DIR \\
      --env game:GuessTheNumber-v0-easy --group-size 8
  python -m shmbridge.producers.gem --bridge run1 --server http://127.0.0.1:8001 --max-groups 500 \\
      --tokenizer Qwen/Qwen3-0.6B --env rg:leg_counting --env-arg size=1000
  python -m shmbridge.producers.gem --bridge run1 --server http://127.0.0.1:9004 --tokenizer runs/tiny \\
      --env atropos --env-arg environment=my_env.py:MyEnv --env-arg tokenizer=runs/tiny

The score of a trajectory is the sum of its rewards. SIGTERM and Ctrl-C end it in order, with exit code 143 or
130; a second one ends it at once. Exit code 1: groups failed, too many in a row or all. 2: it could not
start, or was refused.
"""


def main(argv: list[str] | None = None) -> int:
    """Plays a gem environment on a bridge; returns the exit code: 1 if groups failed, too many in a row or
    all; 2 if it could not start or was refused; 143 after SIGTERM, 130 after Ctrl-C.
    """
    options = _parser().parse_args(argv)
    return run_rollout(_PROGRAM, "gem", lambda: _play(options))


def _play(options: argparse.Namespace) -> int:
    for module in options.imports:
        importlib.import_module(module)
    if options.env == NAME:
        register()
    game = GemGame(
        options.env,
        env_args=dict(map(setting, options.env_arg)),
        group_size=options.group_size,
        seed=options.seed,
        alike=options.alike,
        allow_unequal=options.allow_unequal,
        suffix=options.suffix,
        max_turns=options.max_turns,
        threads=options.threads,
    )
    try:
        game.try_one()
        return asyncio.run(_run(options, game))
    finally:
        game.close()


async def _run(options: argparse.Namespace, game: GemGame) -> int:
    async with rollout_of(options, game.name) as rollout:
        await rollout.run(islice(game.tasks(), options.max_groups), game.play)
        return exit_code(rollout)


def _parser() -> Parser:
    parser = Parser(
        "python -m shmbridge.producers.gem",
        description="Play a gem environment with a model, with its groups going into shared memory.",
        examples=EXAMPLES,
    )
    add_rollout_flags(parser)
    add = parser.add_argument
    add("--env", required=True, metavar="NAME", help="gem's name of the environment; atropos: any of Atropos")
    add("--env-arg", action="append", default=[], metavar="NAME=VALUE",
        help="argument of the environment, JSON or text; may be repeated")  # fmt: skip
    add("--import", dest="imports", action="append", default=[], metavar="MODULE",
        help="module that registers environments; may be repeated")  # fmt: skip
    add("--seed", type=int, default=0, help="of the first group; each group's is one more [0]")
    add("--alike", choices=("auto", "spawn", "reset"), default="auto",
        help="how groups begin alike: spawned from the first, or reset with one seed [auto]")  # fmt: skip
    add("--allow-unequal", action="store_true", help="play groups whose first observations differ")
    add("--suffix", action="store_true", help="append the environment's suffix to its observations")
    add(
        "--max-turns",
        type=int,
        metavar="N",
        help="end an episode after N answers [when the environment does]",
    )
    add("--threads", type=int, default=32, metavar="N", help="environments that run at once [32]")
    return parser


if __name__ == "__main__":
    leave(run_program("gem", main))
