"""`shmbridge demo`: a tiny model learns two skills from random weights, over a bridge, on two CPU cores."""

import argparse
from pathlib import Path

from shmbridge.cli.base import Command, Parser, refuse, require, whole


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
