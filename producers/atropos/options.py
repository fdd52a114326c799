"""The command line around an environment's script: our flags, and what is left to the script."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from shmbridge.parser import Parser, bridge_name, size, whole

_EXAMPLES = """\
examples:
  %(prog)s --bridge run1 gsm8k_server.py serve --env.group_size 8
  %(prog)s --bridge run1 --lane-bytes 256M env.py serve --config env.yaml
  %(prog)s --check gsm8k_server.py

The environment waits until a consumer has announced its run:
  shmbridge.Consumer("run1", run=shmbridge.Run(batch_size=64, num_steps=100))

Our flags may stand behind the script, too, if --bridge does: env.py serve --env.group_size 8 --bridge run1

SIGTERM and Ctrl-C end it in order: what waits for room gets two seconds, exit code 143 or upstream's. A
second one ends it at once.
"""


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Returns our options, the script, and the script's own `arguments`. Exits the process on an error.

    What stands behind the script is the script's. Only if --bridge does not stand before the script, or with
    --check, our flags are taken from behind it, up to a `--`.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    known = parser()
    options = known.parse_args(_ours_first(words, known))
    if options.bridge is None and not options.check:
        known.error("the following arguments are required: --bridge")
    return options


def _ours_first(words: list[str], known: Parser) -> list[str]:
    """Returns the words with our flags before the script, if --bridge is behind it."""
    flags = {flag: each for each in known._actions for flag in each.option_strings}
    at = 0  # of the script
    while at < len(words) and words[at].startswith("-"):
        at += 2 if _has_its_value_behind(words[at], flags) else 1
    before, script, behind = words[:at], words[at : at + 1], words[at + 1 :]
    end = behind.index("--") if "--" in behind else len(behind)
    if _names_the_bridge(before) or not (_names_the_bridge(behind[:end]) or "--check" in [*before, *behind]):
        return words
    ours: list[str] = []
    theirs: list[str] = []
    rest = iter(behind[:end])
    for word in rest:
        if word.split("=")[0] not in flags or word in ("-h", "--help"):
            theirs.append(word)
        else:
            ours.append(f"{word}={next(rest, '')}" if _has_its_value_behind(word, flags) else word)
    return [*before, *ours, *script, *theirs, *behind[end + 1 :]]


def _names_the_bridge(words: list[str]) -> bool:
    return any(word.split("=")[0] == "--bridge" for word in words)


def _has_its_value_behind(word: str, flags: dict[str, argparse.Action]) -> bool:
    return word in flags and flags[word].nargs != 0


def parser(prog: str = "python -m shmbridge.producers.atropos") -> Parser:
    """Returns the parser, whose `arguments` are the script's own."""
    parser = Parser(
        prog,
        description="Run an Atropos environment, unedited, with its groups going into shared memory.",
        examples=_EXAMPLES,
        usage="(--bridge NAME | --check) [FLAG ...] SCRIPT ...",
    )
    parser.add_json_log()
    parser.add_argument(
        "--bridge", type=bridge_name, metavar="NAME", help="the same as the consumer's; needed but to --check"
    )
    parser.add_argument(
        "--check",
        action="store_true",
        help="say whether the environment can be attached, stepped by gem and evaluated, and why not; "
        "with --json as JSON",
    )
    parser.add_argument(
        "--lane-bytes", type=size, default="64M", metavar="SIZE", help="size of the lane [64M]"
    )
    parser.add_argument(
        "--on-full",
        choices=("block", "raise", "drop"),
        default="block",
        help="when the lane is full: wait [block], or count the group and go on",
    )
    parser.add_argument(
        "--step-rewards", action="store_true", help="carry rewards of steps in columns of their own, too"
    )
    parser.add_argument(
        "--rewards",
        metavar="FILE.yaml",
        help="make other scores of the environment's: markers, length, scale (docs/how-to/rewards.md)",
    )
    parser.add_argument(
        "--stop-after-refusals",
        type=whole(0),
        default=20,
        metavar="N",
        help="end after N groups in a row that were refused for one reason [20; 0: never]",
    )
    parser.add_argument(
        "--tickets",
        action="store_true",
        help="let a worker begin only when the consumer has room: its max_off_policy_steps",
    )
    parser.add_argument("script", metavar="SCRIPT", help="the environment's script")
    parser.add_argument(
        "arguments", nargs=argparse.REMAINDER, metavar="...", help="its own arguments, such as: serve ..."
    )
    return parser
