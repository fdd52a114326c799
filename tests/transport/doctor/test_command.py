"""`shmbridge doctor`: its lines, its JSON, its exit codes, limits of a real process, and its end."""

import json
import os
import re
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from shmbridge.cli import main
from shmbridge.doctor import clock, examination, leaks
from shmbridge.doctor.check import Check, exit_code, guarded

PAGE = Path(__file__).parents[3] / "docs/how-to/doctor.md"
DOCTOR = [sys.executable, "-m", "shmbridge.cli", "doctor"]
NAMES = [
    "shared memory",
    "inodes",
    "memory",
    "logout",
    "versions",
    "optional packages",
    "extensions",
    "dead bridges",
    "other users",
    "atomics",
    "mapped writes",
    "locks",
    "futex",
    "pidfd",
    "huge pages",
    "locked memory",
    "numa",
    "open files",
    "clock",
    "time namespace",
    "gpu",
]


def test_json_is_a_list_of_checks() -> None:
    done = subprocess.run([*DOCTOR, "--json"], capture_output=True, text=True)
    found = json.loads(done.stdout)
    assert [each["name"] for each in found][:20] == NAMES[:20]
    assert all(list(each) == ["name", "state", "text", "fix"] for each in found)
    assert {each["state"] for each in found} <= {"ok", "warn", "fail"}
    assert all(each["text"] for each in found)
    assert all(each["fix"] for each in found if each["state"] != "ok")
    assert done.returncode == max({"ok": 0, "warn": 1, "fail": 2}[each["state"]] for each in found)
    assert done.stderr == ""
    by_name = {each["name"]: each for each in found}
    # `dead bridges` and `other users` are the machine's own; the rest is as it should be where tests run
    for name in ("shared memory", "versions", "extensions", "atomics", "mapped writes", "locks", "futex"):
        assert by_name[name]["state"] == "ok", by_name[name]


def test_it_costs_little() -> None:
    """It is to end within two seconds; on a machine that others use too, only its own work can be told."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(DOCTOR, stdout=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 2


def test_the_page_explains_each_line() -> None:
    rows = re.findall(r"^\| ([a-z ]+) \| ", PAGE.read_text(), re.MULTILINE)
    assert rows == ["line", *NAMES]


def test_lines_and_exit_codes(monkeypatch, capsys) -> None:
    checks = [Check("memory", "ok", "24 GiB"), Check("logout", "warn", "soon", "linger")]
    monkeypatch.setattr(examination, "examine", lambda gpu_asked: checks)
    assert main(["doctor"]) == 1
    assert capsys.readouterr().out == "[ok]   memory  24 GiB\n[warn] logout  soon  -> linger\n"
    checks.append(Check("locks", "fail", "none", "another kernel"))
    assert main(["doctor"]) == 2
    del checks[1:]
    assert main(["doctor"]) == 0
    assert exit_code([]) == 0


def test_a_gpu_is_asked_for_by_a_flag(monkeypatch) -> None:
    asked = []
    monkeypatch.setattr(
        examination, "examine", lambda gpu_asked: asked.append(gpu_asked) or [Check("gpu", "ok", "-")]
    )
    main(["doctor"])
    main(["doctor", "--gpu"])
    assert asked == [False, True]


def test_no_check_raises(monkeypatch) -> None:
    def broken():
        raise ZeroDivisionError("division by zero")

    (found,) = guarded("clock", broken)
    assert (found.state, found.text) == ("warn", "could not be checked: ZeroDivisionError: division by zero")
    assert found.fix
    monkeypatch.setattr(clock, "monotonic", broken)
    monkeypatch.setattr(leaks, "dead_bridges", broken)
    found = {each.name: each.state for each in examination.examine()}
    assert found["clock"] == found["dead bridges"] == "warn"
    assert list(found)[:20] == NAMES[:20]


def test_a_core_that_does_not_load_is_named_and_the_rest_checked() -> None:
    code = "import sys; sys.modules['shmbridge._ext.header'] = None\nfrom shmbridge.cli import main\n"
    done = subprocess.run(
        [sys.executable, "-c", f"{code}sys.exit(main(['doctor', '--json']))"], capture_output=True, text=True
    )
    found = {each["name"]: each for each in json.loads(done.stdout)}
    assert done.returncode == 2
    assert found["extensions"]["state"] == "fail"
    assert "does not load" in found["extensions"]["text"]
    assert {"shared memory", "versions", "open files", "clock", "gpu"} <= set(found)
    assert "locks" not in found


@pytest.mark.parametrize(
    ("limit", "state", "lanes"), [(5000, "ok", "1,024"), (2000, "warn", ""), (60, "fail", "1 lane")]
)
def test_a_low_limit_of_open_files(limit, state, lanes) -> None:
    code = (
        "import resource\n"
        f"resource.setrlimit(resource.RLIMIT_NOFILE, ({limit}, {limit}))\n"
        "from shmbridge.doctor import open_files\n"
        "found = open_files.descriptors()\n"
        "print(found.state, found.fix, found.text, sep='|')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    said, fix, text = done.stdout.strip().split("|")
    assert said == state
    assert text.startswith(f"RLIMIT_NOFILE is {limit:,}, at most {limit:,}: a consumer maps up to ")
    assert lanes in text
    assert fix == ("" if state == "ok" else "ulimit -Hn 4096 (docker run --ulimit nofile=4096)")


def test_nothing_of_it_is_left_and_limits_stay() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE), len(os.listdir("/proc/self/fd"))
    examination.examine()
    assert (resource.getrlimit(resource.RLIMIT_NOFILE), len(os.listdir("/proc/self/fd"))) == before
    assert not [name for name in os.listdir("/dev/shm") if "doctor" in name]


@pytest.mark.parametrize("after_s", [0.1, 0.4, 0.8])
def test_an_interrupt_ends_it(after_s) -> None:
    process = subprocess.Popen(DOCTOR, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True)
    time.sleep(after_s)
    os.killpg(process.pid, signal.SIGINT)
    process.communicate(timeout=20)
    assert process.returncode in (0, 1, 2, 130, -signal.SIGINT)
    assert not [name for name in os.listdir("/dev/shm") if f"doctor.{process.pid}" in name]
