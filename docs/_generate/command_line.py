"""The page of the command line: the help of every command, as the parsers give it."""

import os

from shmbridge.cli.commands import COMMANDS, help_text, parser_of

_WIDTH = 110
_HEAD = """# The command line

`shmbridge COMMAND`, or `python -m shmbridge COMMAND`. `train`, `serve` and `env` are the programs
`python -m shmbridge.consumers.grpo`, `python -m shmbridge.consumers.policy_server` and
`python -m shmbridge.producers.atropos`, with the same flags and exit codes.

* A mistake is one line on standard error, `shmbridge COMMAND: error: what -> what to do`, and exit code 2.
  Flags are written out in full.
* A bridge that does not exist is exit code 3, and the line names those that do; a name that none can have
  is exit code 2 (SB100).
* A package that is not installed is named with the command that installs it, exit code 1 (`env`: 2).
* Ctrl-C is exit code 130. `| head` is no error.
* `--debug`, or `SHMBRIDGE_DEBUG=1`, shows the traceback of every error.
* At Tab: `source <(shmbridge completion bash)`; [completion](#completion) has zsh and fish.

<!-- Written by docs/_generate from the parsers of shmbridge/cli/. -->

<!-- Search: clean, command line, cli, leaked shared memory, flags -->
"""


def page() -> str:
    """Returns the page."""
    os.environ["COLUMNS"] = str(_WIDTH)  # argparse asks for it
    parts = [_HEAD, f"```text\n{help_text(_WIDTH)}\n```\n"]
    parts += [f"## {name}\n\n```text\n{parser_of(name).format_help().rstrip()}\n```\n" for name in COMMANDS]
    return "\n".join(parts)
