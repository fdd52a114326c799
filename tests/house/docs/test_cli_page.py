"""docs/reference/cli.md says what `--help` says, and the list of commands fits a terminal."""

import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from shmbridge.cli.commands import COMMANDS, help_text, parser_of

FOLDER = Path(__file__).parents[3] / "docs/reference"


def test_the_page_is_what_the_parsers_say(monkeypatch):
    monkeypatch.setenv("COLUMNS", "110")
    written = runpy.run_path(str(FOLDER / "make_cli_page.py"))["page"]()
    assert (FOLDER / "cli.md").read_text() == written, "python docs/reference/make_cli_page.py"


@pytest.mark.parametrize("command", COMMANDS)
def test_every_help_has_examples_and_exit_codes(command, monkeypatch):
    for columns in ("40", "110"):
        monkeypatch.setenv("COLUMNS", columns)
        said = parser_of(command).format_help()
        assert said.startswith(f"usage: shmbridge {command} ")
    assert "examples:\n" in said
    assert "exit " in said.lower()
    assert f"shmbridge {command}" in said.partition("examples:")[2]


def test_the_list_fits_a_terminal():
    lines = help_text(80).splitlines()
    assert len(lines) <= 24
    assert max(map(len, lines)) <= 80
    assert len(COMMANDS) == sum(any(f" {name} " in line for line in lines) for name in COMMANDS)


def test_help_imports_nothing_heavy():
    heavy = "torch", "pyarrow", "zmq", "numpy", "transformers", "asyncio"
    code = (
        "import sys; from shmbridge.cli import main; main(sys.argv[1:]);"
        f"print(sorted(set({heavy}) & set(sys.modules)))"
    )
    for words in (["--version"], ["--help"]):
        done = subprocess.run(
            [sys.executable, "-c", code, *words], capture_output=True, text=True, env=os.environ, check=True
        )
        assert done.stdout.splitlines()[-1] == "[]"
