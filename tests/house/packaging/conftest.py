"""A copy of the tree, an archive and a wheel made from it, and a fresh environment; each made once."""

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
COPIED = (
    "shmbridge",
    "producers",
    "consumers",
    "bench",
    "setup.py",
    "package_page.py",
    "pyproject.toml",
    "MANIFEST.in",
    "README.md",
    "CHANGELOG.md",
    "LICENSE",
    "CONTRIBUTING.md",
    "SECURITY.md",
    "Makefile",
    "Dockerfile",
    "compose.yaml",
    ".dockerignore",
    ".pre-commit-config.yaml",
    "constraints-cpu.txt",
    "tests",
    "docs",
    "examples",
    ".ci",
    ".github",
)


def run(*argv: object, cwd: Path | str = "/", **environment: str) -> str:
    """Standard output of a command that must succeed. The command does not see this process' PYTHONPATH."""
    variables = {
        key: value
        for key, value in os.environ.items()
        if key not in ("PYTHONPATH", "SHMBRIDGE_FAULTS", "SHMBRIDGE_DEBUG")
    }
    done = subprocess.run(
        [str(each) for each in argv], cwd=cwd, env=variables | environment, capture_output=True, text=True
    )
    assert done.returncode == 0, f"{argv}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return done.stdout


@pytest.fixture(scope="session")
def tree(tmp_path_factory) -> Path:
    """A copy without anything that was built."""
    copy = tmp_path_factory.mktemp("tree")
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            built = shutil.ignore_patterns("*.so", "__pycache__", "*.pyc")
            shutil.copytree(source, copy / name, symlinks=True, ignore=built)
        elif source.exists():
            shutil.copy2(source, copy / name)
    return copy


@pytest.fixture(scope="session")
def sdist(tree, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("sdist")
    run(
        sys.executable,
        "-m",
        "build",
        "--sdist",
        "--no-isolation",
        "--skip-dependency-check",
        "--outdir",
        out,
        tree,
        cwd=tree,
    )
    (archive,) = out.iterdir()
    return archive


@pytest.fixture(scope="session")
def wheel(sdist, tmp_path_factory) -> Path:
    """Built from the archive, not from the tree, as an index would distribute it.

    Unoptimised, for the time it takes.
    """
    out = tmp_path_factory.mktemp("wheel")
    run(
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--quiet",
        "--no-build-isolation",
        "--no-deps",
        "--no-index",
        "--wheel-dir",
        out,
        sdist,
        CFLAGS="-O0 -g0",
    )
    (built,) = out.iterdir()
    return built


@pytest.fixture(scope="session")
def fresh_python(wheel, tmp_path_factory) -> Path:
    """The interpreter of a new environment with the wheel; a path file makes its dependencies visible."""
    environment = tmp_path_factory.mktemp("fresh")
    run(sys.executable, "-m", "venv", "--without-pip", environment)
    python = environment / "bin" / "python"
    (site,) = (environment / "lib").glob("python*/site-packages")
    run(
        sys.executable,
        "-m",
        "pip",
        "--python",
        python,
        "install",
        "--quiet",
        "--no-deps",
        "--no-index",
        wheel,
    )
    # Last on the path, and without its own path files: an editable install over there must not shadow the
    # wheel.
    (site / "zz-dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return python
