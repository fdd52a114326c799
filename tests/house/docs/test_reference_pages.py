"""The reference is what the code says: generated pages are fresh, written ones complete."""

import re
import subprocess
import sys
from pathlib import Path

import shmbridge
from shmbridge._ext.record import RecordMeta
from shmbridge.schema import FINISH_REASONS, STANDARD
from shmbridge.testing.fixtures import *  # noqa: F403  # make_producer, make_consumer, bridge

ROOT = Path(__file__).parents[3]
REFERENCE = ROOT / "docs/reference"


def rows(page: str, after: str = "", until: str = "") -> list[list[str]]:
    """Returns the cells of a page's tables, without heads, between two of its lines."""
    text = (REFERENCE / page).read_text()
    text = text[text.index(after) if after else 0 :]
    text = text[: text.index(until) if until else None]
    lines = re.findall(r"^\| (`.*|\d.*) \|$", text, re.MULTILINE)
    return [re.split(r" \| ", line) for line in lines]


def test_generated_pages_are_fresh() -> None:
    done = subprocess.run(
        [sys.executable, ROOT / "docs/_generate", "--check"], capture_output=True, text=True, cwd=ROOT
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_every_column_is_there_with_its_type() -> None:
    found = {row[0].strip("`"): row[1] for row in rows("columns.md", until="## Codes")}
    types = {
        name: each.type_name.replace("<", "&lt;").replace(">", "&gt;") for name, each in STANDARD.items()
    }
    assert found == types
    for row in rows("columns.md", until="## Codes"):
        assert len(row) == 5, row
        assert all(cell.strip() for cell in row), "type, meaning, who writes, who reads"
    assert list(shmbridge.TRAJECTORY_SCHEMA.names) == list(STANDARD)
    per_record = {
        row[0].strip("`") for row in rows("columns.md", "## Carried whole", "## Codes") if row[4] == "record"
    }
    assert per_record == {name for name, each in STANDARD.items() if each.per_record}
    per_token = {
        row[0].strip("`") for row in rows("columns.md", until="## Codes") if row[2].startswith("per token")
    }
    assert per_token | {"tokens", "masks"} == {name for name, each in STANDARD.items() if each.per_token}


def test_every_finish_reason_has_its_code() -> None:
    found = [(int(row[0]), row[1].strip("`")) for row in rows("columns.md", "## Codes", "## Of a record")]
    assert found == list(enumerate(FINISH_REASONS))


def test_what_a_record_says_of_itself() -> None:
    found = {name for row in rows("columns.md", "## Of a record") for name in re.findall(r"`(\w+)`", row[0])}
    assert found == {each for each in dir(RecordMeta) if not each.startswith("_")}


def keys(after: str, until: str = "") -> set[str]:
    return {key for row in rows("stats.md", after, until) for key in re.findall(r"`([\w{}]+)`", row[0])}


def bare(counters: dict[str, float]) -> set[str]:
    return {re.sub(r"\{.*", "", key) for key in counters}


def test_every_key_of_stats_is_there(bridge: str) -> None:
    with shmbridge.Consumer(bridge) as consumer, shmbridge.Producer(bridge) as producer:
        consumer.serve_ranks(world_size=1, groups=1)
        producer.put({"tokens": [[1, 2]], "loss_mask": [[0, 1]]})
        assert set(producer.stats()) == keys("## Of a producer", "## Of a consumer")
        consumer.drain()
        with shmbridge.Rank(bridge, rank=0, world_size=1) as rank:
            for _ in rank.batches(layout="packed", timeout_s=5):
                pass
            assert set(rank.stats()) == keys("## Of a rank")
        named = {re.sub(r"\{.*", "", key) for key in keys("## Of a consumer", "## Of a rank")}
        sometimes = {"tap_busy", "groups_buffered", "groups_limit", "latency_us_p50", "latency_us_p99"}
        assert bare(consumer.stats()) | sometimes == named
