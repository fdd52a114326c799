"""What Tab offers: commands, flags, choices, files and the bridges there are."""

import subprocess

import pytest

from shmbridge.cli import main
from shmbridge.cli.commands import COMMANDS


@pytest.fixture
def offered(capsys, tmp_path):
    """A function from the words of a line, the last one begun, to what bash offers."""
    assert main(["completion", "bash"]) == 0
    script = tmp_path / "shmbridge.bash"
    script.write_text(capsys.readouterr().out)
    code = (
        f"source {script}; compopt() {{ :; }}; "
        'COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _shmbridge; printf "%s\\n" "${COMPREPLY[@]}"'
    )

    def offered(*words: str) -> set[str]:
        done = subprocess.run(
            ["bash", "-c", code, "bash", "shmbridge", *words],
            capture_output=True,
            text=True,
            cwd=tmp_path,
            check=True,
        )
        assert not done.stderr
        return set(done.stdout.split())

    return offered


def test_commands(offered):
    assert offered("") == {*COMMANDS, "--help", "--version"}
    assert offered("in") == {"inspect"}


def test_flags_and_choices(offered):
    assert offered("inspect", "--l") == {"--lanes", "--listen"}
    assert offered("train", "--loss", "d") == {"dr_grpo", "dapo"}
    assert offered("completion", "") == {"bash", "zsh", "fish"}
    assert not offered("train", "--lr", "")


def test_bridges_and_files(offered, bridge, make_producer):
    make_producer()
    begun = bridge[:-1]
    for words in (["inspect", begun], ["train", "--bridge", begun], ["clean", begun]):
        assert bridge in offered(*words)
    assert offered("launch", "shmb") == {"shmbridge.bash"}


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells_get_every_command_and_flag(shell, capsys):
    assert main(["completion", shell]) == 0
    said = capsys.readouterr().out
    assert all(name in said for name in COMMANDS)
    assert "max-staleness" in said
    assert "%(" not in said
