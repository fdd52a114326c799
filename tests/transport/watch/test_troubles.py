"""Troubles of real processes, and the one sentence that an observer says of each."""

import asyncio
import os
import re
import signal
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import shmbridge
from shmbridge.cli import main
from shmbridge.segments import lane_names
from shmbridge.testing import wait_until
from shmbridge.watch import diagnosis, snapshot, text
from shmbridge.watch.diagnosis import Severity, findings, headline, lane_rows
from shmbridge.watch.snapshot import State, look
from shmbridge.watch.text import block, cells, of_look

sys.path.insert(0, str(Path(__file__).parents[1] / "tui"))
from looks import bridge_look
from looks import consumer as consumer_look
from looks import lane as lane_look

from shmbridge.segments import control_name

GROUP = "{'tokens': [[1, 2, 3]], 'scores': [0.5]}"
SMALL = {"tokens": [[1, 2, 3]]}
ENVIRONMENT = f"""
import shmbridge, sys, time
producer = shmbridge.Producer(bridge, env_name=NAME, lane_bytes="64K")
producer.put({GROUP})
print("ready", flush=True)
for line in sys.stdin:
    producer.put({GROUP}, timeout_s=60)
"""
LEARNER = """
import shmbridge, sys
consumer = shmbridge.Consumer(bridge)
print("ready", flush=True)
STEP
sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """A wait of a fifth of a second is already long."""
    monkeypatch.setattr(diagnosis, "LONG_S", 0.2)


@pytest.fixture
def environment(child):
    return lambda name: child(ENVIRONMENT.replace("NAME", repr(name)))


@pytest.fixture
def learner(child):
    """A learner in a process of its own; `step` is what it runs before it rests."""
    return lambda step="": child(LEARNER.replace("STEP", step))


def says(bridge, pattern):
    """Waits until the headline matches; then `inspect` shows it, too."""
    last = []

    def matches():
        last[:] = [look(bridge)]
        return re.search(pattern, str(headline(last[0])))

    try:
        wait_until(matches, 20)
    except AssertionError:
        raise AssertionError(f"{str(headline(last[0]))!r} does not match {pattern!r}") from None
    said = str(headline(last[0]))
    assert shown_by_inspect(last[0]) == said
    return said


def shown_by_inspect(now, before=None):
    """The line under the bridge's name."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(text, "look", lambda _: now)
        [info] = [each for each in shmbridge.list_bridges() if each.name == now.name]
        return text.block(info, before, every_lane=False).splitlines()[1].strip()


def shown_by_top(now, before):
    """The line on top of the screen."""
    pytest.importorskip("textual")
    from shmbridge.watch.top import Top

    async def first_line():
        looks = iter([before, now])
        app = Top(now.name, interval_s=3600, source=SimpleNamespace(look=lambda _: next(looks)))
        async with app.run_test(size=(80, 24)):
            app.action_look()
            return str(app.query_one("#said").content).splitlines()[0]

    return asyncio.run(first_line())


def test_no_consumer_and_a_healthy_run(bridge, make_producer, make_consumer):
    make_producer().put(SMALL)
    says(bridge, r"^no consumer: 1 record waits, and 1 environment lives -> start a learner")
    make_consumer().get(10).release()
    says(bridge, r"^healthy: 1 environment, 0 records held$")


def test_a_stopped_environment(bridge, environment, learner):
    stopped = environment("gsm8k")
    environment("code")
    learner("next(iter(consumer.batches(groups=9)))")
    os.kill(stopped.pid, signal.SIGSTOP)
    said = says(
        bridge,
        r"^the learner waits for environments \([\d.]+ s\): 1 of 2 is stopped: gsm8k \(pid \d+, last put",
    )
    assert said.endswith(f"-> kill -CONT {stopped.pid}")
    os.kill(stopped.pid, signal.SIGCONT)
    says(bridge, r"the slowest of 2")


