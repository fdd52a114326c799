"""The command line around `GemGame`. Called as `python -m shmbridge.producers.gem`."""

from __future__ import annotations

import argparse
import asyncio
import importlib
import json
from itertools import islice
from typing import Any

from shmbridge import ShmBridgeError
from shmbridge.parser import Parser
from shmbridge.producers.gem.game import NAME, GemGame, register
from shmbridge.producers.rollout import (
    EXIT_CODE,
    NothingCame,
    TooManyFailures,
    add_rollout_flags,
    leave,
    orderly_sigterm,
    rollout_of,
)
from shmbridge.program import refuse, run_program

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
    with orderly_sigterm() as stopped:
        try:
            return _play(options)
        except ShmBridgeError as error:
            code = 1 if isinstance(error, (TooManyFailures, NothingCame)) else 2
            return _refuse(error, "see --help", code)
        except ModuleNotFoundError as missing:
            return _refuse(missing, "install it; gem itself: pip install 'shmbridge[gem]'")
        except (ValueError, TypeError, OSError) as wrong:
            return _refuse(wrong, "see --help")
        except KeyboardInterrupt:
            return EXIT_CODE if stopped.by_sigterm else 130


def _play(options: argparse.Namespace) -> int:
    for module in options.imports:
        importlib.import_module(module)
    if options.env == NAME:
        register()
    game = GemGame(
        options.env,
        env_args=dict(map(_argument, options.env_arg)),
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
        put = await rollout.run(islice(game.tasks(), options.max_groups), game.play)
        print(rollout.summary())
        return int(put == 0 and rollout.losses.groups.total() > 0)


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


def _argument(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise ValueError(f"--env-arg {text!r} is not NAME=VALUE")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value


def _refuse(message: Exception, hint: str, code: int = 2) -> int:
    refuse(_PROGRAM, message, hint)
    return code


if __name__ == "__main__":
    leave(run_program("gem", main))
