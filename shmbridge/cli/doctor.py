"""`shmbridge doctor`: whether a bridge can run on this host, and a fix for what is wrong.

`python -m shmbridge.cli.doctor` asks the CUDA driver, in a process of its own: the driver may hang or crash.
"""

import argparse
import ctypes
import functools
import importlib
import importlib.metadata
import mmap
import os
import platform
import pwd
import re
import resource
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec

import shmbridge
from shmbridge.cli.base import Command, Parser, to_reader
from shmbridge.config import format_size
from shmbridge.segments import descriptors_at_most, lanes_within, memory_headroom

State = Literal["ok", "warn", "fail"]
MOUNT, ROOT = Path("/dev/shm"), Path("/")
LANE_BYTES = 64 << 20  # of a producer that asks for nothing else
GPU_COMMAND = (sys.executable, "-m", "shmbridge.cli.doctor")
GPU_TIMEOUT_S = 60.0
# The least releases of pyproject.toml.
NEEDED = {"numpy": "1.26", "pyarrow": "15", "pyzmq": "26", "posix_ipc": "1.1", "msgspec": "0.18"}
# Where installed: what the adapters were written for. atroposlib is exactly this one.
OPTIONAL = {"torch": "2.4", "vllm": "0.29", "atroposlib": "0.4.0", "verifiers": "0.4"}
_EXACT = ("atroposlib",)
_CUDA = "nvidia-cublas", "nvidia-cublas-cu12"  # what torch brings if it is built for CUDA 13 or 12
_WITH_HEADERS = LANE_BYTES + (2 << 20)
_MANY_LANES, _FEW_INODES = 16, 64
_CONTAINER_DEFAULT = 64 << 20
_LARGER = "docker run --shm-size=16g (Kubernetes: emptyDir with medium Memory), or lower lane_bytes"
_FEW_FILES, _MANY_FILES = 64, 4096  # a consumer takes about 15, and wants 32 free at its start
# In the order in which systemd looks: an earlier folder's file stands for one of the same name in a later.
_SYSTEMD = ("etc/systemd", "run/systemd", "usr/local/lib/systemd", "usr/lib/systemd", "lib/systemd")
_SYSTEM_UIDS = 999  # where login.defs sets none
_YES, _NO = ("1", "yes", "y", "true", "t", "on"), ("0", "no", "n", "false", "f", "off")
_EXIT_CODES: dict[State, int] = {"ok": 0, "warn": 1, "fail": 2}
_READ_ONLY_REGISTERED = 113  # CU_DEVICE_ATTRIBUTE_READ_ONLY_HOST_REGISTER_SUPPORTED
_PORTABLE = 1

_Find = Callable[[str], str | None]


@dataclass(frozen=True, slots=True)
class Check:
    """What was found under a stable name, in numbers, and one fix if something is wrong.

    `fail`: a bridge cannot run here; `warn`: it runs, with less than it could have.
    """

    name: str
    state: State
    text: str
    fix: str = ""


def examine(*, gpu_asked: bool = False) -> list[Check]:
    """Checks this host, in the order in which the checks are shown. Never raises; leaves nothing behind.

    Blocks for less than a second, longer where there is a GPU.
    """
    checks: dict[str, Callable[[], Check | list[Check]]] = {
        "shared memory": mount,
        "inodes": inodes,
        "memory": memory,
        "logout": logout,
        "versions": versions,
        "optional packages": optional_packages,
        "extensions": extensions,
        "open files": open_files,
        "gpu": functools.partial(gpus, gpu_asked),
    }
    found = [_guarded(name, check) for name, check in checks.items()]
    return [each for some in found for each in some]


def _guarded(name: str, check: Callable[[], Check | list[Check]]) -> list[Check]:
    """Returns what a check finds; an unexpected error becomes a warning that names it."""
    try:
        found = check()
    except Exception as wrong:
        text = f"could not be checked: {type(wrong).__name__}: {wrong}"
        fix = "the other lines hold without this one; report it with the output of shmbridge doctor --json"
        return [Check(name, "warn", text, fix)]
    return found if isinstance(found, list) else [found]


# -- shared memory


