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
from dataclasses import asdict
from pathlib import Path
from typing import Any

from shmbridge import ShmBridgeError
from shmbridge.cli.base import install, is_of, refuse, refuse_missing, run_program
from shmbridge.cli.log import logs_json
from shmbridge.producers.atropos import attach, detach
from shmbridge.producers.atropos.check import checked
from shmbridge.producers.atropos.options import parse
from shmbridge.producers.atropos.upstream import Changes, hint_for, with_plain_tokens
from shmbridge.producers.rollout import EXIT_CODE, orderly_sigterm

_PROGRAM = "shmbridge.producers.atropos"


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
    print(text, file=sys.__stdout__, flush=True)  # not a log line
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
        _fix_chat_templates(changes)
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


def _fix_chat_templates(changes: Changes) -> None:
    """Patches every tokenizer, also those that environments make themselves: this process runs one script
    only.
    """
    from transformers import PreTrainedTokenizerBase

    fixed = with_plain_tokens(PreTrainedTokenizerBase.apply_chat_template)
    changes.replace(PreTrainedTokenizerBase, "apply_chat_template", fixed)


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