def test_an_environment_that_is_stopped_while_its_put_waits_for_room(bridge, environment, learner):
    """It waits for nobody: continued, it would find room."""
    stopped, waiting = environment("gsm8k"), environment("code")
    learner("batch = next(consumer.batches(groups=1))")
    for each in (stopped, waiting):
        each.stdin.write("\n" * 2000)
        each.stdin.flush()
    says(bridge, r"^environments wait for the learner: 2 of 2 have no room")
    os.kill(stopped.pid, signal.SIGSTOP)
    said = says(bridge, r"^1 of 2 is stopped: gsm8k \(pid \d+, last put")
    assert said.endswith(f"-> kill -CONT {stopped.pid}")
    now = look(bridge)
    assert "environments wait for the learner: 1 of 1 has no room" in str(findings(now)[1])
    assert [lane.blocked_s is None for lane in now.lanes] == [False, True]  # code, gsm8k
    os.kill(waiting.pid, signal.SIGSTOP)
    says(bridge, r"^2 of 2 are stopped: code \(pid \d+, last put .*, gsm8k")
    assert not any("wait for the learner" in str(each) for each in findings(look(bridge)))


def test_no_environment(bridge, environment, learner):
    learner("[consumer.get() for _ in range(3)]")
    says(bridge, r"^the learner waits for environments \([\d.]+ s\): no producer has ever come -> start env")
    ended = environment("short")
    ended.stdin.close()
    ended.wait()
    says(bridge, r"^the learner waits for environments .*: no producer is alive any more -> start env")


def test_a_learner_that_waits_for_those_that_it_pauses(bridge, environment, learner):
    environment("a")
    learner("consumer.get().release(); consumer.pause(); consumer.get()")
    says(bridge, r"^the learner waits .*: they are paused by the consumer -> Consumer\.resume\(\)$")


def test_a_learner_that_reads_none_of_the_lanes():
    lanes = [lane_look("code", 1, read=False), lane_look("math", 2, read=False)]
    now = bridge_look(lanes, consumer=consumer_look(State.RUNNING, None, 40.0))
    assert str(headline(now)).endswith("the consumer does not read any of 2 lanes -> its log says why")


def test_a_stopped_learner(bridge, environment, learner):
    environment("a")
    stopped = learner("batch = next(consumer.batches(groups=1))")
    wait_until(lambda: look(bridge).consumer.handed_age_s is not None)
    os.kill(stopped.pid, signal.SIGSTOP)
    says(bridge, rf"^the learner is stopped \(pid {stopped.pid}\); its last batch is .* -> kill -CONT")


@pytest.mark.parametrize(
    "ask",
    [
        lambda consumer, limit: consumer.batches(groups=9, max_staleness=limit),
        lambda consumer, limit: consumer.serve_ranks(world_size=1, groups=9, max_staleness=limit),
        lambda consumer, limit: consumer.take_groups(groups=9, max_staleness=limit),
    ],
)
def test_records_that_are_too_old_for_the_limit_of_the_batches(bridge, make_producer, make_consumer, ask):
    consumer, limit = make_consumer(), 2
    ask(consumer, limit)
    assert look(bridge).consumer.max_staleness == limit
    consumer.publish_policy_version(limit + 1)
    producer = make_producer(env_name="math")
    producer.put(SMALL, policy_version=1)
    says(bridge, r"^healthy: 1 environment")
    producer.put(SMALL, policy_version=0)
    said = says(
        bridge, r"^1 of 1 environments is up to 3 versions behind, and max_staleness is 2: math \(pid "
    )
    assert said.endswith(
        "-> let fewer groups wait: --tickets of the environments, or smaller lanes; or raise max_staleness"
    )


def test_without_a_limit_eight_versions_are_too_many(bridge, make_producer, make_consumer):
    consumer = make_consumer()
    for version in (0, 3):
        make_producer(env_name=f"env{version}").put(SMALL, policy_version=version)
    consumer.publish_policy_version(8)
    says(bridge, r"^healthy: 2 environments")
    consumer.publish_policy_version(9)
    says(bridge, r"^1 of 2 environments is up to 9 versions behind, and no max_staleness is set: env0 \(")
    consumer.publish_policy_version(83)
    said = says(bridge, r"^2 of 2 environments are up to 83 versions behind, .*: env0 \(.*, env3 \(")
    assert said.endswith("--tickets of the environments, or smaller lanes; set max_staleness")