def mount(path: Path = MOUNT, mounts: Path = Path("/proc/self/mounts")) -> Check:
    """Whether segments can be made on the mount, and for how many lanes of default size it has room."""
    check = functools.partial(Check, "shared memory")
    if not path.is_dir():
        return check("fail", f"{path} does not exist", f"mount a tmpfs at {path}, or docker run --ipc=host")
    about = os.statvfs(path)
    if about.f_flag & os.ST_RDONLY:
        return check("fail", f"{path} is mounted read-only", f"docker run -v {path}:{path}:rw, or remount it")
    if not os.access(path, os.W_OK | os.X_OK):
        mode = path.stat().st_mode & 0o7777
        return check(
            "fail",
            f"{path} has mode {mode:04o}: uid {os.geteuid()} cannot create files",
            f"chmod 1777 {path}",
        )
    kind = _file_system(path, mounts)
    if kind not in ("tmpfs", ""):
        text = f"{path} is on {kind}, not on tmpfs: lanes may be written to a disk"
        return check("warn", text, f"mount -t tmpfs tmpfs {path}")
    if not about.f_blocks:
        return check("ok", f"{path} has no limit of its own")
    free, size = about.f_bavail * about.f_frsize, about.f_blocks * about.f_frsize
    lanes = free // _WITH_HEADERS
    text = f"{format_size(free)} free of {format_size(size)}: {_room(lanes)}"
    if size == _CONTAINER_DEFAULT:
        return check("fail", f"{text}; 64 MiB is what a container gets by default", _LARGER)
    if lanes >= _MANY_LANES:
        return check("ok", text)
    fix = _LARGER if size // _WITH_HEADERS < _MANY_LANES else "ls -l /dev/shm shows what fills it"
    return check("warn" if lanes else "fail", text, fix)


def _room(lanes: int) -> str:
    return f"room for {lanes} lane{'' if lanes == 1 else 's'} of {format_size(LANE_BYTES)}"


def _file_system(path: Path, mounts: Path) -> str:
    """Returns the kind of file system that a path is on; "" if it is unknown."""
    real, found = os.path.realpath(path), ("", "")
    try:
        lines = mounts.read_text().splitlines()
    except OSError:
        return ""
    for line in lines:
        _, point, kind, *_ = line.split()
        if (real == point or real.startswith(point.rstrip("/") + "/")) and len(point) >= len(found[0]):
            found = point, kind
    return found[1]


def inodes(path: Path = MOUNT) -> Check:
    """How many more segments the mount takes."""
    about = os.statvfs(path)
    if not about.f_files:
        return Check("inodes", "ok", f"{path} has no limit of inodes")
    left = about.f_favail
    text = f"{left:,} of {about.f_files:,} left; a bridge takes one per lane and three more"
    if left >= _FEW_INODES:
        return Check("inodes", "ok", text)
    fix = "shmbridge clean, or mount it with a higher nr_inodes"
    return Check("inodes", "warn" if left > 1 else "fail", text, fix)


def memory(root: Path = ROOT, path: Path = MOUNT) -> Check:
    """What the machine and this process' memory cgroups leave for lanes, beside the mount's own size."""
    left, whose = memory_headroom(root)
    about = os.statvfs(path)
    lanes = left // _WITH_HEADERS
    text = f"{whose} has {format_size(left)} left: {_room(lanes)}"
    if about.f_blocks and left < about.f_bavail * about.f_frsize:
        text += f"; less than {path}, whose size is {format_size(about.f_blocks * about.f_frsize)}"
    if lanes >= _MANY_LANES:
        return Check("memory", "ok", text)
    fix = "give the container more memory (lanes count as memory of their producers), or lower lane_bytes"
    return Check("memory", "warn" if lanes else "fail", text, fix)


def logout(root: Path = ROOT, uid: int | None = None, user: str | None = None) -> Check:
    """Whether systemd-logind removes living segments at this user's last logout, `RemoveIPC`; from files."""
    uid = os.geteuid() if uid is None else uid
    why = ""
    if not (root / "run/systemd/system").is_dir() or not (root / "run/systemd/users").is_dir():
        why = "systemd-logind does not run here, as in most containers"
    elif uid <= _last_system_uid(root):
        why = f"uid {uid} is a system user, whose segments systemd-logind leaves alone"
    elif not _in_session(root, uid) and not (root / f"run/systemd/users/{uid}").exists():
        why = f"uid {uid} is not logged in, so this is a service or a container"
    if why:
        return Check("logout", "ok", f"RemoveIPC does not apply: {why}")
    user = _name_of(uid) if user is None else user
    if (root / "var/lib/systemd/linger" / user).exists():
        return Check("logout", "ok", f"{user} lingers: a logout removes no segments")
    removes, where = _remove_ipc(root)
    if not removes:
        return Check("logout", "ok", f"RemoveIPC=no in {where}: a logout removes no segments")
    return Check(
        "logout",
        "warn",
        f"RemoveIPC=yes ({where}): the last logout of {user} removes the names of living segments",
        f"loginctl enable-linger {user}, or RemoveIPC=no in /etc/systemd/logind.conf",
    )


