"""Writes the pages of docs/reference/ that are made of the code: `python docs/_generate`, or `make reference`.

`--check` writes nothing, and ends with status 1 if a page is not what it would write.
"""

import argparse
import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[2]), str(Path(__file__).parent)]

import command_line
import control_messages
import launch_file
import layout
import learner_options
import loss_matrix

REFERENCE = Path(__file__).parents[1] / "reference"
PAGES = {
    "cli.md": command_line.page,
    "learner-options.md": learner_options.page,
    "launch-file.md": launch_file.page,
    "layout.md": layout.page,
    "control-messages.md": control_messages.page,
    "trainers.md": loss_matrix.page,
}


def main() -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(prog="docs/_generate", description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing; status 1 if a page is stale")
    check = parser.parse_args().check
    status = 0
    for name, page in PAGES.items():
        path, text = REFERENCE / name, page()
        if path.exists() and path.read_text() == text:
            continue
        if check:
            print(f"docs/reference/{name} is not what the code says -> run `python docs/_generate`")
            status = 1
        else:
            path.write_text(text)
            print(f"docs/reference/{name}")
    return status


if __name__ == "__main__":
    sys.exit(main())
