"""Every command's help is whole, and the list of commands fits a terminal.

That docs/reference/cli.md says what `--help` says is checked with the other generated pages.
"""

import os
import subprocess
import sys

import pytest

from shmbridge.cli.commands import COMMANDS, help_text, parser_of


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
