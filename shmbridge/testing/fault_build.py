"""Builds shmbridge with fail-points from a source tree, next to the installed package.

faults.py has the labels and the children that die on one. Imported by tests only.
"""

import fcntl
import os
import subprocess
import sys
from pathlib import Path

_SOURCES = {".py", ".pyx", ".pxi", ".pxd", ".h", ".c"}


def fault_build(source_tree: str | os.PathLike[str], into: str | os.PathLike[str]) -> Path:
    """Builds shmbridge with fail-points, if a source is newer than the last such build; returns the folder
    for a child's PYTHONPATH.

    Blocks for the build (about a minute), and while another process builds into the same folder. Needs Cython
    and a C compiler.

    Args:
        source_tree: a clone or an unpacked source archive: the folder of setup.py.
        into: folder of the package; created if missing. Objects go beside it, in `<into>-base`.

    Raises:
        FileNotFoundError: there is no setup.py.
        RuntimeError: the build failed; the message ends with the compiler's output.
    """
    tree, folder = Path(source_tree).resolve(), Path(into).resolve()
    if not (tree / "setup.py").is_file():
        raise FileNotFoundError(f"{tree} has no setup.py: a build with fail-points needs shmbridge's sources")
    folder.mkdir(parents=True, exist_ok=True)
    stamp = folder / ".built"
    with open(folder / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        began = _newest_source(tree)
        if not stamp.exists() or stamp.stat().st_mtime < began:
            _build(tree, folder)
            stamp.touch()
            os.utime(stamp, (began, began))
    return folder


def _build(tree: Path, folder: Path) -> None:
    build = ["build", "--build-base", f"{folder}-base", "--build-lib", str(folder), "build_ext", "-j2"]
    done = subprocess.run(
        [sys.executable, "setup.py", "-q", *build],
        cwd=tree,
        env={**os.environ, "SHMBRIDGE_FAULTS": "1", "CFLAGS": "-O1"},  # compiles in half the time
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        raise RuntimeError(f"the build with fail-points failed:\n{done.stdout[-4000:]}")
    subprocess.run(
        [sys.executable, "-m", "compileall", "-q", str(folder)], check=False, stdout=subprocess.DEVNULL
    )


def _newest_source(tree: Path) -> float:
    sources = [tree / "setup.py", tree / "pyproject.toml"]
    for package in ("shmbridge", "producers", "consumers"):
        sources += [
            path
            for path in (tree / package).rglob("*")
            if path.suffix in _SOURCES and not _is_generated(path)
        ]
    return max(path.stat().st_mtime for path in sources)


def _is_generated(path: Path) -> bool:
    return path.suffix == ".c" and path.with_suffix(".pyx").exists()
