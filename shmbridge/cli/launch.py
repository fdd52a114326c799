"""`shmbridge launch`: a run from one YAML file: inference server, a learner or another hub, environments."""

import argparse
from pathlib import Path

from shmbridge.cli.commands import parser_of
from shmbridge.parser import Parser
from shmbridge.program import refuse

HELP = "start a whole run from a YAML file: inference server, trainer, environments; stop it as one"
EXAMPLES = """examples:
  shmbridge launch run.yaml --dry-run   what would run, in which order, with which commands
  shmbridge launch run.yaml             run it; Ctrl-C stops it orderly, a second Ctrl-C at once
  shmbridge launch run.yaml --json      the same, one JSON object per event on standard output

The run directory gets logs/NAME.log per process, events.jsonl, config.json (the file as read) and plan.json
(the processes). docs/how-to/launch.md explains the file. No process is left behind, whichever one is killed;
that includes kill -9 of this command.

exit codes: 0 the learner has done all its steps, or the trainer ended with 0; 1 a process failed, its log's
end is shown; 2 the file is wrong; 128 + signal stopped"""


def prepare_parser(parser: Parser) -> None:
    """Adds the arguments of `launch`."""
    parser.add_argument("config", type=Path, metavar="CONFIG", help="YAML file")
    parser.add_argument("--dry-run", action="store_true", help="print the plan and start nothing")


def run(arguments: argparse.Namespace) -> int:
    """Checks the file; then this process becomes the guardian of the run, and does not return."""
    from shmbridge.errors import BadConfig
    from shmbridge.launch import config, plan, supervisor

    try:
        wanted = config.load(arguments.config)
        run = plan.plan_of(wanted, parser_of("gateway"))
    except (BadConfig, ImportError) as error:
        refuse("shmbridge launch", error)
        return 2
    if arguments.dry_run:
        print(plan.as_json(run) if arguments.json else plan.as_text(run))
        return 0
    return supervisor.become_guardian(
        wanted, run, label=f"shmbridge launch {arguments.config}", as_json=arguments.json
    )