def _last_system_uid(root: Path) -> int:
    try:
        found = re.search(r"^\s*SYS_UID_MAX\s+(\d+)", (root / "etc/login.defs").read_text(), re.MULTILINE)
    except OSError:
        return _SYSTEM_UIDS
    return int(found[1]) if found else _SYSTEM_UIDS


def _name_of(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def _in_session(root: Path, uid: int) -> bool:
    """Returns whether this process belongs to a login of the user, by its cgroup."""
    try:
        return f"/user-{uid}.slice" in (root / "proc/self/cgroup").read_text()
    except OSError:
        return False


def _remove_ipc(root: Path) -> tuple[bool, str]:
    """Returns RemoveIPC and the file that sets it; files of `logind.conf.d` come after the main one, by their
    names.
    """
    mains = [path for folder in _SYSTEMD if (path := root / folder / "logind.conf").is_file()]
    added: dict[str, Path] = {}
    for folder in _SYSTEMD:
        for path in (root / folder / "logind.conf.d").glob("*.conf"):
            added.setdefault(path.name, path)
    found = True, "systemd's default"
    for path in mains[:1] + [added[name] for name in sorted(added)]:
        for value in _remove_ipc_values(path):
            if value in _YES or value in _NO:
                found = value in _YES, f"/{path.relative_to(root)}"
            elif not value:
                found = True, "systemd's default"
    return found


def _remove_ipc_values(path: Path) -> list[str]:
    """Returns what a file gives to RemoveIPC in its section Login, in order."""
    try:
        lines = [line.strip() for line in path.read_text().splitlines()]
    except (OSError, UnicodeDecodeError):
        return []
    found, section = [], ""
    for line in lines:
        if line.startswith("["):
            section = line
        elif section == "[Login]" and (match := re.fullmatch(r"RemoveIPC\s*=\s*(.*)", line)):
            found.append(match[1].lower())
    return found


# -- software


def installed(package: str) -> str | None:
    """Returns the version of an installed package, without importing it; None if it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def versions(find: _Find = installed, needed: Mapping[str, str] = NEEDED) -> Check:
    """The versions of Python, shmbridge, its layout, its dependencies, the kernel and the C library."""
    found = {package: find(package) for package in needed}
    parts = [f"Python {platform.python_version()}", f"shmbridge {shmbridge.__version__}{_layout()}"]
    parts += [f"{package} {version or 'is not installed'}" for package, version in found.items()]
    parts += [
        f"Linux {platform.release()}",
        os.confstr("CS_GNU_LIBC_VERSION") or "a C library that is not glibc",
    ]
    wrong = [
        f"'{name}>={least}'"
        for name, least in needed.items()
        if _numbers(found[name] or "0") < _numbers(least)
    ]
    fix = f"pip install {' '.join(wrong)}" if wrong else ""
    return Check("versions", "fail" if wrong else "ok", ", ".join(parts), fix)


def optional_packages(find: _Find = installed, has_gpu: Callable[[], bool] | None = None) -> Check:
    """The versions of packages that some users have, by their metadata: none of them is imported.

    torch for CUDA, which is 4.6 GB more than its build for CPUs, is named where there is no GPU.
    """
    found = {package: version for package in OPTIONAL if (version := find(package))}
    absent = [package for package in OPTIONAL if package not in found]
    parts = [f"{package} {version}" for package, version in found.items()]
    text = ", ".join([*parts, *([f"without {' and '.join(absent)}"] if absent else [])])
    if find("torch") and any(map(find, _CUDA)) and not (has_gpu or may_have_gpu)():
        text += "; torch is built for CUDA, and there is no GPU here: its build for CPUs takes 4.6 GB less"
    wrong = []
    for package, version in found.items():
        is_exact, has, least = package in _EXACT, _numbers(version), _numbers(OPTIONAL[package])
        if has < least or (is_exact and has != least):
            wrong.append(f"'{package}{'==' if is_exact else '>='}{OPTIONAL[package]}'")
    if wrong:
        text += "; the adapters need others"
        return Check("optional packages", "warn", text, f"pip install {' '.join(wrong)}")
    return Check("optional packages", "ok", text)


def extensions(folder: Path = Path(shmbridge.__file__).parent / "_ext") -> Check:
    """Whether every module of the compiled core can be imported by this Python; in a clone, also whether it
    was built after its sources last changed.
    """
    names = sorted(path.stem for path in folder.glob("*.pyi"))
    for name in names:
        try:
            importlib.import_module(f"shmbridge._ext.{name}")
        except Exception as wrong:  # a module built for other releases may raise anything
            return Check(
                "extensions",
                "fail",
                f"shmbridge._ext.{name} does not load: {type(wrong).__name__}: {wrong}",
                "build it for this Python: make build in a clone, or pip install --force-reinstall .",
            )
    text = f"{len(names)} modules load, built for {sysconfig.get_config_var('SOABI') or platform.machine()}"
    if changed := _changed_since_built(folder):
        return Check("extensions", "warn", f"{text}, before {changed} changed", "make build")
    return Check("extensions", "ok", text)


def _changed_since_built(folder: Path) -> str:
    """Returns the newest source of the core in a clone, if it is younger than every module; else ""."""
    built = [path.stat().st_mtime for path in folder.glob("*.so")]
    sources = [path for pattern in ("*.pyx", "*.px[di]", "c/*.h", "c/*.c") for path in folder.glob(pattern)]
    if not (folder.parents[1] / "setup.py").exists() or not built or not sources:
        return ""
    newest = max(sources, key=lambda path: path.stat().st_mtime)
    return newest.name if newest.stat().st_mtime > max(built) else ""


def _layout() -> str:
    try:
        return f" of layout {importlib.import_module('shmbridge._ext.header').layout_version}"
    except Exception:  # the check of the extensions shows why
        return ""


def _numbers(release: str) -> tuple[int, ...]:
    """Returns the leading numbers of a release, without zeros at the end: (1, 16) of "1.16.0rc1"."""
    leading = re.match(r"\d+(?:\.\d+)*", release)
    numbers = [int(each) for each in leading[0].split(".")] if leading else []
    while numbers and not numbers[-1]:
        numbers.pop()
    return tuple(numbers)


def open_files() -> Check:
    """How many lanes a consumer of this process' limits maps: it raises the soft limit to the hard one."""
    soft, hard = (
        "unlimited" if each == resource.RLIM_INFINITY else f"{each:,}"
        for each in resource.getrlimit(resource.RLIMIT_NOFILE)
    )
    most = descriptors_at_most()
    lanes = lanes_within(most)
    text = f"RLIMIT_NOFILE is {soft}, at most {hard}: a consumer maps up to {lanes:,} lane"
    text += "" if lanes == 1 else "s"
    if most >= _MANY_FILES:
        return Check("open files", "ok", text)
    fix = f"ulimit -Hn {_MANY_FILES} (docker run --ulimit nofile={_MANY_FILES})"
    return Check("open files", "warn" if most >= _FEW_FILES else "fail", text, fix)


# -- GPUs


class Device(msgspec.Struct, frozen=True):
    """One GPU, and the driver's error for page-locking shared memory; 0: it does."""

    name: str
    error: int = 0
    read_only: bool = False  # it registers memory that is mapped read-only


class Devices(msgspec.Struct, frozen=True):
    """What the process that asks the driver prints: the GPUs, or why it sees none."""

    devices: list[Device] = []
    trouble: str = ""


def gpus(asked: bool, command: Sequence[str] = GPU_COMMAND, root: Path = ROOT) -> list[Check]:
    """One finding per GPU. Without a sign of one none is looked for, unless `asked`. Blocks for seconds."""
    if not asked and not may_have_gpu(root):
        return [Check("gpu", "ok", "no GPU found: page-locking was not tried")]
    found = Devices()
    try:
        done = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, timeout=GPU_TIMEOUT_S, check=False
        )
        trouble = f"the process that asks the driver ended with {done.returncode}"
        if done.stdout:
            found = msgspec.json.decode(done.stdout, type=Devices)
            trouble = found.trouble or "the driver knows of no GPU"
    except subprocess.TimeoutExpired:
        trouble = f"the driver has not answered for {GPU_TIMEOUT_S:g} s"
    if not found.devices:
        fix = "install NVIDIA's driver (docker run --gpus all), and look at nvidia-smi"
        return [Check("gpu", "fail" if asked else "warn", f"{trouble}: page-locking was not tried", fix)]
    return [_gpu(number, device) for number, device in enumerate(found.devices)]


