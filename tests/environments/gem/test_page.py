"""The Python of docs/how-to/gem.md runs as written, and its links lead somewhere."""

import re
import shutil
from pathlib import Path

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs/how-to/gem.md"


def test_the_example_runs_as_written(policy_tokenizer, tmp_path, monkeypatch):
    (tmp_path / "runs").mkdir()
    shutil.copytree(policy_tokenizer, tmp_path / "runs" / "tiny")
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    monkeypatch.chdir(tmp_path)
    (block,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    exec(compile(block, str(PAGE), "exec"), {})


def test_its_flags_exist():
    from shmbridge.producers.gem.__main__ import _parser

    flags = set(re.findall(r"`?(--[a-z][a-z-]*)", PAGE.read_text()))
    known = {flag for action in _parser()._actions for flag in action.option_strings}
    assert flags - {"--no-deps", "--check", "--json"} <= known  # of pip, and of shmbridge env
    assert len(flags) > 6
