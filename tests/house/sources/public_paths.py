"""The paths that users import: written down from an earlier revision, and tried here.

    python tests/house/sources/public_paths.py        tries public_paths.txt with this interpreter

The list has the names of the package, its public modules with their names, programs (`python -m`), entry
points, and what the README and the pages of docs/ name. A path may move as long as the old one leads to the
same thing.
"""

import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

LIST = Path(__file__).with_name("public_paths.txt")

# Removed on purpose: the suite that checks rings is for this project alone.
GONE = {
    *(f"module shmbridge.testing.{name}" for name in ("against_model", "compiled_ring", "conformance")),
    *(f"module shmbridge.testing.{name}" for name in ("model_ring", "ring_under_test", "scenarios")),
    *(f"name shmbridge.testing:{name}" for name in ("RingUnderTest", "Seen", "Words")),
}


def wrong_paths(lines: list[str]) -> list[str]:
    """Returns the entries of the list that this interpreter cannot find, except those that only lack a
    third-party package.
    """
    found = []
    for line in (each for each in lines if each not in GONE):
        kind, path = line.split()
        try:
            problem = _problem(kind, path)
        except Exception as error:  # a module may raise anything while it is imported
            problem = None if _lacks_others(error) else f"{type(error).__name__}: {error}"
        if problem:
            found.append(f"{kind} {path}: {problem}")
    return found


NEEDED = {"shmbridge", "numpy", "pyarrow", "zmq", "posix_ipc", "msgspec"}


def _lacks_others(error: BaseException | None) -> bool:
    """Whether the error began with an optional third-party package that is not installed."""
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


def main() -> int:
    """Tries the list."""
    wrong = wrong_paths(LIST.read_text().splitlines())
    print("\n".join(wrong))
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
