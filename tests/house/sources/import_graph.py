"""Prints the import graph of a tree: rooms, levels, arrows, circles; imports for type checkers count, too.

    python tests/house/sources/import_graph.py [ROOT] [--package shmbridge] [--package consumers/learner]
    [--arrows]

A room is a folder of the package, or a module at its top. A module that only stands for another, as the
public path of one that moved, is counted apart. An arrow is an import of one room by another. A level is one
more than the highest that a room imports; rooms of one circle share it. Reads the files of any revision;
imports nothing of them.
"""

import argparse
import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

MAPPED = ("producers", "consumers", "bench")  # folders beside the package that are installed in it
SETS = ("shmbridge", "shmbridge/_ext", "consumers", "consumers/learner", "producers/atropos")


@dataclass(frozen=True)
class Graph:
    """Rooms, and for each what it imports."""

    arrows: dict[str, set[str]]
    aliases: int

    @property
    def count(self) -> int:
        """How many arrows there are."""
        return sum(map(len, self.arrows.values()))

    def circles(self) -> list[list[str]]:
        """Rooms that import each other, directly or not: strongly connected components of more than one."""
        return [sorted(each) for each in self._components() if len(each) > 1]

    def levels(self) -> dict[str, int]:
        """Room -> how many rooms stand under it in the longest way down, itself included."""
        level: dict[str, int] = {}
        for component in self._components():  # those that are imported come first
            below = {target for room in component for target in self.arrows[room]} - component
            level |= dict.fromkeys(component, 1 + max((level[each] for each in below), default=0))
        return level

    def _components(self) -> list[set[str]]:
        """Tarjan's algorithm, without recursion; a component comes after all that it imports."""
        index: dict[str, int] = {}
        low: dict[str, int] = {}
        stack: list[str] = []
        found: list[set[str]] = []
        for root in sorted(self.arrows):
            if root in index:
                continue
            index[root] = low[root] = len(index)
            stack.append(root)
            work = [(root, iter(sorted(self.arrows[root])))]
            while work:
                room, targets = work[-1]
                target = next(targets, None)
                if target is None:
                    work.pop()
                    if work:
                        low[work[-1][0]] = min(low[work[-1][0]], low[room])
                    if low[room] == index[room]:
                        at = stack.index(room)
                        found.append(set(stack[at:]))
                        del stack[at:]
                elif target not in index:
                    index[target] = low[target] = len(index)
                    stack.append(target)
                    work.append((target, iter(sorted(self.arrows[target]))))
                elif target in stack:
                    low[room] = min(low[room], index[target])
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


def imports(name: str, path: Path) -> Iterator[str]:
    """Dotted names of all that a file imports, wherever it stands; `from x import y` gives x.y."""
    if path.suffix == ".pyx":
        for line in path.read_text().splitlines():
            words = line.split()
            if (
                len(words) > 1
                and words[0] in ("from", "import", "cimport")
                and words[1].startswith("shmbridge")
            ):
                yield from (
                    (f"{words[1]}.{each.strip(',()')}" for each in words[3:])
                    if words[0] == "from"
                    else [words[1]]
                )
        return
    package = name if path.stem == "__init__" else name.rpartition(".")[0]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            up = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*up, *([node.module] if node.module else [])])
            yield from (f"{base}.{alias.name}" for alias in node.names)


def graph(root: Path, package: str) -> Graph:
    """The rooms of one folder of the tree."""
    there = modules(root)
    dotted = package.replace("/", ".")
    dotted = dotted if dotted.startswith("shmbridge") else f"shmbridge.{dotted}"
    inside = {name: path for name, path in there.items() if name == dotted or name.startswith(dotted + ".")}
    if dotted == "shmbridge":
        inside = {name: path for name, path in inside.items() if not set(name.split(".")[1:2]) & set(MAPPED)}
    aliases = {name for name, path in inside.items() if "sys.modules[__name__] = " in path.read_text()}
    inside = {name: path for name, path in inside.items() if name not in aliases}

    def room(name: str) -> str:
        rest = name.removeprefix(dotted).lstrip(".")
        return rest.split(".")[0] if rest else "__init__"

    arrows: dict[str, set[str]] = {room(name): set() for name in inside}
    for name, path in inside.items():
        for imported in imports(name, path):
            target = imported
            while target not in there and "." in target:
                target = target.rpartition(".")[0]
            if target in inside and room(target) != room(name):
                arrows[room(name)].add(room(target))
    return Graph(arrows, len(aliases))


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
        beside = f" (and {found.aliases} public paths of what moved)" if found.aliases else ""
        circles = found.circles()
        numbers = f"{len(levels)} rooms, {height} levels, {found.count} arrows, {len(circles)} circles"
        print(f"{package}: {numbers}{beside}")
        for circle in circles:
            print(f"  circle: {' <-> '.join(circle)}")
        if options.arrows:
            for name in sorted(levels, key=lambda each: (levels[each], each)):
                print(f"  {levels[name]:3} {name}: {', '.join(sorted(found.arrows[name])) or '-'}")


if __name__ == "__main__":
    sys.exit(main())
