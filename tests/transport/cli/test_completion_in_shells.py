"""fish completes commands, flags, choices and names of bridges, where it is installed."""

import os
import shutil
import subprocess

import pytest

from shmbridge.cli import main
from shmbridge.cli.commands import COMMANDS


@pytest.fixture
def offered(capsys, tmp_path):
    """A function from a line to what fish offers for its last word."""
    if shutil.which("fish") is None:
        pytest.skip("fish is not installed: apt-get install fish")
    assert main(["completion", "fish"]) == 0
    script = tmp_path / "shmbridge.fish"
    script.write_text(capsys.readouterr().out)

    def offered(line: str) -> set[str]:
        done = subprocess.run(
            ["fish", "--no-config", "-c", f"source {script}; complete -C '{line}'"],
            capture_output=True,
            text=True,
            env=os.environ | {"HOME": str(tmp_path), "XDG_CONFIG_HOME": str(tmp_path)},
            timeout=60,
            check=True,
        )
        assert not done.stderr
        return {each.split("\t")[0] for each in done.stdout.splitlines()}

    return offered


def test_commands_flags_choices_and_bridges(offered, bridge, make_producer):
    make_producer()
    assert {*COMMANDS} <= offered("shmbridge ")
    assert {"--lanes", "--listen"} <= offered("shmbridge inspect --l")
    assert {"dr_grpo", "dapo"} <= offered("shmbridge train --loss ")
    assert {"bash", "zsh", "fish"} <= offered("shmbridge completion ")
    assert bridge in offered("shmbridge inspect ")
    assert bridge in offered("shmbridge train --bridge ")
