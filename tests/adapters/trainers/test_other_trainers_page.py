"""The Python of docs/how-to/other-trainers.md runs as written, and its commits are those of the tables."""

import json
import re
from pathlib import Path

import shmbridge

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs/how-to/other-trainers.md").read_text()


def test_the_example_runs_as_written(bridge):
    blocks = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    (block,) = [each for each in blocks if '"other-trainers"' in each]
    exec(compile(block.replace('"other-trainers"', f'"{bridge}"'), "other-trainers.md", "exec"), {})
    assert bridge not in [each.name for each in shmbridge.list_bridges()]


def test_the_commits_are_those_of_the_tables():
    tables = json.loads((Path(__file__).parent / "fields.json").read_text())
    for trainer in ("torchtitan", "prime_rl", "slime"):
        commit = tables[trainer]["commit"][:8]
        assert commit in PAGE
        assert commit in (ROOT / "consumers/record_factories.py").read_text()
