"""The results of `make gpu` as JSON and as a page. Standard library only."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any


def write(into: Path, results: dict[str, Any]) -> None:
    """Writes `<into>.json` and `<into>.md`, each whole at any moment."""
    into.parent.mkdir(parents=True, exist_ok=True)
    for suffix, text in ((".json", json.dumps(results, indent=1) + "\n"), (".md", _page(results))):
        partial = into.with_name(into.name + suffix + ".part")
        partial.write_text(text)
        os.replace(partial, into.with_name(into.name + suffix))


def _page(results: dict[str, Any]) -> str:
    machine = results["machine"]
    gpu = machine["gpu"]
    name = gpu["name"] if gpu else "no GPU"
    taken_for = (
        ""
        if results["device"] == "cuda"
        else " The processor was taken for the device: no figure here is of a GPU."
    )
    versions = ", ".join(f"{each} {number}" for each, number in machine["versions"].items() if number)
    lines = [
        f"# {name}",
        "",
        (
            f"Taken {results['taken']} by `make gpu`, size {results['size']}, revision "
            f"{results['revision']}; kernel {machine['kernel']}; {machine['cpu']}, {machine['cores']} "
            f"cores, {machine['memory_gib']} GiB; Python {machine['python']}; {versions}.{taken_for}"
        ),
        "",
    ]
    if gpu:
        lines += [
            (
                f"{gpu['count']} x {gpu['name']}, {gpu['memory_gib']} GiB, CUDA {gpu['cuda']}, driver "
                f"{gpu['driver']}."
            ),
            "",
        ]
    lines += [f"- {line}" for line in results["lacking"]] + [""]
    for part, found in results["parts"].items():
        seconds = f", {found['seconds']} s" if "seconds" in found else ""
        lines += [f"## {part[0].upper()}{part[1:]}", "", f"{found['state'].splitlines()[0]}{seconds}", ""]
        lines += _tables(found["rows"])
    return "\n".join(lines).rstrip() + "\n"


def _tables(rows: list[dict[str, Any]]) -> list[str]:
    """One table for each run of rows with the same columns."""
    lines: list[str] = []
    columns: list[str] = []
    for row in rows:
        if list(row) != columns:
            columns = list(row)
            lines += ["", *_head(columns)] if lines else _head(columns)
        lines.append("| " + " | ".join(_cell(value) for value in row.values()) + " |")
    return [*lines, ""] if lines else []


def _head(columns: list[str]) -> list[str]:
    return ["| " + " | ".join(columns) + " |", "| --- |" + " ---: |" * (len(columns) - 1)]


def _cell(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