def may_have_gpu(root: Path = ROOT) -> bool:
    """Returns whether something shows that there is an NVIDIA GPU."""
    return shutil.which("nvidia-smi") is not None or any((root / "dev").glob("nvidia[0-9]*"))


def _gpu(number: int, device: Device) -> Check:
    size = format_size(LANE_BYTES)
    if device.error:
        text = f"{device.name} does not page-lock {size} of shared memory (error {device.error})"
        fix = "ulimit -l unlimited (docker run --ulimit memlock=-1)"
        return Check(f"gpu {number}", "warn", f"{text}: copies from lanes are 4 to 6 times slower", fix)
    writable = "" if device.read_only else "; it registers no read-only memory, so lanes are mapped writable"
    return Check(f"gpu {number}", "ok", f"{device.name} page-locks {size} of shared memory{writable}")


def ask_driver(library: str = "libcuda.so.1") -> Devices:
    """Page-locks memory of the mount on each GPU through the CUDA driver; needs no torch. Blocks."""
    try:
        cuda, count = ctypes.CDLL(library), ctypes.c_int()
        _call(cuda, "cuInit", ctypes.c_uint(0))
        _call(cuda, "cuDeviceGetCount", ctypes.byref(count))
        return Devices([_ask_device(cuda, number) for number in range(count.value)])
    except (OSError, AttributeError) as wrong:
        return Devices(trouble=str(wrong))


