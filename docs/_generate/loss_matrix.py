"""The table in docs/reference/trainers.md of what reached each trainer's loss: tests/trainers/loss_matrix.jsonl."""

import json
from pathlib import Path

from markdown import table

ROOT = Path(__file__).parents[2]
BEGIN, END = "<!-- loss matrix: python docs/_generate -->\n", "<!-- end of the loss matrix -->"
HEAD = ("", "with", "release", "rows", "rows missing, too many, of an evaluation", "mask", "advantages",
        "advantages made of scores", "old log-probabilities", "test")  # fmt: skip


def page() -> str:
    """Returns the page with its table rebuilt."""
    before, rest = (ROOT / "docs/reference/trainers.md").read_text().split(BEGIN)
    return f"{before}{BEGIN}\n{_table()}\n{END}{rest.split(END)[1]}"


def _table() -> str:
    rows = []
    for line in map(json.loads, (ROOT / "tests/trainers/loss_matrix.jsonl").read_text().splitlines()):
        wrong = ", ".join(str(line[name]) for name in ("missing", "extra", "evaluated"))
        numbers = (line[name] for name in ("mask", "advantages", "advantages_of_scores", "old_logprobs"))
        first = (line["trainer"], line["setting"], line["release"], str(line["rows"]), wrong)
        rows.append([*first, *map(_shown, numbers), f"`{line['test']}`"])
    return table(HEAD, rows)


def _shown(value: float | None) -> str:
    """A difference: 0, the power of ten that it is below, or - where there is nothing to compare."""
    if value is None:
        return "-"
    return "0" if not value else f"< 1e-{next(n for n in range(20, 0, -1) if value < 10**-n)}"
