"""A mistake on a command line is one line with what was meant, exit code 2; a bridge that is missing is 3."""

import argparse
import json
import os
import socket
import subprocess
import sys

import pytest

import shmbridge
from shmbridge.cli import main
from shmbridge.cli.base import Parser
from shmbridge.cli.commands import COMMANDS

MISTAKES = [
    ("inspekt", "shmbridge: error: no command 'inspekt' -> did you mean inspect?"),
    ("version", "shmbridge: error: no command 'version' -> did you mean --version?"),
    ("xyzzy", "shmbridge: error: no command 'xyzzy' -> shmbridge --help lists all"),
    ("--json", "shmbridge: error: no command before --json -> flags follow the command: shmbridge COMMAND"),
    ("--versoin", "shmbridge: error: no command before --versoin -> did you mean --version?"),
    ("inspect --josn", "shmbridge inspect: error: unknown flag --josn -> did you mean --json?"),
    ("inspect --json=5", "shmbridge inspect: error: --json: ignored explicit argument '5'"),
    ("inspect run1 run2", "shmbridge inspect: error: one argument too many: run2 -> "),
    (
        "inspect --seconds soon",
        "shmbridge inspect: error: --seconds: 'soon' is not a number of 0 or above -> ",
    ),
    ("inspect --seconds", "shmbridge inspect: error: --seconds: expected one argument -> "),
    ("tail", "shmbridge tail: error: missing: BRIDGE -> shmbridge tail --help"),
    ("tail run1 -n many", "shmbridge tail: error: -n: 'many' is not a whole number of 0 or above -> "),
    ("tail run1 --lanes", "shmbridge tail: error: unknown flag --lanes -> "),
    ("gateway", "shmbridge gateway: error: missing: --bridge -> "),
    ("gateway --brigde run1", "shmbridge gateway: error: unknown flag --brigde -> did you mean --bridge?"),
    ("gateway --bridge run1 --port 99999", "shmbridge gateway: error: --port: '99999' is not a port: 0 to"),
    ("gateway --bridge run1 --compat strickt", "is none of default, strict -> did you mean strict?"),
    ("gateway --bridge run1 --lanes 0", "--lanes: '0' is not a whole number above 0 -> "),
    ("gateway --bridge run1 --post-deadline nan", "--post-deadline: 'nan' is not a number of 0 or above -> "),
    ("gateway --bridge run1 --max-body 0", "--max-body: '0' is not a size above 0, such as 64M -> "),
    ("gateway --bridge run1 --token tök", "--token: a token is of letters, digits and signs of ASCII"),
    ("gateway --bridge run1 --host-name http://a.b", "'http://a.b' is not a name alone, such as node7"),
    ("gateway --bridge run1 --host nosuch..host", "[SB106] host 'nosuch..host' has no address -> 127.0.0.1"),
    ("gateway --bridge run1 --lane-bytes 1", "[SB106] lane_bytes=1 "),
    ("gateway --bridge run1 --max-body 5Q", "shmbridge gateway: error: --max-body: '5Q' is not a size"),
    ("report", "shmbridge report: error: missing: RUN_DIR -> "),
    ("report x --format pgn", "--format: 'pgn' is none of html, svg, png, none -> did you mean png?"),
    (
        "train --learing-rate 1e-6",
        "shmbridge train: error: unknown flag --learing-rate -> did you mean --lr?",
    ),
    ("train --steps -1", "shmbridge train: error: --steps: -1 is not a whole number above 0 -> "),
    ("train --lr", "shmbridge train: error: --lr: expected one argument -> "),
    ("train --bridge run1", "shmbridge train: error: missing: --model, --steps (as flags, or in the file of"),
    ("serve --model x --max-rows 0", "--max-rows: '0' is not a whole number above 0 -> "),
    ("serve --model x --window-ms -5", "--window-ms: '-5' is not a number of 0 or above -> "),
    ("serve --model x --threads -3", "--threads: '-3' is not a whole number above 0 -> "),
    ("serve --model x --seed 99999999999999999999", "is not a whole number of 0 or above -> "),
    ("serve --model x --port 99999", "--port: '99999' is not a port: 0 to 65535"),
    ("serve --model x --dtype float16", "is none of float32, bfloat16 -> did you mean bfloat16?"),
    ("env script.py serve", "shmbridge env: error: missing: --bridge -> "),
    ("env --bridge run1", "shmbridge env: error: missing: SCRIPT"),
    ("env --bridge run1 /nowhere.py serve", "shmbridge env: error: there is no environment script /nowhere"),
    ("replay --bridge run1", "shmbridge replay: error: missing: DIR"),
    ("replay DIR --bridge run1 --speed 0", "shmbridge replay: error: --speed: '0' is not original, max"),
    (
        "completion fsh",
        "shmbridge completion: error: SHELL: 'fsh' is none of bash, zsh, fish -> did you mean fish",
    ),
    ("demo --stpes 3", "shmbridge demo: error: unknown flag --stpes -> did you mean --steps?"),
]


def run(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "shmbridge", *words],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=60,
    )


@pytest.mark.parametrize(("line", "said"), MISTAKES)
def test_a_mistake_is_one_line(line, said, capsys):
    with pytest.raises(SystemExit) as ended:
        raise SystemExit(run_here(line.split()))
    out, err = capsys.readouterr()
    assert said in err
    assert (ended.value.code, out, len(err.splitlines())) == (2, "", 1)


