"""The keys of the live view, and what it says, on looks with fixed numbers."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # for looks

pytest.importorskip("textual")

import looks
from textual.widgets import Static

from shmbridge.errors import RecordUnreadable
from shmbridge.watch.lane_table import LaneList
from shmbridge.watch.top import Top


def view(scene, **options) -> Top:
    """The live view of looks that are given in turn, at the key for a look."""
    return Top(
        options.pop("bridge", "run1"),
        interval_s=3600,
        source=looks.Frozen(scene, options.pop("record", None)),
        **options,
    )


def said(app) -> str:
    return str(app.screen.query_one("#said", Static).content)


def lines(app) -> list[str]:
    """The lines of the table, as on the screen."""
    table = app.query_one(LaneList)
    return [
        table.render_line(y).text.rstrip() for y in range(1, min(len(table._lines) + 1, table.size.height))
    ]


def first_words(app) -> list[str]:
    return [each[2:].split()[0].rstrip("…") for each in lines(app)]


async def test_it_says_what_is_wrong_and_shows_the_lane_first():
    app = view(looks.stopped())
    async with app.run_test(size=(80, 24)) as pilot:
        await pilot.press("space", "space")
        assert said(app).startswith(
            "the learner waits for environments (12 s): 1 of 5 is stopped: gsm8k (pid 71, last put 41 s ago)"
        )
        top, *others = lines(app)
        assert top.startswith("! gsm8k-71")
        assert "stopped 12 s" in top  # seen in the second look, twelve seconds before the third
        assert not any(each.startswith("!") for each in others)


async def test_a_process_stopped_before_the_first_look_is_stopped_for_longer():
    app = view(looks.stopped()[1:])
    async with app.run_test(size=(80, 24)) as pilot:
        assert "stopped " in lines(app)[0]
        assert ">" not in lines(app)[0]
        await pilot.press("space")
        assert "stopped >12 s" in lines(app)[0]


async def test_sums_per_environment_and_over_all():
    app = view(looks.healthy())
    async with app.run_test(size=(80, 24)) as pilot:
        await pilot.press("space")
        assert said(app) == "healthy: 5 environments, 60.0 records/s, 20 records held"
        [math] = [each for each in lines(app) if "math (2)" in each]
        assert "27.0" in math  # 13 and 14 records a second
        assert "running" in math
        summary = str(app.query_one("#summary", Static).content)
        assert summary == "run1: 5 lanes, 5 running  60.0 rec/s  20 held"
        assert "discarded: 60 stale" in str(app.query_one("#facts", Static).content)


async def test_group_and_sort():
    app = view(looks.healthy())
    async with app.run_test(size=(80, 24)) as pilot:
        await pilot.press("space", "g")
        by_name = ["code-70", "code-72", "gsm8k-71", "math-73", "math-74"]
        assert [each[:8].rstrip("-") for each in first_words(app)] == by_name
        await pilot.press("s")  # rec/s, largest first
        assert [each[:8].rstrip("-") for each in first_words(app)] == [
            "math-74",
            "math-73",
            "code-72",
            "gsm8k-71",
            "code-70",
        ]
        await pilot.press("S")
        assert [each[:8].rstrip("-") for each in first_words(app)] == [
            "code-70",
            "gsm8k-71",
            "code-72",
            "math-73",
            "math-74",
        ]


async def test_filter():
    app = view(looks.healthy())
    async with app.run_test(size=(80, 24)) as pilot:
        await pilot.press("slash", *"mat")
        assert [each[:4] for each in first_words(app)] == ["math"] * 3
        await pilot.press("enter", "g")  # the table has the keys again
        assert [each[:4] for each in first_words(app)] == ["math"] * 2
        await pilot.press("escape")
        assert len(lines(app)) == 5


async def test_a_paused_display_stands_still_until_it_is_asked():
    app = view(looks.healthy())
    async with app.run_test(size=(80, 24)) as pilot:
        await pilot.press("p")
        app._tick()
        assert "PAUSED" in str(app.query_one("#summary", Static).content)
        assert said(app) == "healthy: 5 environments, 20 records held"  # the first look has no rates
        await pilot.press("p")
        app._tick()
        assert "60.0 records/s" in said(app)


async def test_a_hundred_lanes_are_sums_and_troubles_until_one_is_opened():
    app = view(looks.hundred())
    async with app.run_test(size=(80, 24)) as pilot:
        await pilot.press("space")
        assert len(lines(app)) == 10  # eight environments; a stopped lane, and one that waits
        assert all(len(each) <= 80 for each in lines(app))
        await pilot.press("enter")
        assert len(app.query_one(LaneList)._lines) == 8 + 13 + 1
        await pilot.press("enter")
        assert len(app.query_one(LaneList)._lines) == 8 + 1  # shut by hand, also what is in trouble
        await pilot.press("g", "end")
        assert lines(app)[-1].strip()


async def test_a_screenful_of_lanes_in_trouble_is_sums():
    lanes = [looks.lane(f"env{number % 4}", number + 10, read=number < 64) for number in range(100)]
    app = view([looks.bridge_look(lanes)])
    async with app.run_test(size=(80, 24)):
        assert "36 of 100 environments wait for a lane" in said(app)
        assert [each.split()[0].removeprefix("!▸") for each in lines(app)] == ["env0", "env1", "env2", "env3"]
        assert "9 in trouble" in lines(app)[0]


async def test_the_selection_stays_with_its_lane():
    record = looks.scored_record()
    app = view(looks.healthy(), record=record)
    async with app.run_test(size=(80, 24)) as pilot:
        await pilot.press("space", "g", "down", "s", "enter")  # code-72, then sorted by rate
        await pilot.press("escape")
        assert app._source.asked == [("run1", "lane-72")]
        assert app._source.rests == 1


async def test_a_lane_without_records_is_waited_for():
    app = view(looks.healthy())
    async with app.run_test(size=(80, 24)) as pilot:
        await pilot.press("g", "enter")
        facts = app.screen.query_one("#facts", Static)
        assert "holds no record now" in str(facts.content)
        app._source.record = looks.scored_record()
        for _ in range(100):
            await pilot.pause(0.05)
            if "record 918" in str(facts.content):
                break
        assert "row 1 of 2" in str(facts.content)
        await pilot.press("right")
        assert "row 2 of 2" in str(facts.content)


async def test_a_record_that_cannot_be_read_is_named():
    class Broken(looks.Copy):
        def __getitem__(self, name):
            raise RecordUnreadable(f"column {name!r} is no list", hint="end that producer: it is broken")

    app = view(looks.healthy(), record=Broken({"tokens": ("int32", [[1]])}))
    async with app.run_test(size=(80, 24)) as pilot:
        await pilot.press("g", "enter")
        assert "column 'tokens' is no list" in str(app.screen.query_one("#facts", Static).content)


async def test_a_bridge_that_ends_and_one_that_never_was():
    app = view([*looks.healthy(), None])
    async with app.run_test(size=(80, 24)) as pilot:
        await pilot.press("space", "space")
        assert said(app) == "the bridge 'run1' is gone; this was its end"
        assert len(lines(app)) == 7
    app = view([None])
    async with app.run_test(size=(80, 24)):
        assert said(app) == "no bridge 'run1'"


async def test_of_several_bridges_one_is_chosen():
    app = view(looks.healthy(), bridge=None)
    async with app.run_test(size=(80, 24)) as pilot:
        await pilot.press("enter")
        assert app.bridge == "run1"
        assert said(app).startswith("healthy")
    app = view(looks.healthy(), bridge=None)
    async with app.run_test(size=(80, 24)) as pilot:
        await pilot.press("q")
    assert app.return_code == 0


async def test_names_are_text_and_never_markup():
    lanes = [looks.lane("[red]x[/red]", 70), looks.lane("a\x1b[2Jb", 71)]
    app = view([looks.bridge_look(lanes)])
    async with app.run_test(size=(120, 24)):
        assert any("[red]x[/red]-70" in each for each in lines(app))
        assert any(r"a\x1b[2Jb-71" in each for each in lines(app))
