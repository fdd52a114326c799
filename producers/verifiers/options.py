"""The command line of verifiers' environments: arguments, and the configuration that they say."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from shmbridge.cli.base import Parser, bridge_name, whole
from shmbridge.errors import BadArgument
from shmbridge.producers.rollout import add_runner_flags, add_server_flags, setting

_EXAMPLES = """\
examples:
  shmbridge env --verifiers textarena --bridge run1 --server http://127.0.0.1:9004 --tokenizer DIR \\
      --env-config taskset.game=Wordle-v0 player.runtime.type=subprocess --max-tokens 512

  # an agent's program: verifiers starts it, and it asks the model through verifiers
  shmbridge env --verifiers my-tasks ... \\
      --env-config agent.harness.id=mini_swe_agent agent.runtime.type=docker

  # every 50 versions of the policy 100 tasks of another split, which no learner trains
  shmbridge env --verifiers gsm8k ... --eval-every 50 --eval-tasks 100 --eval-config taskset.split=test

NAME is the id of an installed taskset, as verifiers' own `eval NAME` takes it; --env-config has the keys of
its `--env.` flags. The server must have vLLM's route /inference/v1/generate: `shmbridge serve`, or
`vllm serve --enable-scale-out`.

It begins at once; groups wait in the lane for a consumer. SIGTERM and Ctrl-C end it in order, with exit code
143 or 130; a second one ends it at once. Exit code 1: groups failed, too many in a row or all. 2: it could
not start, or was refused.
"""


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Returns the flags; exits the process on an error."""
    return parser().parse_args(argv)


def parser(prog: str = "python -m shmbridge.producers.verifiers") -> Parser:
    """Returns the parser. Imports nothing of verifiers."""
    parser = Parser(
        prog,
        description="Play environments of verifiers, unedited; their groups go into shared memory.",
        examples=_EXAMPLES,
    )
    parser.add_json_log()
    add = parser.add_argument
    add("--verifiers", required=True, metavar="NAME", help="id of an installed taskset")
    add("--bridge", required=True, type=bridge_name, metavar="NAME", help="the same as the consumer's")
    add_server_flags(parser)
    add_runner_flags(parser)
    add = parser.add_argument_group("verifiers").add_argument
    add("--env-id", metavar="NAME", help="verifiers' environment around the taskset [the taskset's own]")
    add("--env-config", nargs="+", action="extend", default=[], metavar="KEY=VALUE",
        help="settings of verifiers' environment, such as agent.runtime.type=subprocess")  # fmt: skip
    add("--renderer", nargs="+", default=[], metavar=("NAME", "KEY=VALUE"),
        help="verifiers' renderer of the model, and its settings [that of its family]")  # fmt: skip
    add("--epochs", type=whole(1), metavar="N", help="end after the tasks were played N times [no end]")
    add("--shuffle", type=whole(0), metavar="SEED", help="another order in each epoch [verifiers' order]")
    add("--eval-every", type=whole(1), metavar="N",
        help="evaluate at the start and after each N versions: groups of the split eval [never]")  # fmt: skip
    add("--eval-tasks", type=whole(1), metavar="N", help="tasks of an evaluation [all]")
    add("--eval-config", nargs="+", action="extend", default=[], metavar="KEY=VALUE",
        help="other settings of the environment that evaluates")  # fmt: skip
    return parser


def config_of(name: str, env_id: str | None, words: Sequence[str]) -> dict[str, Any]:
    """Returns the configuration of an environment, as `vf.resolve_env_config` takes it. Never blocks.

    Args:
        name: the taskset's id.
        env_id: the environment's; None: the taskset's own.
        words: KEY=VALUE; a key is the path to a setting, with dots.

    Raises BadArgument: a word is something else.
    """
    config: dict[str, Any] = {"taskset": {"id": name}}
    if env_id:
        config["id"] = env_id
    return settings(words, config)


def settings(words: Sequence[str], config: dict[str, Any]) -> dict[str, Any]:
    """Returns `config` with the settings that the words name. Never blocks.

    Raises BadArgument: a word is something else.
    """
    for word in words:
        key, value = setting(word)
        *path, last = key.split(".")
        if not last:
            raise BadArgument(f"{word!r} names no setting", hint="such as taskset.split=test")
        inner = config
        for part in path:
            inner = inner.setdefault(part, {})
            if not isinstance(inner, dict):
                raise BadArgument(f"{word!r}: {part} has a value already", hint="name each setting once")
        inner[last] = value
    return config
