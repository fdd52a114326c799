"""`shmbridge bench` run as a program, and the page that is made of a run of the suites."""

import json

import pytest

import shmbridge
from shmbridge.bench import machine, report
from shmbridge.bench.contract import Plan
from shmbridge.bench.figures import measure
from shmbridge.bench.groups import Shape
from shmbridge.cli import main

SHORT = ["--seconds", "0.01", "--lengths", "16,32"]


def test_json_has_its_fields(capsys):
    assert main(["bench", "--quick", "--json", "--only", "limit,ring", *SHORT]) == 0
    said = json.loads(capsys.readouterr().out)
    about = {
        "cpu",
        "cores",
        "load_before",
        "kernel",
        "versions",
        "revision",
        "dirty",
        "seed",
        "pinned",
        "lane_bytes",
    }
    assert about <= set(said["machine"])
    assert [(row["contender"], row["form"], row["length"]) for row in said["rows"]] == [
        (name, form, length)
        for length in (16, 32)
        for name, form in (("limit", "arrays"), ("ring", "arrays"), ("ring", "lists"))
    ]
    for row in said["rows"]:
        assert row["groups_per_s"] > 0
        assert row["of_limit"] > 0
        assert row["groups_per_s_range"][0] <= row["groups_per_s"] <= row["groups_per_s_range"][1]


@pytest.mark.parametrize(
    "wrong", [["--only", "foo"], ["--only", ""], ["--plot", "x.xyz"], ["--plot", "/not/there/x.svg"]]
)
def test_wrong_arguments_are_said_before_anything_is_measured(capsys, wrong):
    try:
        code = main(["bench", *wrong])
    except SystemExit as end:
        code = end.code
    said = capsys.readouterr()
    assert code == 2
    assert said.out == ""
    assert "shmbridge bench: error: --" in said.err


def test_a_contender_that_fails_costs_no_other_figures(capsys, monkeypatch):
    from shmbridge.bench.baselines import ring

    def no_room(*_):
        raise shmbridge.ShmTooSmall("no room", hint="a smaller lane")

    monkeypatch.setattr(ring, "Reader", no_room)
    assert main(["bench", "--quick", "--json", "--only", "ring,limit", *SHORT]) == 0
    said = capsys.readouterr()
    assert {row["contender"] for row in json.loads(said.out)["rows"]} == {"limit"}
    assert "shmbridge, 8 x 16 tokens, 2.19 KiB: not measured: [SB101] no room -> a smaller lane" in said.err


def test_a_contender_that_is_not_installed_is_named(capsys, monkeypatch):
    from shmbridge.bench import baselines

    monkeypatch.setattr(baselines, "find_spec", lambda package: None)
    assert main(["bench", "--only", "iceoryx", *SHORT]) == 3
    assert "iceoryx2: not installed -> pip install iceoryx2" in capsys.readouterr().out


def test_a_table_for_people_and_a_picture(capsys, tmp_path):
    pytest.importorskip("matplotlib")
    assert main(["bench", "--quick", "--only", "limit,ring", "--plot", str(tmp_path / "it.svg"), *SHORT]) == 0
    shown = capsys.readouterr().out
    assert "limit (C twin)" in shown
    assert "shmbridge, from lists" in shown
    assert "Throughput by group size" in (tmp_path / "it.svg").read_text()


@pytest.fixture
def ran(tmp_path):
    """A file as pytest-benchmark writes it, with one benchmark of each kind."""
    figures = measure(Plan("ring", Shape(length=16), lane_bytes=1 << 20), seconds=0.01, rounds=2)
    kinds = {
        "test_peers[ring]": ("peers", figures),
        "test_producers[2]": ("producers", figures),
        "test_wake": ("latency", {"samples_us": [float(n) for n in range(1, 2001)]}),
        "test_both": (
            "latency",
            {"label": "asleep", "samples_us": {"get": [3.0, 1.0, 2.0], "eventfd": [2.0]}},
        ),
        "test_http": ("end to end", {"cpu_s_per_million_tokens": 24.0, "tokens_per_s": 60000.0}),
        "test_ways": (
            "ways",
            {"cpu_s_per_million_tokens": {"environment": 0.5, "server": 1.5}}
            | {f"fact_{n}": n for n in range(8)},
        ),
        "test_other": (None, {}),
    }
    benchmarks = [
        {"name": name, "group": group, "extra_info": extra, "stats": {"median": 0.5}}
        for name, (group, extra) in kinds.items()
    ]
    path = tmp_path / "ran.json"
    missing = {"ray_actor": "pip install ray"}
    path.write_text(
        json.dumps(
            {
                "machine_info": machine.about(),
                "datetime": "now",
                "benchmarks": benchmarks,
                "not_installed": missing,
            }
        )
    )
    return path


def test_a_page_has_every_row_and_says_what_is_missing(ran, tmp_path):
    pytest.importorskip("matplotlib")
    written = report.write(ran, tmp_path / "results")
    name = machine.slug()
    kinds = {path.name.removeprefix(name) for path in written}
    assert kinds == {".json", ".md", "-throughput.svg", "-producers.svg", "-latency.svg", "-cpu.svg"}
    page = (tmp_path / "results" / f"{name}.md").read_text()
    assert "## Peers" in page
    assert "| shmbridge | 8 x 16 |" in page
    assert "| test_wake | 2,000 | 1,001 µs |" in page
    assert "| asleep: get | 3 | 2 µs |" in page, "taken in turn, a row each"
    assert "| test_http | 500,000 | 24 | 60,000 |" in page
    assert "| test_other | 500,000 |" in page
    assert "| cpu s per million tokens: server | 1.5 |" in page, "many facts stand below each other"
    assert "Ray actor (pip install ray)" in page
    kept = json.loads((tmp_path / "results" / f"{name}.json").read_text())
    latency, ours, theirs = [row for row in kept["rows"] if row["group"] == "latency"]
    assert (latency["samples"], len(latency["samples_us"])) == (2000, 401)
    assert (ours["samples_us"], theirs["samples_us"]) == ([1.0, 2.0, 3.0], [2.0])
