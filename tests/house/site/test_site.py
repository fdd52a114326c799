"""The built site: its pages in a browser, its search, its navigation, its links."""

import re
import struct
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote

import browser
import pytest

import shmbridge

ROOT = Path(__file__).parents[3]

# What new users ask, in the words that they type, and the page that answers it.
QUESTIONS = [
    ("slow environment", "docs/how-to/find-the-slow-side.html"),
    ("learner waiting", "docs/how-to/find-the-slow-side.html"),
    ("lane size 64 environments", "docs/how-to/how-much-memory.html"),
    ("docker", "docs/how-to/docker.html"),
    ("kubernetes", "docs/how-to/kubernetes.html"),
    ("TRL", "docs/how-to/trl.html"),
    ("verl", "docs/how-to/verl.html"),
    ("OOM", "docs/how-to/train.html"),
    ("out of memory", "docs/how-to/how-much-memory.html"),
    ("wandb", "docs/reference/metrics.html"),
    ("replay rollouts", "docs/how-to/record-and-replay.html"),
    ("process rewards", "docs/tutorials/process-rewards.html"),
    ("two vllm engines lora", "docs/how-to/vllm.html"),
    ("multi-turn", "docs/how-to/multi-turn.html"),
    ("own loss", "docs/how-to/own-loop.html"),
    ("prometheus alerts", "docs/how-to/alerts.html"),
    ("training loop", "docs/how-to/own-loop.html"),
    ("upgrade", "docs/reference/layout.html"),
    ("test fixtures", "docs/reference/testing.html"),
    ("crash", "docs/explanation/crash-model.html"),
]
BEST = 3  # the answer is among the first three


class Links(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.targets: list[str] = []
        self.names: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if value and name in ("href", "src") and not re.match(r"[a-z]+:", value):
                self.targets.append(value)
            if value and name == "id":
                self.names.add(value)


@pytest.mark.parametrize(("question", "answer"), QUESTIONS, ids=[each for each, _ in QUESTIONS])
def test_the_search_answers(address: str, question: str, answer: str) -> None:
    assert answer in browser.found(address, question)[:BEST]


def test_every_link_leads_to_a_file_and_a_place(site: Path) -> None:
    parsed: dict[Path, Links] = {}
    for file in site.rglob("*.html"):
        links = parsed[file.resolve()] = Links()
        links.feed(file.read_text())
    wrong = []
    for file, links in parsed.items():
        for target in links.targets:
            path, _, place = target.partition("#")
            there = (file.parent / unquote(path.partition("?")[0])).resolve() if path else file
            if not there.is_file() or (
                place and there in parsed and unquote(place) not in parsed[there].names
            ):
                wrong.append(f"{file.relative_to(site)}: {target}")
    assert wrong == []
    assert len(parsed) > 100


def test_each_page_but_the_ends_leads_on(site: Path) -> None:
    """Links to the page before and after, in the order of the index."""
    pages = [
        site / f"{each.relative_to(ROOT).with_suffix('')}.html" for each in (ROOT / "docs").rglob("*.md")
    ]
    assert [
        str(each)
        for each in pages
        if "next-page" not in (text := each.read_text()) and "prev-page" not in text
    ] == []


def test_the_api_has_every_public_name(site: Path) -> None:
    places = {
        name
        for each in (site / "docs/reference/api").glob("*.html")
        for name in re.findall(r'id="(shmbridge[\w.]*)"', each.read_text())
    }
    names = {name.rpartition(".")[2] for name in places}
    assert set(shmbridge.__all__) - names == set()
    assert {
        "put",
        "claim",
        "batches",
        "take_groups",
        "to_scored_data",
        "push",
        "attach",
        "BridgeDataset",
        "wait_until",
    } <= names


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("docs/README.html", "Tutorials"),
        ("docs/how-to/find-the-slow-side.html", "The learner waits for environments"),
        ("docs/reference/api/producer.html", "begin_group"),
    ],
)
def test_a_browser_shows_it(address: str, tmp_path: Path, name: str, words: str) -> None:
    assert words in browser.page(f"{address}/{name}")
    browser.screenshot(f"{address}/{name}", tmp_path / "page.png", 1300, 1000)
    head = (tmp_path / "page.png").read_bytes()[:24]
    assert struct.unpack(">II", head[16:]) == (1300, 1000)
    assert (tmp_path / "page.png").stat().st_size > 20_000


def test_sources_are_shown(site: Path) -> None:
    assert "COUNTERS" in (site / "shmbridge/counters.py.html").read_text()