def test_what_was_trained_in_time_is_not_too_old(bridge, make_producer, make_consumer):
    """After each step all that was put before is a version behind."""
    consumer, producer = make_consumer(), make_producer()
    batches = consumer.batches(groups=1, max_staleness=0, prefetch=0)
    consumer.publish_policy_version(0)
    producer.put(SMALL, policy_version=0)
    held = next(batches)
    consumer.publish_policy_version(1)
    says(bridge, r"^healthy")
    held.release()
    says(bridge, r"^healthy: 1 environment, 0 records held")
    consumer.publish_policy_version(2)
    says(bridge, r"^1 of 1 environments is up to 2 versions behind")


def test_a_full_lane_and_whether_slots_or_bytes_are_its_limit(bridge, make_producer, make_consumer):
    make_consumer()
    slots, roomy = make_producer(env_name="slots"), make_producer(env_name="roomy")
    for _ in range(60):
        slots.put(SMALL)
        roomy.put(SMALL)
    says(bridge, r"^healthy: 2 environments")
    slots.put(SMALL)
    said = says(bridge, r"^1 of 2 lanes is full of slots \(slots 95%, bytes \d\d?%\): slots \(pid")
    assert said.endswith("-> make the learner's step quicker; a larger lane_bytes has more of both")


def test_a_lane_that_is_full_of_bytes(bridge, make_producer, make_consumer):
    make_consumer()
    producer = make_producer(env_name="long", on_full="raise")
    with pytest.raises(shmbridge.LaneFull):
        while True:
            producer.put({"tokens": [np.zeros(500, np.int32)]})
    says(bridge, r"^1 of 1 lane is full of bytes \(slots \d\d%, bytes \d+%\): long \(pid")
    [lane] = look(bridge).lanes
    assert lane.fill_bytes > 0.95 > lane.fill_slots


def test_a_full_mount(bridge, make_producer, make_consumer, monkeypatch):
    make_consumer()
    make_producer()
    monkeypatch.setattr(snapshot, "_mount", lambda: (12 << 10, 1 << 30))
    says(bridge, r"^shared memory is full: 12 KiB free of 1 GiB -> shmbridge clean")


def test_more_environments_than_lanes(bridge, make_producer, make_consumer):
    consumer = make_consumer(lanes=2)
    for number in range(3):
        make_producer(env_name=f"env{number}").put(SMALL)
    consumer.poll()
    says(bridge, r"^1 of 3 environments waits for a lane: the consumer reads 2 at once -> .* --lanes")


def test_findings_come_worst_first(bridge, environment, learner):
    environment("a")
    holder = learner("consumer.get(10).release(); consumer.pause()")
    wait_until(lambda: look(bridge).consumer.paused)
    os.kill(holder.pid, signal.SIGSTOP)
    wait_until(lambda: len(findings(look(bridge))) == 2)
    assert [each.severity for each in findings(look(bridge))] == [Severity.TROUBLE, Severity.NOTE]


def test_a_look_is_of_what_producers_and_consumer_did(bridge, make_producer, make_consumer):
    consumer, producer = make_consumer(), make_producer(env_name="math")
    consumer.publish_policy_version(7)
    before = look(bridge)
    for _ in range(3):
        producer.put({"tokens": [[1, 2, 3]], "scores": [0.5]}, policy_version=6)
    held = consumer.get(5)
    now = look(bridge)
    [lane] = now.lanes
    assert (now.policy_version, lane.newest_version, now.held) == (7, 6, 3)
    assert (lane.records, lane.tokens, lane.held, lane.env_name, lane.pid) == (3, 9, 3, "math", os.getpid())
    assert 0 <= lane.newest_age_s <= lane.oldest_age_s < 60
    assert 0 <= now.published_age_s < 60
    assert diagnosis.rate(now, before, lane) == pytest.approx(3 / (now.at_s - before.at_s))
    held.release()
    assert look(bridge).held == 2
    assert lane.dropped == {"full": 0, "cancelled": 0, "invalid": 0, "timeout": 0}


def test_who_was_waited_for_between_two_looks(bridge, environment, learner):
    environment("slow")
    learner("next(iter(consumer.batches(groups=9)))")
    says(bridge, r"^the learner waits for environments")
    before = look(bridge)
    wait_until(lambda: look(bridge).at_s > before.at_s + 0.2)
    shares = diagnosis.waited_for(look(bridge), before)
    assert shares["environments"] > 0.9
    assert (shares["learner"], shares["tap"]) == (0.0, 0.0)
    [info] = [each for each in shmbridge.list_bridges() if each.name == bridge]
    assert "waited for, of the time: environments" in block(info, before, every_lane=False)
    assert diagnosis.waited_for(look(bridge), None) is None


