"""`shmbridge export`: finishes a recorded folder, or copies it into one file."""

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import Literal

from shmbridge.parser import Parser
from shmbridge.program import refuse

HELP = "finish what a killed recorder left in a folder, or copy a folder into one Parquet or Arrow file"
EXAMPLES = """examples:
  shmbridge export runs/run1/records                        finish its parts, say what it holds
  shmbridge export runs/run1/records --out run1.parquet     one file, every record once
  shmbridge export runs/run1/records --out run1.arrow       an Arrow IPC file

exit codes: 0 done; 1 no archive, a recorder is at work (without --out), or the disk failed"""


def prepare_parser(parser: Parser) -> None:
    """Adds the arguments of `export`."""
    parser.add_argument("folder", type=Path, metavar="DIR", help="folder that a recorder wrote")
    parser.add_argument("--out", type=Path, metavar="FILE", help="copy everything into this one file")
    parser.add_argument(
        "--format",
        choices=("parquet", "arrow"),
        help="of what is written (by the ending of --out, else parquet)",
    )


def run(arguments: argparse.Namespace) -> int:
    """Finishes or copies; prints the key that each lane reached."""
    from shmbridge.archive.export import copy_folder, finish_folder
    from shmbridge.watch.text import printable

    is_arrow = arguments.out is not None and arguments.out.suffix == ".arrow"
    kind: Literal["parquet", "arrow"] = arguments.format or ("arrow" if is_arrow else "parquet")
    try:
        done = (
            finish_folder(arguments.folder, kind)
            if arguments.out is None
            else copy_folder(arguments.folder, arguments.out, kind)
        )
    except OSError as wrong:
        refuse("shmbridge export", wrong)
        return 1
    if arguments.json:
        print(json.dumps(asdict(done)))  # escapes what a path has that is not UTF-8
        return 0
    print(f"{done.records} records" + (f", {done.rows} rows in {printable(done.out)}" if done.out else ""))
    for producer_id, sequence in done.reached.items():
        print(f"  {printable(producer_id)}: {done.counts[producer_id]} records, up to sequence {sequence}")
    for path in done.finished:
        print(f"  finished {printable(path)}")
    return 0
