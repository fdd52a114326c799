"""Prints the import graph of a tree: rooms, levels, arrows, circles; imports for type checkers count, too.

    python tests/house/sources/import_graph.py [ROOT] [--package shmbridge] [--package consumers/learner]
    [--arrows]

A room is a folder of the package, or a module at its top. An arrow is an import of one room by another. A
level is one more than the highest that a room imports; rooms of one circle share it. Reads the files of any
revision; imports nothing of them.
"""

import argparse
import ast
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

MAPPED = ("producers", "consumers", "bench")  # folders beside the package that are installed in it
SETS = ("shmbridge", "shmbridge/_ext", "consumers", "consumers/learner", "producers/atropos")


@dataclass(frozen=True)
class Graph:
    """Rooms, and the imports of each."""

    arrows: dict[str, set[str]]

    @property
    def count(self) -> int:
        """How many arrows there are."""
        return sum(map(len, self.arrows.values()))

    def circles(self) -> list[list[str]]:
        """Rooms that import each other, directly or not."""
        below = {room: self._below(room) for room in self.arrows}
        circles = {frozenset(low for low in below[room] if room in below[low]) for room in self.arrows}
        return sorted(sorted(each) for each in circles if each)

    def levels(self) -> dict[str, int]:
        """Room -> how many rooms stand under it in the longest way down, itself included."""
        below = {room: self._below(room) for room in self.arrows}
        level: dict[str, int] = {}
        for room in sorted(below, key=lambda each: (len(below[each]), each)):  # those imported come first
            under = {low for low in below[room] if room not in below[low]}
            level[room] = 1 + max((level[low] for low in under), default=0)
        return level

    def _below(self, room: str) -> set[str]:
        """All that a room imports, directly or not; itself if it is in a circle."""
        found: set[str] = set()
        coming = [room]
        while coming:
            new = self.arrows[coming.pop()] - found
            found |= new
            coming += new
        return found


def modules(root: Path) -> dict[str, Path]:
    """Dotted name -> file of every Python and Cython source that is installed."""
    folders = {"shmbridge": "shmbridge"} | {name: f"shmbridge.{name}" for name in MAPPED}
    found = {}
    for folder, package in folders.items():
        for path in sorted([*(root / folder).rglob("*.py"), *(root / folder).rglob("*.pyx")]):
            below = path.relative_to(root / folder)
            if folder == "shmbridge" and below.parts[0] in MAPPED:
                continue  # links to the folders beside it
            parts = [*below.parent.parts, *([] if path.stem == "__init__" else [path.stem])]
            found[".".join([package, *parts])] = path
    return found


def imports(name: str, path: Path) -> Iterator[tuple[str, int, bool]]:
    """(dotted name, line, only for type checkers) of all that a file imports, wherever it stands; `from x
    import y` gives x.y. Of Cython files only imports of this package.
    """
    if path.suffix == ".pyx":
        for number, line in enumerate(path.read_text().splitlines(), 1):
            found = re.match(r"\s*(?:from|import|cimport)\s+(shmbridge[\w.]*)(?:\s+c?import\s+(.*))?", line)
            if found:
                names = [each.strip(" ()") for each in (found[2] or "").split(",")]
                yield from ((f"{found[1]}.{each}".rstrip("."), number, False) for each in names)
        return
    package = name if path.stem == "__init__" else name.rpartition(".")[0]
    tree = ast.parse(path.read_text())
    for_types = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for statement in node.body
        for inner in ast.walk(statement)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno, id(node) in for_types) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            up = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*up, *([node.module] if node.module else [])])
            yield from ((f"{base}.{alias.name}", node.lineno, id(node) in for_types) for alias in node.names)


def graph(root: Path, package: str, *, for_types: bool = True) -> Graph:
    """The rooms of one folder of the tree; without `for_types`, as they import each other when they run."""
    there = modules(root)
    dotted = package.replace("/", ".")
    dotted = dotted if dotted.startswith("shmbridge") else f"shmbridge.{dotted}"
    inside = {name: path for name, path in there.items() if name == dotted or name.startswith(dotted + ".")}
    if dotted == "shmbridge":
        inside = {name: path for name, path in inside.items() if not set(name.split(".")[1:2]) & set(MAPPED)}

    def room(name: str) -> str:
        rest = name.removeprefix(dotted).lstrip(".")
        return rest.split(".")[0] if rest else "__init__"

    arrows: dict[str, set[str]] = {room(name): set() for name in inside}
    for name, path in inside.items():
        for imported, _, types_only in imports(name, path):
            if types_only and not for_types:
                continue
            target = imported
            while target not in there and "." in target:
                target = target.rpartition(".")[0]
            if target in inside and room(target) != room(name):
                arrows[room(name)].add(room(target))
    return Graph(arrows)


def main() -> None:
    """Prints the numbers of each folder."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("root", nargs="?", type=Path, default=Path(__file__).resolve().parents[3])
    parser.add_argument(
        "--package", action="append", help=f"folder whose rooms are shown; default: {', '.join(SETS)}"
    )
    parser.add_argument(
        "--arrows", action="store_true", help="print each room with its level and what it imports"
    )
    options = parser.parse_args()
    for package in options.package or [each for each in SETS if (options.root / each).is_dir()]:
        found = graph(options.root, package)
        levels = found.levels()
        height = max(levels.values(), default=0)
        circles = found.circles()
        numbers = f"{len(levels)} rooms, {height} levels, {found.count} arrows, {len(circles)} circles"
        print(f"{package}: {numbers}")
        for circle in circles:
            print(f"  circle: {' <-> '.join(circle)}")
        if options.arrows:
            for name in sorted(levels, key=lambda each: (levels[each], each)):
                print(f"  {levels[name]:3} {name}: {', '.join(sorted(found.arrows[name])) or '-'}")


if __name__ == "__main__":
    sys.exit(main())
