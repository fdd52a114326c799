"""`shmbridge report`: one or several runs of the learner in words, numbers and a picture."""

import argparse
import sys
from pathlib import Path

import msgspec

HELP = "summarise and plot runs of the learner: reward, loss, staleness, tokens per second, time"
EXAMPLES = """examples:
  shmbridge report runs/run1                       a summary, and runs/run1/report.svg
  shmbridge report runs/run1 --format none         the summary alone; needs no matplotlib
  shmbridge report runs/a runs/b --out compare     two runs in one picture, compare/report.svg
  shmbridge report runs/run1 --format png --json   for programs, and a bitmap

exit codes: 0 done; 1 no metrics in a folder, or no picture (the summary is printed all the same)"""


def prepare_parser(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `report`."""
    parser.add_argument(
        "run_dirs", nargs="+", type=Path, metavar="RUN_DIR", help="folder with the metrics.jsonl of a run"
    )
    parser.add_argument("--out", type=Path, metavar="DIR", help="folder for the picture [the first RUN_DIR]")
    parser.add_argument(
        "--format", choices=("svg", "png", "none"), default="svg", help="of the picture [svg]"
    )


def run(arguments: argparse.Namespace) -> int:
    """Prints a summary per run, and draws them all into one picture."""
    from shmbridge.consumers.learner.report.plot import MatplotlibMissing, plot
    from shmbridge.consumers.learner.report.run_report import NoRun, as_text, read_run, summary

    try:
        runs = [read_run(folder) for folder in arguments.run_dirs]
    except NoRun as error:
        print(f"shmbridge report: {error}", file=sys.stderr)
        return 1
    found = [summary(each) for each in runs]
    file = (
        None
        if arguments.format == "none"
        else (arguments.out or arguments.run_dirs[0]) / f"report.{arguments.format}"
    )
    wrong = ""
    try:
        if file is not None:
            plot(runs, file)
    except MatplotlibMissing as error:
        file, wrong = None, str(error)
    except OSError as error:
        file, wrong = (
            None,
            f"no picture in {file}: {error.strerror} -> --out DIR for another folder, --format none for none",
        )
    if arguments.json:
        print(msgspec.json.encode({"runs": found, "plot": None if file is None else str(file)}).decode())
    else:
        print("\n".join(map(as_text, found)) + ("" if file is None else f"\nplot: {file}"))
    if wrong:
        print(f"shmbridge report: {wrong}", file=sys.stderr)
    return 1 if wrong else 0
