"""The flags around an environment's script: ours, the script's; and a script that is none."""

import subprocess
import sys

import pytest

from shmbridge.producers.atropos.options import parse


@pytest.mark.parametrize(
    ("line", "bridge", "tickets", "arguments"),
    [
        ("--bridge run1 env.py serve --env.x 8", "run1", False, "serve --env.x 8"),
        ("env.py serve --env.x 8 --bridge run1", "run1", False, "serve --env.x 8"),
        ("env.py serve --bridge=run1 --tickets --env.x 8", "run1", True, "serve --env.x 8"),
        ("--tickets env.py serve --env.x 8 --bridge run1", "run1", True, "serve --env.x 8"),
        ("--lane-bytes 1M env.py --bridge run1 serve", "run1", False, "serve"),
        # with --bridge before the script, all behind it is the script's
        ("--bridge run1 env.py serve --tickets --bridge x", "run1", False, "serve --tickets --bridge x"),
        ("--bridge run1 env.py -- serve", "run1", False, "serve"),
        ("env.py serve --bridge run1 -- --tickets", "run1", False, "serve --tickets"),
        ("env.py --help --bridge run1", "run1", False, "--help"),
    ],
)
def test_flags_may_stand_behind_the_script(line, bridge, tickets, arguments):
    found = parse(line.split())
    assert (found.bridge, found.tickets, found.script) == (bridge, tickets, "env.py")
    assert " ".join(found.arguments) == arguments


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("env.py serve", "missing: --bridge"),
        ("env.py serve --bridge", "[SB100] bridge name ''"),
        ("--brigde run1 env.py serve", "unknown flag --brigde -> did you mean --bridge?"),
        ("env.py --bridge run1 --lane-bytes 5Q", "--lane-bytes: '5Q' is not a size"),
    ],
)
def test_a_mistake_is_one_line(line, said, capsys):
    with pytest.raises(SystemExit) as ended:
        parse(line.split())
    (shown,) = capsys.readouterr().err.splitlines()
    assert (ended.value.code, said in shown) == (2, True), shown


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("print('hello')", "give the script of an Atropos environment, a subclass of BaseEnv"),
        (
            "from atroposlib.envs.base import BaseEnv\nclass MyEnv(BaseEnv):\n    pass\n",
            'end it with: if __name__ == "__main__": MyEnv.cli()',
        ),
    ],
)
def test_a_script_that_begins_no_environment_is_refused(text, hint, tmp_path, bridge):
    script = tmp_path / "no_env.py"
    script.write_text(text)
    done = subprocess.run(
        [sys.executable, "-m", "shmbridge", "env", str(script), "serve", "--bridge", bridge],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    said = f"shmbridge env: error: {script} has ended, and began no environment -> {hint}"
    assert done.stderr.splitlines()[-1] == said
