"""Every Python block of docs/how-to/record-and-replay.md runs, in order; its commands are ours."""

import re
from pathlib import Path

import pytest
from own_bridges import clean_own_bridges, with_own_bridges

import shmbridge
from shmbridge.cli import main

PAGE = Path(__file__).parents[3] / "docs/how-to/record-and-replay.md"
REFERENCE = Path(__file__).parents[3] / "docs/reference/archive.md"


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE.read_text(), re.DOTALL)


def test_the_examples_run_as_written(tmp_path, monkeypatch):
    for package in ("datasets", "duckdb", "polars"):
        pytest.importorskip(package)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    names: dict[str, object] = {}
    try:
        for block in blocks("python"):
            exec(compile(with_own_bridges(block), str(PAGE), "exec"), names)
    finally:
        names.clear()
        clean_own_bridges()
    assert [path.suffix for path in (tmp_path / "records").glob("part-*")] == [".parquet"]


def test_the_commands_have_these_options(capsys):
    commands = re.findall(r"^shmbridge (\w+)(.*)$", PAGE.read_text(), re.MULTILINE)
    assert {name for name, _ in commands} == {"record", "replay", "export"}
    for name, options in commands:
        with pytest.raises(SystemExit):
            main([name, "--help"])
        known = capsys.readouterr().out
        assert all(option in known for option in re.findall(r"--[\w-]+", options.split("#")[0]))


def test_the_reference_has_every_column():
    from shmbridge.archive.format import OF_RECORD

    rows = re.findall(r"^\| (`.*?`) \|", REFERENCE.read_text(), re.MULTILINE)
    assert re.findall(r"`(\w+)`", " ".join(rows)) == list(OF_RECORD)
    assert not OF_RECORD.keys() & set(shmbridge.TRAJECTORY_SCHEMA.names)
