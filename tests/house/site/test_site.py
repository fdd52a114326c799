"""The built site: its pages in a browser, its search, its navigation, its links."""

import ast
import posixpath
import re
import struct
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import quote_plus, unquote

import browser
import pytest

import shmbridge

ROOT = Path(__file__).parents[3]

# What users type, by the page that answers it; a path is below docs/.
ANSWERS = {
    "../bench/README": ["benchmark", "how fast"],
    "reference/limits": ["multiprocessing", "segfault", "ulimit"],
    "how-to/find-the-slow-side": ["slow environment", "learner waiting", "gpu idle"],
    "how-to/inspect": ["hangs", "stuck"],
    "how-to/how-much-memory": [
        "64 environments",
        "lane size 64 environments",
        "32k tokens",
        "/dev/shm",
        "lane_bytes",
        "oom",
        "out of memory",
    ],
    "how-to/docker": ["shm size", "docker", "podman", "docker compose"],
    "how-to/kubernetes": ["kubernetes", "k8s", "kubectl"],
    "how-to/slurm": ["slurm", "sbatch"],
    "how-to/several-nodes": ["several nodes", "multi-node"],
    "how-to/train": [
        "cuda out of memory",
        "cuda oom",
        "torch.OutOfMemoryError",
        "checkpoint",
        "resume",
        "lora",
        "evaluation",
        "pass@k",
    ],
    "explanation/crash-model": ["kill -9", "sigkill", "ctrl-c", "crash", "lost data", "exactly once"],
    "reference/releases": ["redelivered"],
    "errors/README": [
        "LaneFull",
        "SB301",
        "SB101",
        "ConsumerTaken",
        "version mismatch",
        "fork",
        "permission denied",
    ],
    "reference/layout": ["upgrade"],
    "how-to/record-and-replay": ["replay", "replay rollouts", "parquet"],
    "how-to/alerts": ["prometheus", "prometheus alerts", "grafana"],
    "reference/metrics": ["wandb", "weights and biases", "tensorboard"],
    "how-to/multi-turn": ["multi turn", "multi-turn", "tool calls", "agent"],
    "tutorials/process-rewards": ["prm", "process rewards"],
    "how-to/rewards": ["process reward model"],
    "how-to/own-loop": ["custom loss", "own loss", "training loop"],
    "how-to/own-environment": ["custom environment", "own environment", "sglang"],
    "how-to/trl": ["trl", "GRPOTrainer"],
    "how-to/verl": ["verl"],
    "how-to/skyrl": ["skyrl"],
    "how-to/roll": ["roll"],
    "how-to/other-trainers": ["openrlhf"],
    "reference/trainers": ["ray"],
    "how-to/vllm": ["vllm", "vllm weights", "two vllm engines lora", "weight sync"],
    "how-to/from-atropos-http": ["atropos", "http"],
    "explanation/staleness": ["staleness", "off policy", "off-policy"],
    "how-to/notebook": ["jupyter", "notebook"],
    "reference/columns": ["finish_reason", "columns", "schema", "logprobs"],
    "how-to/write-and-read": ["read-only views"],
    "explanation/batches": ["batches", "packed", "padding", "pinned memory"],
    "reference/advantages": ["advantages"],
    "reference/losses": ["dr grpo", "gspo"],
    "how-to/several-gpus": ["multi gpu", "ddp", "fsdp"],
    "reference/gateway": ["multi node", "several nodes"],
    "how-to/install": ["install", "pip install", "no gpu"],
    "reference/cli": ["clean", "leaked shared memory"],
    "reference/testing": ["test fixtures", "pytest", "ci"],
    "reference/dataset": ["dataloader"],
    "how-to/arrow-polars-duckdb-torch": ["polars", "pandas"],
}
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


@pytest.fixture(scope="module")
def found(address: str, site: Path) -> dict[str, list[str]]:
    return browser.found_by_each(address, site, [each for asked in ANSWERS.values() for each in asked])


@pytest.mark.parametrize("page", ANSWERS)
def test_the_search_answers(found: dict[str, list[str]], page: str) -> None:
    missed = {asked: found[asked][:BEST] for asked in ANSWERS[page]}
    assert {
        asked: best for asked, best in missed.items() if posixpath.normpath(f"docs/{page}") not in best
    } == {}


@pytest.mark.parametrize("asked", ["kill -9", "out of memory"])
def test_the_page_of_the_search_shows_what_was_found(
    address: str, found: dict[str, list[str]], asked: str
) -> None:
    shown = browser.found(address, asked)
    assert shown[:BEST] == [f"{page}.html" for page in found[asked][:BEST]]


@pytest.mark.parametrize(
    ("asked", "place"),
    [
        ("SB301", "docs/errors/README.html#row-sb301"),
        ("finish_reason", "docs/reference/columns.html#row-finish-reason"),
        ("cuda out of memory", "docs/how-to/train.html#out-of-memory"),
        ("own loss", "docs/how-to/own-loop.html#a-loss-of-your-own"),
    ],
)
def test_the_search_leads_to_the_place(address: str, asked: str, place: str) -> None:
    shown = browser.page(f"{address}/search.html?q={quote_plus(asked)}")
    first = re.findall(r'<li[^>]*><a href="([^"]*)"', shown[shown.index('id="search-results"') :])[0]
    assert re.sub(r"\?[^#]*", "", first) == place


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


def test_the_api_has_what_pages_import(site: Path) -> None:
    places = {
        name
        for each in (site / "docs/reference/api").glob("*.html")
        for name in re.findall(r'id="(?:module-)?(shmbridge[\w.]*)"', each.read_text())
    }
    short = {name.rpartition(".")[2] for name in places}
    missing = set()
    for page in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]:
        for block in re.findall(r"^```python[^\n]*\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL):
            for statement in ast.walk(ast.parse(block)):
                if isinstance(statement, ast.ImportFrom) and (statement.module or "").startswith("shmbridge"):
                    missing |= {
                        f"{page.name}: {statement.module}.{each.name}"
                        for each in statement.names
                        if each.name not in short and f"{statement.module}.{each.name}" not in places
                    }
    assert missing == set()


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
    assert "COUNTERS" in (site / "shmbridge/metrics.py.html").read_text()
