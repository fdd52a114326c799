"""`shmbridge doctor`: what it finds here, each shortage planted, its lines, JSON and exit codes."""

import json
import os
import re
import resource
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest

from shmbridge.cli import doctor, main
from shmbridge.cli.doctor import Check, Device, Devices

ROOT = Path(__file__).parents[3]
NAMES = [
    "shared memory",
    "inodes",
    "memory",
    "logout",
    "versions",
    "optional packages",
    "extensions",
    "open files",
    "gpu",
]
MIB = 1 << 20
UID, USER = 1000, "ada"
LOGIN = "[Login]\nRemoveIPC = {}\n"
MAIN, ADDED = "etc/systemd/logind.conf", "{}/systemd/logind.conf.d/{}.conf"


# -- the command


def test_json_lines_and_exit_codes(capsys, monkeypatch) -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE), len(os.listdir("/proc/self/fd"))
    code = main(["doctor", "--json"])
    assert (resource.getrlimit(resource.RLIMIT_NOFILE), len(os.listdir("/proc/self/fd"))) == before
    found = json.loads(capsys.readouterr().out)
    assert [each["name"].split(" ")[0] for each in found[:9]] == [each.split(" ")[0] for each in NAMES]
    assert all(list(each) == ["name", "state", "text", "fix"] for each in found)
    assert all(each["text"] and bool(each["fix"]) == (each["state"] != "ok") for each in found)
    assert code == max({"ok": 0, "warn": 1, "fail": 2}[each["state"]] for each in found)
    states = {each["name"]: each["state"] for each in found}
    assert {states[name] for name in ("shared memory", "memory", "versions", "extensions")} == {"ok"}
    checks = [Check("memory", "ok", "24 GiB"), Check("logout", "warn", "soon", "linger")]
    asked = []
    monkeypatch.setattr(doctor, "examine", lambda gpu_asked: asked.append(gpu_asked) or checks)
    assert main(["doctor"]) == 1
    assert capsys.readouterr().out == "[ok]   memory  24 GiB\n[warn] logout  soon  -> linger\n"
    checks.append(Check("locks", "fail", "none", "another kernel"))
    assert main(["doctor", "--gpu"]) == 2
    del checks[1:]
    assert main(["doctor"]) == 0
    assert asked == [False, True, False]


def test_the_page_explains_each_line() -> None:
    page = (ROOT / "docs/how-to/doctor.md").read_text()
    assert re.findall(r"^\| ([a-z ]+) \| ", page, re.MULTILINE) == ["line", *NAMES]


def test_a_check_that_fails_is_a_warning_and_the_rest_is_checked(monkeypatch) -> None:
    def broken():
        raise ZeroDivisionError("division by zero")

    monkeypatch.setattr(doctor, "memory", broken)
    monkeypatch.setitem(sys.modules, "shmbridge._ext.header", None)  # a core that does not load
    found = {each.name: each for each in doctor.examine()}
    assert [*found][:8] == NAMES[:8]
    assert (found["memory"].state, found["extensions"].state) == ("warn", "fail")
    assert found["memory"].text.endswith("ZeroDivisionError: division by zero")
    assert "does not load" in found["extensions"].text


# -- shared memory


@pytest.fixture
def size(monkeypatch):
    """Gives every mount so many MiB, so many of them free, and so many inodes."""

    def plant(total: int, free: int, files: int = 1000, files_free: int = 1000, flags: int = 0) -> None:
        about = SimpleNamespace(
            f_flag=flags, f_blocks=total, f_bavail=free, f_frsize=MIB, f_files=files, f_favail=files_free
        )
        monkeypatch.setattr(os, "statvfs", lambda path: about)

    return plant


