"""The Python blocks of the README and of the page it leads to run, in order; their bridges are clean."""

import json
import logging
import re
from pathlib import Path

import pytest
from own_bridges import clean_own_bridges, with_own_bridges

ROOT = Path(__file__).parents[3]
README = ROOT / "README.md"
PRINTED = {
    "README.md": "[11 12 13 14 11 12 15] [1. 0.] [0 4 7]",
    "docs/how-to/write-and-read.md": "gsm8k [11 12 13 14] [1. 0.]",
}


@pytest.mark.parametrize("page", PRINTED)
def test_the_examples_run_as_written(page, capsys, caplog) -> None:
    scope: dict[str, object] = {}
    try:
        for block in re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL):
            exec(compile(with_own_bridges(block), page, "exec"), scope)
    finally:
        scope.clear()
        reports = clean_own_bridges()
    assert [each.getMessage() for each in caplog.records if each.levelno >= logging.WARNING] == []
    assert PRINTED[page] in capsys.readouterr().out
    assert not any(report.kept or report.undelivered for report in reports), reports


def test_the_links_lead_somewhere() -> None:
    for target in re.findall(r"\]\((?!https:)([^)#]+)(?:#[^)]*)?\)", README.read_text()):
        assert (ROOT / target).exists(), target


def test_the_guarantees_are_numbered_as_in_the_crash_model() -> None:
    text = README.read_text().partition("## Guarantees")[2].partition("## Limits")[0]
    assert re.findall(r"^(\d+)\. ", text, re.MULTILINE) == [*"123456789", "10", "11", "12"]


def test_two_screens_of_prose_are_enough() -> None:
    """Tables, code and pictures are not counted."""
    text = re.sub(r"```.*?```|^\|.*$|^!\[.*$", "", README.read_text(), flags=re.DOTALL | re.MULTILINE)
    words = re.sub(r"\]\([^)]*\)", "]", text).split()
    assert len(words) < 900, len(words)


def test_the_compared_throughput_is_that_of_the_results() -> None:
    rows = json.loads((ROOT / "bench/results/amd-epyc-2-cores.json").read_text())["rows"]
    peers = {
        row["contender"]: row["tokens_per_s"] / 1e6
        for row in rows
        if row["group"] == "peers" and (row["length"], row["lane_bytes"]) == (2048, 64 << 20)
    }
    http = next(row for row in rows if row["label"] == "Atropos, BaseEnv over HTTP, 8 x 2048")
    names = ("ring", None, "ray_actor", "zmq_ipc", "transfer_queue_store", "iceoryx")
    measured = [peers[name] if name else http["tokens_per_s"] / 1e6 for name in names]
    (row,) = re.findall(r"^\| million tokens/s.*$", README.read_text(), re.MULTILINE)
    written = [float(cell.strip(" *")) for cell in row.strip("|").split("|")[1:]]
    assert written == pytest.approx(measured, rel=0.03)