def test_the_side_that_is_waited_for_most_of_the_time(bridge, environment, learner, monkeypatch):
    """Neither wait is long by itself, as in a run with short steps."""
    monkeypatch.setattr(diagnosis, "LONG_S", 60.0)
    slow = environment("slow")
    learner("batch = next(consumer.batches(groups=1)); consumer.get()")
    wait_until(lambda: look(bridge).consumer and look(bridge).consumer.asking_s)
    said = same_everywhere(bridge)
    assert re.match(
        r"the environments are the slow side: the learner waited (9\d|100)% of [\d.]+ s; the slowest of 1, ",
        said,
    )
    slow.stdin.write("\n" * 2000)
    slow.stdin.flush()
    wait_until(lambda: look(bridge).lanes[0].blocked_s)
    said = same_everywhere(bridge)
    assert re.match(r"the learner is the slow side: environments waited for room (9\d|100)% of ", said)
    assert said.endswith("-> make its step quicker; more environments do not help")


def same_everywhere(bridge):
    """Returns the headline over half a second, which all that watch show."""
    before = look(bridge)
    wait_until(lambda: look(bridge).at_s > before.at_s + 0.5)
    now = look(bridge)
    said = str(headline(now, before))
    assert said == of_look(now, before)["headline"] == shown_by_inspect(now, before)
    assert said == shown_by_top(now, before)
    first = of_look(now, before)["findings"][0]
    assert said == f"{first['text']} -> {first['action']}"
    return said


@pytest.mark.parametrize(
    ("shares", "said"),
    [
        (
            {"batch_wait_s": 5.1},
            "the environments are the slow side: the learner waited 51% of 10 s; the slow",
        ),
        ({"batch_wait_s": 5.0}, "healthy: 2 environments, 0.0 records/s, 6 records held"),
        (
            {"tap_wait_s": 6.0},
            "the recording is the slow side: the learner waited for it 60% of 10 s -> reco",
        ),
        ({"batch_wait_s": 9.0, "draining": True}, "the bridge drains: it takes no new records"),
    ],
)
def test_most_of_the_time_is_more_than_half(shares, said):
    lanes = [lane_look("code", 1), lane_look("math", 2)]
    before = consumer_look(State.RUNNING, 1.0, None)
    now = bridge_look(lanes, at_s=1010.0, consumer=replace(before, **shares))
    assert str(headline(now, bridge_look(lanes, consumer=before))).startswith(said)


def test_many_short_waits_for_room_are_most_of_the_time():
    """The one under way is only the last of them."""
    before, now = (
        bridge_look([lane_look("a", 1, wait_s=waited_s, blocked_s=blocked_s)], at_s=1000.0 + waited_s / 0.9)
        for waited_s, blocked_s in ((0.0, 0.1), (9.0, 0.1))
    )
    assert str(headline(now, before)).startswith(
        "the learner is the slow side: environments waited for room 90% "
    )
    assert [row.wait for row in lane_rows(now, before)] == [0.9]


def test_shares_of_the_time_are_of_some_time_also_without_lanes(bridge, make_consumer, capsys, monkeypatch):
    monkeypatch.setattr(diagnosis, "LONG_S", 60.0)
    consumer = make_consumer()
    with consumer.one_wait():
        assert main(["inspect", bridge, "--seconds", "0.2"]) == 0
    assert re.search(
        r"the learner waited \d+% of 0\.[2-9] s; no producer has ever come", capsys.readouterr().out
    )


def test_a_stopped_environment_takes_no_part_in_who_is_waited_for():
    """Two wait for room all the time; of two that are stopped it is not known."""
    names = [("a", State.RUNNING), ("b", State.RUNNING), ("c", State.STOPPED), ("d", State.STOPPED)]
    before, now = (
        bridge_look(
            [
                lane_look(name, number, state=state, wait_s=since_s * (state is State.RUNNING))
                for number, (name, state) in enumerate(names)
            ],
            at_s=1000.0 + since_s,
        )
        for since_s in (0.0, 10.0)
    )
    assert diagnosis.waited_for(now, before)["learner"] == 1.0