@pytest.mark.parametrize(
    ("total", "free", "state", "text", "fix"),
    [
        (2048, 2048, "ok", "2 GiB free of 2 GiB: room for 31 lanes", None),
        (512, 512, "warn", "room for 7 lanes", "--shm-size"),
        (4096, 100, "warn", "room for 1 lane of", "what fills it"),
        (4096, 10, "fail", "room for 0 lanes", "what fills it"),
        (64, 64, "fail", "what a container gets by default", "--shm-size=16g"),
        (0, 0, "ok", "no limit of its own", None),
    ],
)
def test_room_is_counted_in_lanes(size, total, free, state, text, fix) -> None:
    size(total, free)
    found = doctor.mount()
    assert (found.name, found.state, bool(found.fix)) == ("shared memory", state, fix is not None)
    assert text in found.text
    assert (fix or "") in found.fix


def test_a_mount_that_cannot_be_used(size, tmp_path, monkeypatch) -> None:
    mounts = tmp_path / "mounts"
    mounts.write_text("/dev/vda / ext4 rw 0 0\ntmpfs /dev/shm2 tmpfs rw 0 0\n")
    assert (doctor.mount(mounts=mounts).state, doctor.mount(tmp_path / "none").state) == ("warn", "fail")
    size(100, 100, flags=os.ST_RDONLY)
    assert (doctor.mount().state, "read-only" in doctor.mount().text) == ("fail", True)
    size(4096, 4096)
    tmp_path.chmod(0o500)
    monkeypatch.setattr(os, "access", lambda path, how: False)
    found = doctor.mount(tmp_path)
    assert (found.state, found.fix) == ("fail", f"chmod 1777 {tmp_path}")
    assert f"0500: uid {os.geteuid()}" in found.text


def test_inodes(size) -> None:
    for left, state in ((64, "ok"), (5, "warn"), (1, "fail")):
        size(100, 100, files=100, files_free=left)
        assert doctor.inodes().state == state
    size(100, 100, files=0, files_free=0)
    assert doctor.inodes().state == "ok"


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize(
    ("left", "state", "room"), [(8192, "ok", "124 lanes"), (300, "warn", "4 lanes"), (40, "fail", "0 lanes")]
)
def test_a_cgroup_below_the_mount_is_named(tmp_path, size, version, left, state, room) -> None:
    """A root with /proc and /sys of a machine with 64 GiB, and a memory cgroup of either version."""
    size(16384, 16384)
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_text(f"MemAvailable: {64 << 20} kB\nSwapFree: 0 kB\n")
    (tmp_path / "proc/self/cgroup").write_text("0::/box\n" if version == 2 else "4:memory:/box\n")
    folder = tmp_path / "sys/fs/cgroup" / ("box" if version == 2 else "memory/box")
    folder.mkdir(parents=True)
    names = {2: ("memory.max", "memory.current"), 1: ("memory.limit_in_bytes", "memory.usage_in_bytes")}
    for name, count in zip(names[version], (16384 * MIB, (16384 - left) * MIB), strict=True):
        (folder / name).write_text(f"{count}\n")
    (folder / "memory.stat").write_text("anon 1\n")
    found = doctor.memory(tmp_path)
    assert (found.state, bool(found.fix)) == (state, state != "ok")
    assert found.text.startswith("the memory cgroup (16 GiB) has ")
    assert room in found.text
    assert found.text.endswith("less than /dev/shm, whose size is 16 GiB")


# -- RemoveIPC


@pytest.fixture
def system(tmp_path):
    """A machine with systemd-logind, and a process in a session of the user; files come on top."""

    def plant(files: dict[str, str] | None = None, *, cgroup: str = f"0::/user.slice/user-{UID}.slice/s"):
        for folder in ("run/systemd/system", "run/systemd/users", "proc/self"):
            (tmp_path / folder).mkdir(parents=True, exist_ok=True)
        (tmp_path / "proc/self/cgroup").write_text(cgroup + "\n")
        for name, text in (files or {}).items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(text)
        return tmp_path

    return plant


