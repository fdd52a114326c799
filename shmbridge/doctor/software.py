"""Versions of what a bridge is made of and runs on, and whether the compiled core loads."""

import importlib
import importlib.metadata
import os
import platform
import re
import sysconfig
from collections.abc import Callable, Mapping
from pathlib import Path

import shmbridge
from shmbridge.doctor import gpu
from shmbridge.doctor.check import Check

# The least releases of pyproject.toml.
NEEDED = {"numpy": "1.26", "pyarrow": "15", "pyzmq": "26", "posix_ipc": "1.1", "msgspec": "0.18"}
# Where installed: what the adapters were written for. atroposlib is exactly this one.
WELCOME = {"torch": "2.4", "vllm": "0.29", "atroposlib": "0.4.0", "verifiers": "0.4"}
_EXACT = ("atroposlib",)
_CUDA = "nvidia-cublas", "nvidia-cublas-cu12"  # what torch brings if it is built for CUDA 13 or 12

_Find = Callable[[str], str | None]


def installed(package: str) -> str | None:
    """Returns the version of an installed package, without importing it; None if it is not there."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def versions(find: _Find = installed, needed: Mapping[str, str] = NEEDED) -> Check:
    """The versions of Python, shmbridge, its layout, what it needs, the kernel and the C library."""
    found = {package: find(package) for package in needed}
    text = ", ".join(
        [
            f"Python {platform.python_version()}",
            f"shmbridge {shmbridge.__version__}{_layout()}",
            *(f"{package} {version or 'is not installed'}" for package, version in found.items()),
            f"Linux {platform.release()}",
            _libc(),
        ]
    )
    wrong = [
        f"{package}>={least}"
        for package, least in needed.items()
        if _numbers(found[package] or "0") < _numbers(least)
    ]
    if wrong:
        return Check("versions", "fail", text, f"pip install {' '.join(f'{each!r}' for each in wrong)}")
    return Check("versions", "ok", text)


def optional_packages(find: _Find = installed, has_gpu: Callable[[], bool] = gpu.is_likely) -> Check:
    """The versions of packages that some users have, by their metadata: none of them is imported.

    torch for CUDA, which is 4.6 GB more than its build for CPUs, is named where there is no GPU.
    """
    found = {package: version for package in WELCOME if (version := find(package))}
    absent = [package for package in WELCOME if package not in found]
    text = ", ".join(
        [*(f"{package} {version}" for package, version in found.items())]
        + ([f"without {' and '.join(absent)}"] if absent else [])
    )
    if find("torch") and any(find(package) for package in _CUDA) and not has_gpu():
        text += "; torch is built for CUDA, and there is no GPU here: its build for CPUs takes 4.6 GB less"
    wrong = [
        f"{package}{'==' if package in _EXACT else '>='}{WELCOME[package]}"
        for package, version in found.items()
        if _numbers(version) < _numbers(WELCOME[package])
        or (package in _EXACT and _numbers(version) != _numbers(WELCOME[package]))
    ]
    if wrong:
        fix = f"pip install {' '.join(f'{each!r}' for each in wrong)}"
        return Check("optional packages", "warn", f"{text}; the adapters need others", fix)
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
    text = f"{len(names)} modules load, built for {_platform()}"
    if changed := _changed_since_built(folder):
        return Check("extensions", "warn", f"{text}, before {changed} changed", "make build")
    return Check("extensions", "ok", text)


def _changed_since_built(folder: Path) -> str:
    """Returns the newest source of the core in a clone, if it is younger than a module; else ""."""
    built = [path.stat().st_mtime for path in folder.glob("*.so")]
    sources = [path for pattern in ("*.pyx", "*.px[di]", "c/*.h", "c/*.c") for path in folder.glob(pattern)]
    if not (folder.parents[1] / "setup.py").exists() or not built or not sources:
        return ""
    newest = max(sources, key=lambda path: path.stat().st_mtime)
    return newest.name if newest.stat().st_mtime > max(built) else ""


def atomics() -> Check:
    """Whether atomics are lock-free: a core for which they are not cannot be built, so it is enough that one
    loads.
    """
    header = importlib.import_module("shmbridge._ext.header")
    return Check(
        "atomics", "ok", f"lock-free, of 32 and 64 bits: the core of layout {header.layout_version} is built"
    )


def _platform() -> str:
    return str(sysconfig.get_config_var("SOABI") or platform.machine())


def _layout() -> str:
    try:
        return f" of layout {importlib.import_module('shmbridge._ext.header').layout_version}"
    except Exception:  # the check of the extensions says why
        return ""


def _libc() -> str:
    try:
        return os.confstr("CS_GNU_LIBC_VERSION") or "a C library that is not glibc"
    except (OSError, ValueError):
        return "a C library that is not glibc"


def _numbers(release: str) -> tuple[int, ...]:
    """Returns the leading numbers of a release, without zeros at the end: (1, 16) of "1.16.0rc1"."""
    leading = re.match(r"\d+(?:\.\d+)*", release)
    numbers = [int(each) for each in leading[0].split(".")] if leading else []
    while numbers and not numbers[-1]:
        numbers.pop()
    return tuple(numbers)
