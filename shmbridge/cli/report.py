"""`shmbridge report`: one or several runs of the learner in words, and as a page or a picture."""

import argparse
from dataclasses import replace
from pathlib import Path

import msgspec

from shmbridge.cli.base import Command, Parser, refuse

HELP = "summarise runs of the learner, and make one HTML page: numbers, curves, groups with their tokens"
EXAMPLES = """examples:
  shmbridge report runs/run1                       a summary, and the page runs/run1/report.html
  shmbridge report runs/a runs/b --out compare     two runs in one page, compare/report.html
  shmbridge report runs/run1 --format none         the summary alone
  shmbridge report runs/run1 --format svg          the curves as a picture; needs matplotlib
  shmbridge report runs/run1 --json                for programs

exit codes: 0 done; 1 no metrics in a folder, or no page or picture (the summary is printed all the same)"""


def _report_arguments(parser: Parser) -> None:
    parser.add_argument(
        "run_dirs", nargs="+", type=Path, metavar="RUN_DIR", help="folder with the metrics.jsonl of a run"
    )
    parser.add_argument("--out", type=Path, metavar="DIR", help="folder for the file [the first RUN_DIR]")
    parser.add_argument(
        "--format",
        choices=("html", "svg", "png", "none"),
        default="html",
        help="a page, a picture, or no file [html]",
    )


def _report(arguments: argparse.Namespace) -> int:
    """Prints a summary per run, and writes them all into one page or picture."""
    from shmbridge.consumers.learner.report.page import MatplotlibMissing, plot, write_page
    from shmbridge.consumers.learner.report.run import NoRun, as_text, read_run, summary

    folders, kind = arguments.run_dirs, arguments.format
    what = "page" if kind == "html" else "plot"
    try:
        runs = [read_run(folder) for folder in folders]
    except NoRun as error:
        refuse("shmbridge report", error)
        return 1
    if len({each.name for each in runs}) < len(runs):  # folders of the same name
        runs = [replace(each, name=str(folder)) for each, folder in zip(runs, folders, strict=True)]
    found = [summary(each) for each in runs]
    file = None if kind == "none" else (arguments.out or folders[0]) / f"report.{kind}"
    wrong = ""
    try:
        if file is not None and kind == "html":
            write_page(folders, runs, found, file)
        elif file is not None:
            plot(runs, file, kind)
    except MatplotlibMissing as error:
        file, wrong = None, str(error)
    except OSError as error:
        wrong = (
            f"no {what} in {file}: {error.strerror} -> --out DIR for another folder, --format none for none"
        )
        file = None
    if arguments.json:
        print(msgspec.json.encode({"runs": found, what: None if file is None else str(file)}).decode())
    else:
        print("\n".join(map(as_text, found)) + ("" if file is None else f"\n{what}: {file}"))
    if wrong:
        refuse("shmbridge report", wrong)
    return 1 if wrong else 0


REPORT = Command(
    "summarise runs of the learner, and make one HTML page: curves, lanes, groups with their tokens",
    """examples:
  shmbridge report runs/run1                       a summary, and the page runs/run1/report.html
  shmbridge report runs/a runs/b --out compare     two runs in one page, compare/report.html
  shmbridge report runs/run1 --format none         the summary alone
  shmbridge report runs/run1 --format svg          the curves as a picture; needs matplotlib
  shmbridge report runs/run1 --json                for programs

exit codes: 0 done; 1 no metrics in a folder, or no page or picture (the summary is printed all the same)""",
    _report_arguments,
    _report,
)
