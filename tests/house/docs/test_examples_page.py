"""examples/README.md names every file, and its links lead somewhere."""

import re
from pathlib import Path

EXAMPLES = Path(__file__).parents[3] / "examples"
PAGE = (EXAMPLES / "README.md").read_text()


def test_every_example_is_named() -> None:
    names = {path.name for path in EXAMPLES.iterdir() if not path.name.startswith(("__", "."))}
    named = set(re.findall(r"`([\w.]+)/?`", PAGE)) | {"README.md"}
    assert names - named == set()
    assert {
        name for name in re.findall(r"python examples/([\w./]+)", PAGE) if not (EXAMPLES / name).exists()
    } == set()


def test_its_links_lead_somewhere() -> None:
    wrong = [target for target in re.findall(r"\]\(([^)#]+)", PAGE) if not (EXAMPLES / target).exists()]
    assert wrong == []
