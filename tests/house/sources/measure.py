"""Prints what the house measures: rooms, arrows, files, lines of product and tests, and the way of a record.

    python tests/house/sources/measure.py [ROOT]

Lines are those with code: without blank lines, comments and docstrings. Tests that prove the ring and the
numbers do not count: crash, agreement, mutations. The way of a record is traced in this revision: from `put`
of one group of two rows to its loss and release, without prefetch, in the second step of a tiny model.
"""

import argparse
import ast
import io
import os
import re
import subprocess
import sys
import tokenize
from collections import Counter
from pathlib import Path
from typing import Any

from import_graph import graph

TOPS = ("shmbridge", "consumers", "producers")
PROOFS = ("tests/faults/crash/", "tests/house/mutations/", "tests/adapters/agreement/", "agree")


def tracked(root: Path) -> list[Path]:
    """The files that git knows, without links."""
    listed = subprocess.run(["git", "ls-files"], cwd=root, capture_output=True, text=True, check=True).stdout
    return [path for name in listed.splitlines() if (path := root / name).is_file() and not path.is_symlink()]


def code_lines(path: Path) -> int:
    """Lines of a file that hold code."""
    text = path.read_text()
    if path.suffix in (".py", ".pyi"):
        return len(_python_lines(text))
    if path.suffix in (".h", ".c"):
        text = re.sub(r"/\*.*?\*/", lambda found: "\n" * found[0].count("\n"), text, flags=re.S)
        return sum(bool(line.split("//")[0].strip()) for line in text.splitlines())
    text = re.sub(r'"""(?:[^"]|"(?!""))*"""', lambda found: "\n" * found[0].count("\n"), text)
    return sum(bool(line.split("#")[0].strip()) for line in text.splitlines())


def _python_lines(text: str) -> set[int]:
    docs: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        if (
            isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, str)
        ):
            docs |= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    skipped = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT}
    return {
        line
        for token in tokenize.generate_tokens(io.StringIO(text).readline)
        if token.type not in skipped and token.type != tokenize.ENDMARKER
        for line in range(token.start[0], token.end[0] + 1)
    } - docs


def main() -> None:
    """Prints the numbers of a tree."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("root", nargs="?", type=Path, default=Path(__file__).resolve().parents[3])
    root = parser.parse_args().root.resolve()
    transport = graph(root, "shmbridge")
    rooms, circles = len(transport.arrows), len(transport.circles())
    print(f"transport: {rooms} rooms, {transport.count} arrows, {circles} circles")
    sources = [
        path for path in tracked(root) if path.suffix in (".py", ".pyx", ".pxd", ".pxi", ".pyi", ".h", ".c")
    ]
    product = [path for path in sources if path.relative_to(root).parts[0] in TOPS]
    per_room = Counter(path.parent for path in product if path.suffix == ".py" and path.name != "__init__.py")
    room, most = per_room.most_common(1)[0]
    print(f"product: {sum(map(code_lines, product))} lines in {len(product)} files", end="; ")
    print(f"most files in a room: {most} ({room.relative_to(root)})")
    tests = [path for path in sources if path.relative_to(root).parts[0] == "tests"]
    counted = [path for path in tests if not any(part in str(path.relative_to(root)) for part in PROOFS)]
    print(f"tests: {sum(map(code_lines, counted))} lines in {len(counted)} files that count, of {len(tests)}")
    generated = list(root.glob("build/generated/**/*.c"))
    if generated:
        lines = sum(len(path.read_text().splitlines()) for path in generated)
        print(f"generated C: {lines} lines in {len(generated)} files")
    print("put to loss:", way_of_a_record())


def way_of_a_record() -> str:
    """Traces one group from `put` to its loss and release: files, functions and calls of Python code."""
    import shmbridge
    from shmbridge.consumers.learner.train.grpo_update import Learner
    from shmbridge.consumers.learner.train.objective import Objective
    from shmbridge.launch.tiny_model import build_model

    calls: Counter[tuple[str, str]] = Counter()

    def seen(frame: Any, event: str, _: object) -> None:
        name = frame.f_code.co_filename
        if event == "call" and "site-packages" not in name and any(f"/{top}/" in name for top in TOPS):
            calls[name, frame.f_code.co_qualname] += 1

    learner = Learner(build_model(0), Objective(), lambda step: 1e-3)
    group = {"tokens": [[3, 4, 5, 6], [3, 4, 7, 8]], "scores": [1.0, 0.0], "loss_mask": [[0, 0, 1, 1]] * 2}
    group["inference_logprobs"] = [[-0.5] * 4] * 2
    bridge = f"measure-{os.getpid()}"
    with shmbridge.Consumer(bridge) as consumer, shmbridge.Producer(bridge, lane_bytes="1M") as producer:
        batches = consumer.batches(groups=1, prefetch=0)
        for step in range(2):
            sys.setprofile(seen if step else None)
            producer.put(group)
            batch = next(batches)
            learner.accumulate(batch)
            learner.apply()
            batch.release()
            sys.setprofile(None)
    return f"{len({name for name, _ in calls})} files, {len(calls)} functions, {calls.total()} calls"


if __name__ == "__main__":
    main()
