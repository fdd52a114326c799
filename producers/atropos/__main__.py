"""The command line around an environment's script: arguments, what is logged, and how it ends.

Called as `python -m shmbridge.producers.atropos`.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import json
import re
import runpy
import sys
import traceback
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from shmbridge import ShmBridgeError
from shmbridge.extras import install, is_of, refuse_missing
from shmbridge.log_format import logs_json
from shmbridge.parser import Parser, bridge_name, size, whole
from shmbridge.producers.atropos import attach, detach
from shmbridge.producers.atropos.check import checked
from shmbridge.producers.atropos.upstream import Changes, hint_for, with_plain_tokens
from shmbridge.producers.rollout.program import EXIT_CODE, orderly_sigterm
from shmbridge.program import refuse, run_program

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

_PROGRAM = "shmbridge.producers.atropos"


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


def main(argv: list[str] | None = None) -> int:
    """Runs an environment script on a bridge; returns the exit code: 2 if it could not start or was refused,
    143 after SIGTERM. With --check: 1 if the environment cannot be attached.
    """
    options = parse(argv)
    script = Path(options.script)
    if not script.is_file():
        return _refuse(
            f"there is no environment script {options.script}", "give the path of the env's .py file"
        )
    if options.check:
        return _check(script)
    with orderly_sigterm() as stopped:
        try:
            return _serve(options, script)
        except KeyboardInterrupt:
            if not stopped.by_sigterm:
                raise
            return EXIT_CODE


def _check(script: Path) -> int:
    if importlib.util.find_spec("atroposlib") is None:
        return _refuse("atroposlib is not installed", install("atropos"))
    said = checked(script)
    text = json.dumps(asdict(said), indent=2) if logs_json() else str(said)
    print(text, file=sys.__stdout__, flush=True)  # it is no log
    return 0 if said.attached.can else 1


def _serve(options: argparse.Namespace, script: Path) -> int:
    changes = Changes()
    try:
        begun = _environments_begun(changes)
        attach(
            bridge=options.bridge,
            lane_bytes=options.lane_bytes,
            on_full=options.on_full,
            step_rewards=options.step_rewards,
            stop_after_refusals=options.stop_after_refusals,
            tickets=options.tickets,
            rewards=options.rewards,
        )
        _mend_chat_templates(changes)
    except ModuleNotFoundError as missing:
        if not is_of(missing, "atropos"):
            raise
        refuse_missing(_PROGRAM, missing, "atropos")
        return 2
    except ImportError as broken:
        return _refuse(f"atroposlib cannot be imported: {broken}", install("atropos"))
    except ValueError as wrong:
        return _refuse(wrong, "see --help")
    try:
        _run_as_main(script, options.arguments)
    except ShmBridgeError as error:
        return _refuse(error, "")
    except Exception as error:
        if not (hint := hint_for(error)):
            raise
        traceback.print_exc()
        refuse(_PROGRAM, "the environment's script has ended with the error above", hint)
        return 1
    finally:
        detach()
        changes.undo()
    return 0 if begun else _refuse(f"{script} has ended, and began no environment", _cure(script))


def _environments_begun(changes: Changes) -> list[str]:
    """Returns a list that gets the name of each environment that is made from now on."""
    from atroposlib.envs.base import BaseEnv

    begun: list[str] = []
    original = BaseEnv.__init__

    @functools.wraps(original)
    def begin(env: Any, *args: Any, **kwargs: Any) -> None:
        begun.append(type(env).__name__)
        original(env, *args, **kwargs)

    changes.replace(BaseEnv, "__init__", begin)
    return begun


def _cure(script: Path) -> str:
    """Returns what to do about a script that began no environment."""
    classes = re.findall(r"^class (\w+)\(.*Env\b", script.read_text(errors="replace"), re.MULTILINE)
    if not classes:
        return "give the script of an Atropos environment, a subclass of BaseEnv"
    return f'end it with: if __name__ == "__main__": {classes[-1]}.cli()'


def _mend_chat_templates(changes: Changes) -> None:
    """Patches every tokenizer, also those that environments make themselves: this process runs one script
    only.
    """
    from transformers import PreTrainedTokenizerBase

    mended = with_plain_tokens(PreTrainedTokenizerBase.apply_chat_template)
    changes.replace(PreTrainedTokenizerBase, "apply_chat_template", mended)


def _run_as_main(script: Path, arguments: list[str]) -> None:
    """Runs the script as `python script arguments` would, with the same import path."""
    script = script.absolute()
    sys.argv = [str(script), *arguments]
    if not sys.flags.safe_path:
        sys.path[0] = str(script.resolve().parent)
    runpy.run_path(str(script), run_name="__main__")


def _refuse(message: BaseException | str, hint: str) -> int:
    refuse(_PROGRAM, message, hint)
    return 2


if __name__ == "__main__":
    sys.exit(run_program("environment", main, log_others=False))