def _call(cuda: ctypes.CDLL, name: str, *arguments: Any) -> None:
    if error := int(getattr(cuda, name)(*arguments)):
        raise OSError(f"{name} fails with error {error}")


def _ask_device(cuda: ctypes.CDLL, number: int) -> Device:
    name, context = ctypes.create_string_buffer(100), ctypes.c_void_p()
    device, read_only = ctypes.c_int(), ctypes.c_int()
    _call(cuda, "cuDeviceGet", ctypes.byref(device), ctypes.c_int(number))
    _call(cuda, "cuDeviceGetName", name, ctypes.c_int(len(name)), device)
    _call(cuda, "cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
    try:
        _call(cuda, "cuCtxSetCurrent", context)
        error = _page_lock(cuda)
        unknown = cuda.cuDeviceGetAttribute(
            ctypes.byref(read_only), ctypes.c_int(_READ_ONLY_REGISTERED), device
        )
    finally:
        _call(cuda, "cuDevicePrimaryCtxRelease_v2", device)
    return Device(name.value.decode(errors="replace"), error, not unknown and read_only.value == 1)


def _page_lock(cuda: ctypes.CDLL) -> int:
    """Returns the driver's error for page-locking a file of the mount that has no name; 0: it does."""
    about, size = os.statvfs(MOUNT), LANE_BYTES
    while about.f_blocks and size > mmap.PAGESIZE and 2 * size > about.f_bavail * about.f_frsize:
        size //= 2
    fd = os.open(MOUNT, os.O_RDWR | os.O_CLOEXEC | os.O_TMPFILE, 0o600)
    try:
        os.posix_fallocate(fd, 0, size)
        with mmap.mmap(fd, size) as mapping:
            host = (ctypes.c_char * size).from_buffer(mapping)
            try:
                address = ctypes.c_void_p(ctypes.addressof(host))
                error = int(
                    cuda.cuMemHostRegister_v2(address, ctypes.c_size_t(size), ctypes.c_uint(_PORTABLE))
                )
                if not error:
                    _call(cuda, "cuMemHostUnregister", address)
            finally:
                del host  # the mapping does not close while it is in use
    finally:
        os.close(fd)
    return error


# -- the command


def _arguments(parser: Parser) -> None:
    parser.add_argument("--gpu", action="store_true", help="fail if no GPU can be used")


def _run(arguments: argparse.Namespace) -> int:
    """Prints a line per check, with a fix where one is needed."""
    found = examine(gpu_asked=arguments.gpu)
    with to_reader():
        if arguments.json:
            print(msgspec.json.encode([asdict(each) for each in found]).decode())
        else:
            width = max(len(each.name) for each in found)
            for each in found:
                line = f"{f'[{each.state}]':<6} {each.name:<{width}}  {each.text}"
                print(line + (f"  -> {each.fix}" if each.fix else ""))
    return max(_EXIT_CODES[each.state] for each in found)


DOCTOR = Command(
    "check this host: shared memory, limits, versions, logout, GPU; a fix for what is wrong",
    """examples:
  shmbridge doctor          a line per check
  shmbridge doctor --gpu    a GPU must be here; without it one is looked for if the system shows a sign of one
  shmbridge doctor --json   a list of name, state, text, fix, for probes

docs/how-to/doctor.md explains each line. Nothing is changed; what a check makes is gone when it ends.

exit codes: 0 all is well; 1 warnings; 2 something cannot run here""",
    _arguments,
    _run,
)

if __name__ == "__main__":
    sys.stdout.buffer.write(msgspec.json.encode(ask_driver()))
