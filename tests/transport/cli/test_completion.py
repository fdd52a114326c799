"""What Tab offers in bash, and in fish where it is installed: commands, flags, choices, files and bridges."""

import os
import shutil
import subprocess
import sys

import pytest

from shmbridge.cli.commands import COMMANDS

IN_BASH = (
    'source "$0"; compopt() { :; }; COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); '
    '_shtab_shmbridge shmbridge "${COMP_WORDS[COMP_CWORD]}"; printf "%s\\n" "${COMPREPLY[@]}"'
)


@pytest.fixture(scope="module", params=["bash", "fish"])
def offered(request, tmp_path_factory):
    """A function from the words of a line, the last one begun, to what the shell offers."""
    shell, folder = request.param, tmp_path_factory.mktemp(request.param)
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed: apt-get install {shell}")
    script = folder / f"shmbridge.{shell}"
    made = [sys.executable, "-m", "shmbridge", "completion", shell]
    script.write_text(subprocess.run(made, capture_output=True, text=True, check=True).stdout)

    def offered(*words: str) -> set[str]:
        asked = ["bash", "-c", IN_BASH, script, "shmbridge", *words]
        if shell == "fish":
            line = " ".join(["shmbridge", *words])
            asked = ["fish", "--no-config", "-c", f"source {script}; complete -C '{line}'"]
        home = os.environ | {"HOME": str(folder), "XDG_CONFIG_HOME": str(folder)}
        done = subprocess.run(asked, capture_output=True, text=True, cwd=folder, check=True, env=home)
        assert not done.stderr
        return {each.split("\t")[0] for each in done.stdout.splitlines()}

    return offered


def test_commands_flags_choices_files_and_bridges(offered, bridge, make_producer):
    make_producer()
    assert {*COMMANDS} <= offered("")
    assert offered("in") == {"inspect"}
    assert offered("inspect", "--l") == {"--lanes", "--listen"}
    assert offered("train", "--loss", "d") >= {"dr_grpo", "dapo"}
    assert offered("completion", "") >= {"bash", "zsh", "fish"}
    for words in (["inspect", ""], ["train", "--bridge", ""], ["clean", bridge[:-1]]):
        assert bridge in offered(*words)
    assert any(each.startswith("shmbridge.") for each in offered("launch", "shmb"))


def test_zsh_gets_every_command_and_flag(capsys):
    from shmbridge.cli import main

    assert main(["completion", "zsh"]) == 0
    said = capsys.readouterr().out
    assert all(name in said for name in COMMANDS)
    assert "--max-staleness" in said
    assert "%(" not in said
