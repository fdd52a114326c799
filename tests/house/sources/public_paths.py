"""The paths that users import: written down from an earlier revision, and tried here.

    python tests/house/sources/public_paths.py                  tries public_paths.txt with this interpreter
    python tests/house/sources/public_paths.py --write bd76d61  writes that file from an earlier revision

The list has the names of the package, its public modules with their names, programs (`python -m`), entry
points, and what the README and the pages of docs/ name. A path may move as long as the old one leads to the
same thing.
"""

import argparse
import ast
import re
import subprocess
import sys
import tomllib
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

LIST = Path(__file__).with_name("public_paths.txt")
MAPPED = ("producers", "consumers", "bench")
PUBLIC = (  # besides what pages name
    *("errors", "config", "schema", "sizing", "metrics", "weights", "messages", "control", "testing"),
    *("producers.atropos", "consumers.grpo", "consumers.policy_server", "consumers.dataset"),
    *("consumers.weight_sync", "consumers.vllm_weights", "consumers.losses", "consumers.advantages"),
    *("consumers.credit", "consumers.process_rewards", "consumers.device_batch"),
    *("consumers.vllm.plugin", "consumers.vllm.middleware"),
)

# Taken away on purpose: the suite that rings are checked with is for this project alone.
GONE = {
    *(f"module shmbridge.testing.{name}" for name in ("against_model", "compiled_ring", "conformance")),
    *(f"module shmbridge.testing.{name}" for name in ("model_ring", "ring_under_test", "scenarios")),
    *(f"name shmbridge.testing:{name}" for name in ("RingUnderTest", "Seen", "Words")),
}


def wrong_paths(lines: list[str]) -> list[str]:
    """What of the list this interpreter cannot find; what only lacks a package of somebody else is left
    out.
    """
    found = []
    for line in (each for each in lines if each not in GONE):
        kind, path = line.split()
        try:
            problem = _problem(kind, path)
        except Exception as error:  # whatever a module raises while it is imported
            problem = None if _lacks_others(error) else f"{type(error).__name__}: {error}"
        if problem:
            found.append(f"{kind} {path}: {problem}")
    return found


NEEDED = {"shmbridge", "numpy", "pyarrow", "zmq", "posix_ipc", "msgspec"}


def _lacks_others(error: BaseException | None) -> bool:
    """Whether it all began with a package of somebody else that is not installed, and that we do not need."""
    while error is not None:
        missing = (
            (error.name or "shmbridge").split(".")[0] if isinstance(error, ModuleNotFoundError) else None
        )
        if missing is not None and missing not in NEEDED:
            return True
        error = error.__cause__
    return False


def _problem(kind: str, path: str) -> str | None:
    if kind == "program":
        spec = find_spec(path)
        return (
            None
            if spec and (not spec.submodule_search_locations or find_spec(f"{path}.__main__"))
            else "no such program"
        )
    module, _, name = path.partition(":")
    value = import_module(module)
    for part in filter(None, name.split(".")):
        if not hasattr(value, part):
            return f"{value.__name__} has no {part}"
        value = getattr(value, part)
    return None


class Revision:
    """The files of one revision, by git."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.files = set(self._git("ls-tree", "-r", "--name-only", name).split())

    def text(self, path: str) -> str:
        """One file."""
        return self._git("show", f"{self.name}:{path}")

    def file_of(self, module: str) -> str | None:
        """The file of a dotted name of the package; None if it is no module."""
        parts = module.split(".")[1:]
        base = "/".join(parts) if parts[:1] and parts[0] in MAPPED else "/".join(["shmbridge", *parts])
        return next((each for each in (f"{base}.py", f"{base}/__init__.py") if each in self.files), None)

    def lines(self) -> list[str]:
        """All that the list says."""
        found = {f"name shmbridge:{name}" for name in self._names_of_package()}
        for each in PUBLIC:
            module = f"shmbridge.{each}"
            found.add(f"module {module}")
            found |= {f"name {module}:{name}" for name in self._names(module)}
        for path in sorted(self.files):
            if re.fullmatch(r"shmbridge/testing/\w+\.py", path):
                found.add(f"module {path.removesuffix('/__init__.py').removesuffix('.py').replace('/', '.')}")
            page = path in ("README.md", "CHANGELOG.md") or re.match(
                r"docs/(?!adr/).*\.md$|examples/.*\.(md|yaml)$", path
            )
            found |= self._named_on(self.text(path)) if page else set()
        project = tomllib.loads(self.text("pyproject.toml"))["project"]
        points = [project["scripts"], *project["entry-points"].values()]
        return sorted(found | {f"name {value}" for each in points for value in each.values()})

    def _names_of_package(self) -> list[str]:
        (homes,) = [
            node.value
            for node in ast.parse(self.text("shmbridge/__init__.py")).body
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "_HOMES"
        ]
        return [*eval(compile(ast.Expression(homes), "_HOMES", "eval")), "TRAJECTORY_SCHEMA"]

    def _names(self, module: str) -> list[str]:
        """What a module defines, or says in `__all__`, without what begins with an underscore."""
        path = self.file_of(module)
        assert path is not None, f"{module} is not in {self.name}"
        said: list[str] = []
        for node in ast.parse(self.text(path)).body:
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                said.append(node.name)
            elif isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
                said += re.findall(r"'(\w+)'", ast.unparse(node.value))
        return [name for name in said if not name.startswith("_")]

    def _named_on(self, page: str) -> set[str]:
        found = {f"program {name}" for name in re.findall(r"python3? -m (shmbridge(?:\.\w+)+)", page)}
        for dotted in re.findall(r"(?<![\w./-])shmbridge(?:\.[A-Za-z_]\w*)+(?!/)", page):
            module, rest = dotted, ""
            while module != "shmbridge" and self.file_of(module) is None:
                module, _, last = module.rpartition(".")
                rest = f"{last}.{rest}".rstrip(".")
            if module != "shmbridge":
                found.add(f"name {module}:{rest}" if rest else f"module {module}")
        return found

    @staticmethod
    def _git(*argv: str) -> str:
        return subprocess.run(["git", *argv], capture_output=True, text=True, check=True).stdout


def main() -> int:
    """Tries the list, or writes it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--write", metavar="REVISION")
    options = parser.parse_args()
    if options.write:
        LIST.write_text("\n".join(Revision(options.write).lines()) + "\n")
        return 0
    wrong = wrong_paths(LIST.read_text().splitlines())
    print("\n".join(wrong))
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
