"""Each mistake on docs/errors/mistakes.md ends in exactly the error that the page shows; nothing is
committed, and the error names what was written and one thing to do.
"""

import builtins
import re
from pathlib import Path

import pytest
from mistakes_page import PAGE, Scene, examples

import shmbridge

INDEX = Path(PAGE).with_name("README.md")
# What an error must not show: words of Python's and NumPy's reprs, and names of our own insides.
INTERNAL = re.compile(
    r"dtype\(|np\.\w+\(|object at 0x|<class|NoneType|_ext\b|PackedColumn|Traceback|\bColumn\(|BadValue"
)
EXAMPLES = examples()


@pytest.fixture(scope="module")
def scene():
    made = Scene()
    yield made
    made.close()


def words_of(source: str) -> set[str]:
    """Returns what the caller wrote: texts, numbers, and names of arguments."""
    texts = ["producer"] if "producer." in source else []
    texts += re.findall(r"""["']([^"']+)["']""", source)
    names = re.findall(r"\b[A-Za-z_]\w*\b|-?\d+(?:\.\d+)?", source)
    known = {"shmbridge", "put", "np", "pa", "array", *dir(builtins)} - {"None"}
    return {*texts, *names} - known


@pytest.mark.parametrize("example", EXAMPLES, ids=[each.source.strip()[:90] for each in EXAMPLES])
def test_a_mistake_ends_in_the_error_that_the_page_shows(scene, example) -> None:
    if "torch" in example.source:
        pytest.importorskip("torch")
    for name, library in (("pd.", "pandas"), ("pl.", "polars")):
        if name in example.source:
            pytest.importorskip(library)
    before = scene.producer.stats()["records_total"]
    wrong, text = scene.error_of(example.source)
    assert isinstance(wrong, shmbridge.ShmBridgeError)
    assert text == example.want.rstrip("\n")
    assert scene.producer.stats()["records_total"] == before
    assert "\n" not in text
    assert wrong.hint
    assert text.count(" -> ") == 1
    assert not INTERNAL.search(text)
    if example.source.strip() != "producer.put({})":
        assert any(word in text for word in words_of(example.source)), "it names nothing that was written"


def test_no_hint_answers_many_mistakes() -> None:
    """A hint that is always the same is none."""
    hints = [example.want.split(" -> ")[-1] for example in EXAMPLES]
    assert len(EXAMPLES) >= 120
    assert max(map(hints.count, hints)) <= 5


def test_the_errors_that_the_index_shows_are_those_of_the_page() -> None:
    shown = re.findall(r"^    (\[SB\d{3}\] .+)$", INDEX.read_text(), re.MULTILINE)
    on_page = {example.want.rstrip("\n") for example in EXAMPLES}
    assert {text[1:6] for text in on_page} <= {text[1:6] for text in shown}
    assert [text for text in shown if text[1:6] in {each[1:6] for each in on_page}] == [
        text for text in shown if text in on_page
    ]
