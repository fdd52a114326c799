"""The commands `launch`, a run from one YAML file, `logs`, what its processes logged, and `demo`."""

import argparse
import difflib
from dataclasses import asdict
from pathlib import Path

import msgspec

from shmbridge.cli.base import Command, Parser, refuse, require, whole
from shmbridge.cli.commands import parser_of


def _launch_arguments(parser: Parser) -> None:
    parser.add_argument("config", type=Path, metavar="CONFIG", help="YAML file")
    parser.add_argument("--dry-run", action="store_true", help="print the plan and start nothing")


def _launch(arguments: argparse.Namespace) -> int:
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


LAUNCH = Command(
    "start a whole run from a YAML file: inference server, trainer, environments; stop it as one",
    """examples:
  shmbridge launch run.yaml --dry-run   what would run, in which order, with which commands
  shmbridge launch run.yaml             run it; Ctrl-C stops it orderly, a second Ctrl-C at once
  shmbridge launch run.yaml --json      the same, one JSON object per event on standard output

The run directory gets logs/NAME.log per process, events.jsonl, config.json (the file as read) and plan.json
(the processes). docs/how-to/launch.md explains the file. No process is left behind, whichever one is killed;
that includes kill -9 of this command.

exit codes: 0 the learner has done all its steps, or the trainer ended with 0; 1 a process failed, its log's
end is shown; 2 the file is wrong; 128 + signal stopped""",
    _launch_arguments,
    _launch,
)


_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")


def _logs_arguments(parser: Parser) -> None:
    parser.add_argument("run_dir", type=Path, metavar="RUN_DIR", help="folder of the run")
    parser.add_argument("names", nargs="*", metavar="NAME", help="of a process, such as learner [all]")
    parser.add_argument("--follow", "-f", action="store_true", help="go on with new lines, until Ctrl-C")
    parser.add_argument(
        "--level", choices=_LEVELS, help="lines of at least this level; leaves out lines that have none"
    )


def _logs(arguments: argparse.Namespace) -> int:
    """Prints the lines."""
    from shmbridge.cli.base import to_reader
    from shmbridge.launch.logs import LogFile, followed, log_files, merged

    there = log_files(arguments.run_dir)
    if not there:
        refuse("shmbridge logs", f"no logs in {arguments.run_dir}", "give the run_dir of a launch")
        return 2
    for name in arguments.names:
        if name not in there:
            close = difflib.get_close_matches(name, there, n=1) or [next(iter(there))]
            refuse("shmbridge logs", f"no log of {name!r}, but of {', '.join(there)}", f"take {close[0]}")
            return 2
    files = [LogFile(name, there[name]) for name in arguments.names or there]
    least = _LEVELS.index(arguments.level or _LEVELS[0])
    lines = (followed if arguments.follow else merged)(files)
    chosen = (
        line
        for line in lines
        if not arguments.level or (line.level is not None and _LEVELS.index(line.level) >= least)
    )
    with to_reader():
        for line in chosen:
            named = line.text if line.level or len(files) == 1 else f"{line.name}: {line.text}"
            print(msgspec.json.encode(asdict(line)).decode() if arguments.json else named, flush=True)
    return 0


LOGS = Command(
    "show the logs of a launch: one process', or all of them merged in the order of time",
    """examples:
  shmbridge logs runs/run1                      all of them
  shmbridge logs runs/run1 learner              one
  shmbridge logs runs/run1 learner --follow     and what it goes on to say, until Ctrl-C
  shmbridge logs runs/run1 --level WARNING      what was not as it should be
  shmbridge logs runs/run1 --json               one object per line: time, name, level, text

RUN_DIR is the run_dir of the launch; the folder of `shmbridge demo` will do, too. A line that another
program has written, without a time, comes behind the line before it.

exit codes: 0 done; 2 there is no such run or log; 130 Ctrl-C""",
    _logs_arguments,
    _logs,
)


def _demo_arguments(parser: Parser) -> None:
    parser.add_argument("--model", metavar="DIR", help="model folder to start from [a tiny random one]")
    parser.add_argument(
        "--env", type=_script, nargs="+", metavar="SCRIPT", help="environments [two that come with it]"
    )
    parser.add_argument(
        "--step-rewards", action="store_true", help="carry the environments' rewards of steps, too"
    )
    parser.add_argument(
        "--engine", choices=("policy-server", "vllm"), default="policy-server", help="what samples"
    )
    parser.add_argument(
        "--engine-python",
        default=".venvs/vllm/bin/python",
        metavar="PATH",
        help="interpreter that has vLLM and shmbridge [%(default)s]",
    )
    parser.add_argument(
        "--engine-flags", default="", metavar="WORDS", help="further flags of the server, in one word"
    )
    parser.add_argument("--steps", type=whole(1), default=500, metavar="N", help="optimizer steps [500]")
    parser.add_argument(
        "--seed", type=whole(0), default=1, metavar="N", help="of the weights and the questions [1]"
    )
    parser.add_argument("--run-dir", type=Path, metavar="DIR", help="where logs go [runs/demo-<time>]")
    parser.add_argument("learner_flags", nargs="*", metavar="-- FLAG", help="further flags of the learner")


def _demo(arguments: argparse.Namespace) -> int:
    """Runs the demo; blocks for minutes."""
    require("atropos", "learner")
    if (words := arguments.learner_flags) and not words[0].startswith("-"):
        refuse("shmbridge demo", f"one argument too many: {words[0]}", "shmbridge demo --help")
        return 2
    if arguments.engine == "vllm" and not Path(arguments.engine_python).is_file():
        refuse("shmbridge demo", f"no interpreter {arguments.engine_python}", "--engine-python PATH")
        return 2
    from shmbridge.launch import demo

    return demo.run(arguments, parser_of("gateway"))


def _script(text: str) -> Path:
    if not (path := Path(text)).is_file():
        raise argparse.ArgumentTypeError(f"there is no environment script {text}")
    return path


DEMO = Command(
    "train a tiny model on two Atropos environments over a bridge: two CPU cores, minutes, no downloads",
    """examples:
  shmbridge demo                                     watch it; kill -9 whomever you like
  shmbridge demo --steps 100 --seed 2                shorter, with other questions
  shmbridge demo --model DIR --env my_env.py         a model and an environment of yours
  shmbridge demo --model DIR -- --lr 1e-5 --entropy 0    flags behind -- go to the learner
  shmbridge demo --engine vllm --engine-python .venvs/vllm/bin/python

It starts two environments, a learner and an inference server, restarts any that is killed, and leaves neither
a process nor shared memory behind, also if it is killed itself. Logs and figures go into its folder.

exit codes: 0 the mean reward rose by 0.3, nothing was dropped or leaked; 1 not so, it says why; 2 wrong
arguments; 128 + signal stopped""",
    _demo_arguments,
    _demo,
)