def run_here(words):
    if words[0] != "env" or "/nowhere.py" not in words:
        return main(words)
    done = run(*words)  # runs the program: a process of its own
    sys.stderr.write(done.stderr)
    return done.returncode


@pytest.mark.parametrize(
    "words",
    [
        ["inspect", "my run"],
        ["clean", "a/b"],
        ["top", ""],
        ["tail", "x" * 49],
        ["record", "ä", "--out", "x"],
        ["gateway", "--bridge", "a b"],
        ["replay", "x", "--bridge", "a b"],
        ["env", "--bridge", "a b", "x.py"],
        ["train", "--bridge", "a b"],
        ["serve", "--bridge", "a b", "--model", "x"],
    ],
)
def test_an_illegal_name_is_the_same_everywhere(words, capsys):
    with pytest.raises(SystemExit) as ended:
        main(words)
    line = capsys.readouterr().err
    assert line.startswith(f"shmbridge {words[0]}: error: [SB100] bridge name ")
    assert line.endswith('-> choose a name such as "run1"\n')
    assert ended.value.code == 2


@pytest.mark.parametrize("command", [name for name, entry in COMMANDS.items() if entry.on_a_bridge])
def test_a_bridge_that_is_missing_is_named_beside_those_there(command, bridge, make_producer, capsys):
    make_producer()
    assert main([command, bridge[:-1] + "_"]) == 3
    out, err = capsys.readouterr()
    assert err.startswith(
        f"shmbridge {command}: error: no bridge '{bridge[:-1]}_' -> did you mean {bridge}? "
    )
    assert (out, len(err.splitlines())) == ("", 1)


def test_cleaning_a_bridge_that_is_not_there_says_which_is_in_one_line(bridge, make_producer, capsys):
    """Where it was to be removed it is gone, as a script wants it."""
    make_producer()
    unknown = bridge[:-1] + "_"
    said = f"no bridge '{unknown}' -> did you mean {bridge}? "
    assert main(["clean", unknown]) == 3
    out, err = capsys.readouterr()
    assert err.startswith(f"shmbridge clean: error: {said}")
    assert (out, len(err.splitlines())) == ("", 1)
    assert main(["clean", unknown, "--yes"]) == 0
    out, err = capsys.readouterr()
    assert out.startswith(f"nothing to clean: {said}")
    assert (err, len(out.splitlines())) == ("", 1)
    for flags, code in (([], 3), (["--yes"], 0)):
        assert main(["clean", unknown, "--json", *flags]) == code
        out, err = capsys.readouterr()
        assert (json.loads(out)["removed"], err) == ([], "")


def test_a_living_bridge_is_kept_and_only_where_it_was_asked_for_an_error(bridge, make_producer, capsys):
    make_producer()
    assert main(["clean", bridge, "--yes"]) == 4
    assert "kept" in capsys.readouterr().out
    assert main(["clean"]) == 0, "nothing has to be done about what lives"
    assert bridge in [info.name for info in shmbridge.list_bridges()]


def test_a_closed_pipe_is_no_error():
    for words in ("--help", "train --help", "doctor"):
        command = f"{sys.executable} -m shmbridge {words} | head -n 1; echo ${{PIPESTATUS[0]}}"
        done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60)
        assert not done.stderr
        assert done.stdout.splitlines()[-1] in ("0", "1")  # doctor warns


def test_a_full_disk_is_one_line():
    done = subprocess.run(
        ["bash", "-c", f"{sys.executable} -m shmbridge --help > /dev/full"], capture_output=True, text=True
    )
    assert done.returncode == 1
    assert done.stderr == "shmbridge: error: standard output: No space left on device\n"


def test_nothing_is_shortened():
    parser = Parser("prog", description="A test.")
    parser.add_argument("--lanes", action="store_true")
    with pytest.raises(SystemExit):
        parser.parse_args(["--lan"])


def test_negative_numbers_are_values():
    parser = Parser("prog", description="A test.")
    parser.add_argument("--rate", type=float)
    assert parser.parse_args(["--rate", "-1e-3"]) == argparse.Namespace(rate=-1e-3)


def test_without_asserts_too():
    done = subprocess.run(
        [sys.executable, "-O", "-m", "shmbridge", "inspect", "--josn"], capture_output=True, text=True
    )
    assert (done.returncode, "did you mean --json?" in done.stderr) == (2, True)


def test_an_address_that_cannot_be_had_is_named_with_what_to_do(capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["gateway", "--bridge", "run1", "--port", str(port)]) == 2
        assert capsys.readouterr().err == (
            f"shmbridge gateway: error: [SB106] cannot listen on 127.0.0.1:{port}: the port is in use -> "
            f"another --port, or find who has it: ss -ltnp 'sport = :{port}'\n"
        )
        assert main(["inspect", "--listen", f"127.0.0.1:{port}"]) == 1
        assert "the port is in use -> another --listen, or " in capsys.readouterr().err
    assert main(["gateway", "--bridge", "run1", "--host", "192.0.2.1"]) == 2
    assert "192.0.2.1 is no address of this machine -> 127.0.0.1 for" in capsys.readouterr().err


def test_a_gateway_that_cannot_record_says_so_before_it_serves(tmp_path, capsys):
    (tmp_path / "file").touch()
    assert main(["gateway", "--bridge", "run1", "--port", "0", "--record", str(tmp_path / "file")]) == 2
    line = capsys.readouterr().err
    assert line.startswith("shmbridge gateway: error: [SB704] ")
    assert " -> " in line