def test_looking_disturbs_nobody(bridge, make_producer, make_consumer):
    """An observer neither holds a lane that is gone, nor takes anything."""
    make_consumer()
    producer = make_producer()
    producer.put({"tokens": [[1]]})
    kept = look(bridge)
    producer.close()
    assert kept.lanes[0].records == 1
    assert look(bridge).held == 1
    assert shmbridge.clean(bridge).kept


@pytest.fixture
def overwritten():
    """Writes bytes into a segment for as long as the test runs."""
    before = []

    def write(name, at, data):
        with open(f"/dev/shm{name}", "r+b") as file:
            file.seek(at)
            before.append((name, at, file.read(len(data))))
            file.seek(at)
            file.write(data)

    yield write
    for name, at, data in before:
        with open(f"/dev/shm{name}", "r+b") as file:
            file.seek(at)
            file.write(data)


def test_a_lane_of_another_layout_is_named_not_left_out(bridge, make_producer, make_consumer, overwritten):
    make_consumer()
    make_producer(env_name="math")
    (name,) = lane_names(bridge)
    overwritten(name, 8, b"\x63")
    said = says(bridge, r"^1 segment cannot be read from here: /shmbridge\.")
    assert said.endswith(
        f"{name}, layout version 99, this build has 2 -> install one version of shmbridge everywhere"
    )
    assert of_look(look(bridge))["unreadable"] == {name: "layout version 99, this build has 2"}


def test_a_lane_of_garbage_is_named(bridge, make_producer, make_consumer, overwritten):
    make_consumer()
    make_producer(env_name="math")
    overwritten(lane_names(bridge)[0], 0, b"nonsense")
    says(bridge, r"cannot be read from here: /shmbridge.*not a lane -> look for what writes into its memory")


def test_a_consumer_that_cannot_be_seen_is_not_gone(bridge, make_producer, make_consumer, overwritten):
    make_consumer()
    make_producer()
    overwritten(control_name(bridge), 8, b"\x63")
    said = says(bridge, r"^1 segment cannot be read from here: .*layout version 99")
    assert "no consumer" not in said
    [info] = [each for each in shmbridge.list_bridges() if each.name == bridge]
    assert "consumer not known" in block(info, None, every_lane=False)


def test_one_quarantined_lane_is_one():
    [first, *_] = findings(bridge_look([lane_look("math", 5, quarantined=True)]))
    assert first.text.startswith("1 lane is quarantined, memory was overwritten: math (pid 5")


def test_the_slowest_is_not_the_one_that_puts_now():
    now = bridge_look(
        [lane_look("quick", 1, newest_age_s=0.0), lane_look("slow", 2, newest_age_s=40.0)],
        consumer=consumer_look(State.RUNNING, 50.0, 40.0),
    )
    assert "the slowest of 2, slow, put last 40 s ago" in str(headline(now))


def test_a_table_is_80_columns_wide_whatever_the_names(bridge, make_producer, make_consumer):
    make_consumer()
    for name in (
        "漢字環境名前テスト環境とても長い名前です",
        "e\u0301" * 60,
        "🎉" * 20,
        "\x1b[31mred",
        "x" * 100,
    ):
        make_producer(env_name=name).put({"tokens": [[1]]})
    [info] = [each for each in shmbridge.list_bridges() if each.name == bridge]
    lines = block(info, look(bridge), every_lane=True).splitlines()
    table = lines[[line.split()[:1] for line in lines].index(["environment"]) :]
    assert len(table) == 6
    assert max(map(cells, table)) <= 80
    assert len({cells(line) for line in table[1:]}) == 1


def test_a_long_state_takes_room_of_the_name():
    lanes = [
        lane_look("a" * 40, 4194303, quarantined=True),
        lane_look("b" * 40, 71, read=False),
        lane_look("c", 7),
    ]
    title, quarantined, waits, _ = map(
        text._line, [text._TITLES, *map(text._cells, lane_rows(bridge_look(lanes)))]
    )
    assert {cells(line) for line in (title, quarantined, waits)} == {80}
    assert " 4194303 quarantined " in quarantined
    assert " 71 waits for a lane " in waits
