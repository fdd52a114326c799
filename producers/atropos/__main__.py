"""The command line around an environment's script: arguments, what is logged, and how it ends.

Called as `python -m shmbridge.producers.atropos`.
"""

from __future__ import annotations

import argparse
import runpy
import sys
import traceback
from pathlib import Path

from shmbridge import ShmBridgeError
from shmbridge.producers.atropos import attach, detach, upstream_workarounds
from shmbridge.producers.atropos.attribute_swaps import Changes
from shmbridge.producers.rollout.stop import EXIT_CODE, orderly_sigterm
from shmbridge.program import add_debug_flag, refuse, run_program

_PROGRAM = "shmbridge.producers.atropos"

EXAMPLES = """\
examples:
  python -m shmbridge.producers.atropos --bridge run1 gsm8k_server.py serve --env.group_size 8
  python -m shmbridge.producers.atropos --bridge run1 --lane-bytes 256M env.py serve --config env.yaml

The environment waits until a consumer has announced its run:
  shmbridge.Consumer("run1", run=shmbridge.Run(batch_size=64, num_steps=100))

SIGTERM and Ctrl-C end it in order: what waits for room gets two seconds, exit code 143 or upstream's. A
second one ends it at once.
"""


def main(argv: list[str] | None = None) -> int:
    """Runs an environment script on a bridge; returns the exit code: 2 if it could not start or was refused,
    143 after SIGTERM.
    """
    options = _parser().parse_args(argv)
    script = Path(options.script)
    if not script.is_file():
        return _refuse(
            f"there is no environment script {options.script}", "give the path of the env's .py file"
        )
    with orderly_sigterm() as stopped:
        try:
            return _serve(options, script)
        except KeyboardInterrupt:
            if not stopped.by_sigterm:
                raise
            return EXIT_CODE


def _serve(options: argparse.Namespace, script: Path) -> int:
    changes = Changes()
    try:
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
    except ImportError as missing:
        return _refuse(f"atroposlib cannot be imported: {missing}", "pip install 'shmbridge[atropos]'")
    except ValueError as wrong:
        return _refuse(wrong, "see --help")
    try:
        _run_as_main(script, options.arguments)
    except ShmBridgeError as error:
        return _refuse(error, "")
    except Exception as error:
        if not (hint := upstream_workarounds.hint_for(error)):
            raise
        traceback.print_exc()
        refuse(_PROGRAM, "the environment's script has ended with the error above", hint)
        return 1
    finally:
        detach()
        changes.undo()
    return 0


def _mend_chat_templates(changes: Changes) -> None:
    """Patches every tokenizer, also those that environments make themselves: this process runs one script
    only.
    """
    from transformers import PreTrainedTokenizerBase

    mended = upstream_workarounds.with_plain_tokens(PreTrainedTokenizerBase.apply_chat_template)
    changes.replace(PreTrainedTokenizerBase, "apply_chat_template", mended)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m shmbridge.producers.atropos",
        description="Run an Atropos environment, unedited, with its groups going into shared memory.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--bridge", required=True, help="name of the bridge, the same as the consumer's")
    parser.add_argument("--lane-bytes", default="64M", metavar="SIZE", help="size of the lane (default: 64M)")
    parser.add_argument(
        "--on-full",
        choices=("block", "raise", "drop"),
        default="block",
        help="when the lane is full: wait (default), or count the group and go on",
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
        type=int,
        default=20,
        metavar="N",
        help="end after N groups in a row that were refused for one reason (default: 20; 0: never)",
    )
    parser.add_argument(
        "--tickets",
        action="store_true",
        help="let a worker begin only when the consumer has room: its max_off_policy_steps",
    )
    add_debug_flag(parser)
    parser.add_argument("script", help="the environment's script")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="its own arguments, such as: serve ...")
    return parser


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