@pytest.mark.parametrize(
    ("files", "removes"),
    [
        ({MAIN: "[Login]\n#RemoveIPC=no\n"}, True),
        ({MAIN: LOGIN.format("no")}, False),
        ({"usr/lib/systemd/logind.conf": LOGIN.format("off")}, False),
        ({MAIN: LOGIN.format("yes"), "usr/lib/systemd/logind.conf": LOGIN.format("no")}, True),
        ({MAIN: LOGIN.format("yes"), ADDED.format("run", 9): LOGIN.format("no")}, False),
        ({ADDED.format("usr/lib", 1): LOGIN.format("no"), ADDED.format("etc", 1): LOGIN.format("yes")}, True),
        (
            {ADDED.format("etc", 1): LOGIN.format("yes"), ADDED.format("usr/lib", 2): LOGIN.format("no")},
            False,
        ),
        ({MAIN: "[Login]\nRemoveIPC=no\nRemoveIPC=\n"}, True),
        ({MAIN: "[Other]\nRemoveIPC=no\n"}, True),
        ({MAIN: "[Login]\nRemoveIPC=perhaps\n"}, True),
    ],
)
def test_the_setting_in_force(system, files, removes) -> None:
    found = doctor.logout(system(files), UID, USER)
    assert (found.state, "enable-linger ada" in found.fix) == (("warn", True) if removes else ("ok", False))


def test_who_is_concerned(system, tmp_path) -> None:
    assert "does not run here" in doctor.logout(tmp_path, UID, USER).text
    root = system({"etc/login.defs": "SYS_UID_MAX 499\n"}, cgroup="0::/system.slice/train.service")
    for uid, why in ((0, "is a system user"), (499, "is a system user"), (500, "is not logged in")):
        found = doctor.logout(root, uid, USER)
        assert (found.state, why in found.text) == ("ok", True)
    system({f"run/systemd/users/{UID}": ""}, cgroup="0::/system.slice/train.service")
    assert doctor.logout(root, UID, USER).state == "warn", "a service of a user who is logged in"
    system({f"var/lib/systemd/linger/{USER}": ""})
    assert doctor.logout(root, UID, USER).state == "ok"


# -- software


def test_the_least_releases_are_those_of_the_project() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert [f"{name}>={least}" for name, least in doctor.NEEDED.items()] == project["dependencies"]
    extras = [each for group in project["optional-dependencies"].values() for each in group]
    for name, least in doctor.OPTIONAL.items():
        asked = {each.split(",")[0] for each in extras if each.startswith((f"{name}>", f"{name}="))}
        assert asked == {f"{name}{'==' if name == 'atroposlib' else '>='}{least}"}


def test_what_is_missing_or_old_fails() -> None:
    there = {**doctor.NEEDED, "numpy": "1.25.2", "pyzmq": None, "pyarrow": "15.0.0"}
    found = doctor.versions(there.get)
    assert (found.state, found.fix) == ("fail", "pip install 'numpy>=1.26' 'pyzmq>=26'")
    assert "numpy 1.25.2, pyarrow 15.0.0, pyzmq is not installed" in found.text
    assert all(word in doctor.versions().text for word in ("Python 3.", "of layout 2", "Linux "))


@pytest.mark.parametrize(
    ("there", "has_gpu", "fix", "text"),
    [
        ({}, False, "", "without torch and vllm and atroposlib and verifiers"),
        ({"torch": "2.4.1+cpu"}, False, "", "torch 2.4.1+cpu, without vllm and atroposlib and verifiers"),
        ({"atroposlib": "0.4"}, False, "", "atroposlib 0.4, without torch and vllm and verifiers"),
        ({"torch": "2.3"}, False, "pip install 'torch>=2.4'", "torch 2.3"),
        ({"atroposlib": "0.5"}, False, "pip install 'atroposlib==0.4.0'", "atroposlib 0.5"),
        ({"torch": "2.11", "nvidia-cublas": "13.0"}, False, "", "for CPUs takes 4.6 GB less"),
        ({"torch": "2.11", "nvidia-cublas": "13.0"}, True, "", "torch 2.11, without"),
    ],
)
def test_optional_packages(there, has_gpu, fix, text) -> None:
    before = set(sys.modules)
    found = doctor.optional_packages(there.get, lambda: has_gpu)
    assert not {"torch", "vllm", "atroposlib"} & (set(sys.modules) - before)
    assert (found.state, found.fix) == ("warn" if fix else "ok", fix)
    assert text in found.text
    assert has_gpu is False or "4.6 GB" not in found.text


def test_a_core_that_is_not_built_or_older_than_its_sources(tmp_path) -> None:
    """In a clone; an installed package has no setup.py beside it."""
    core = tmp_path / "shmbridge" / "_ext"
    core.mkdir(parents=True)
    for number, name in enumerate(("a.pyx", "b.pyx", "a.cpython-311.so", "b.cpython-311.so")):
        (core / name).write_text("")
        os.utime(core / name, (1000 + number, 1000 + number))
    (tmp_path / "setup.py").write_text("")
    assert doctor.extensions(core).state == "ok"
    os.utime(core / "a.pyx", (2000, 2000))
    found = doctor.extensions(core)
    assert (found.state, found.fix, "before a.pyx" in found.text) == ("warn", "make build", True)
    (tmp_path / "setup.py").unlink()
    assert doctor.extensions(core).state == "ok"
    (core / "ring.pyi").write_text("")
    assert doctor.extensions(core).state == "fail"


@pytest.mark.parametrize(
    ("limit", "state", "lanes"), [(5000, "ok", "1,024 lanes"), (2000, "warn", ""), (60, "fail", "1 lane")]
)
def test_a_low_limit_of_open_files(monkeypatch, limit, state, lanes) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (limit, limit))
    found = doctor.open_files()
    assert (found.state, bool(found.fix)) == (state, state != "ok")
    assert f"RLIMIT_NOFILE is {limit:,}, at most {limit:,}" in found.text
    assert lanes in found.text


# -- GPUs


def test_no_sign_of_a_gpu(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    (found,) = doctor.gpus(False, root=tmp_path)
    assert (found.name, found.state) == ("gpu", "ok")


@pytest.mark.parametrize(
    ("program", "text"),
    [
        ('print(\'{"trouble": "libcuda.so.1: cannot open"}\')', "libcuda.so.1: cannot open: "),
        ("print('{}')", "the driver knows of no GPU: "),
        ("import os; os.kill(os.getpid(), 11)", "the process that asks the driver ended with -11: "),
        ("import time; time.sleep(30)", "the driver has not answered for 0.3 s: "),
    ],
)
def test_a_driver_that_is_missing_crashes_or_hangs(tmp_path, monkeypatch, program, text) -> None:
    if "sleep" in program:
        monkeypatch.setattr(doctor, "GPU_TIMEOUT_S", 0.3)
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/nvidia0").touch()
    asked = "sleep" in program
    (found,) = doctor.gpus(asked, [sys.executable, "-S", "-c", program], tmp_path)
    assert (found.name, found.state, "--gpus all" in found.fix) == ("gpu", "fail" if asked else "warn", True)
    assert found.text.startswith(text)


def test_the_calls_of_the_driver(tmp_path) -> None:
    """A library that only checks its arguments, in place of CUDA's; only a GPU shows the real thing."""
    if (cc := shutil.which("cc")) is None:
        pytest.skip("needs a C compiler")
    source = Path(__file__).with_name("played_cuda.c")
    subprocess.run([cc, "-shared", "-fPIC", "-o", tmp_path / "libcuda.so.1", source], check=True)
    environment = {**os.environ, "LD_LIBRARY_PATH": str(tmp_path)}
    done = subprocess.run(doctor.GPU_COMMAND, env=environment, capture_output=True, check=True)
    found = msgspec.json.decode(done.stdout, type=Devices)
    assert found == Devices([Device("played 0", 0, True), Device("played 1", 700, True)])
    command = [sys.executable, "-S", "-c", f"print({done.stdout.decode()!r})"]
    good, bad = doctor.gpus(True, command)
    assert (good.name, good.state, good.text) == (
        "gpu 0",
        "ok",
        "played 0 page-locks 64 MiB of shared memory",
    )
    assert (bad.name, bad.state, "error 700" in bad.text) == ("gpu 1", "warn", True)
