"""All are killed at once, many start at once, many sweep: committed records wait for the next consumer,
nothing live is touched.
"""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import shmbridge
from shmbridge.segments import MOUNT, control_name, lane_names, membership, still_named, weights_name
from shmbridge.testing import wait_until
from shmbridge.testing.faults import FaultyChild

ROOT = str(Path(shmbridge.__file__).parents[1])
COUNT = 10  # a lane has room for four records


def clean_command(bridge: str, *options: str) -> tuple[int, list[str]]:
    """`shmbridge clean`: exit code and lines."""
    done = subprocess.run(
        [sys.executable, "-m", "shmbridge.cli", "clean", bridge, *options],
        env={**os.environ, "PYTHONPATH": ROOT},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert not done.stderr, done.stderr
    return done.returncode, done.stdout.splitlines()


@pytest.fixture
def orphan(faulty):
    """A child that its producer forked and that will outlive it: the producer, already killed, put two
    records.
    """
    parent = faulty("produce_and_fork", "parent", "fork")
    while not (line := parent.line()).startswith("child "):
        pass
    pid = int(line.split()[1])
    parent.kill()
    yield pid
    os.kill(pid, signal.SIGKILL)


@pytest.fixture
def wreck(faulty, actor, orphan, lane_words):
    """Producers, the learner they fed and a writer of weights, killed at once: returns, by producer, its
    lane's last words and the released records.
    """
    producers = [faulty("produce", f"p{number}", COUNT) for number in range(5)]
    learner = actor("learn", 2, "step", 1)
    weights = faulty("write_weights", 1, 2)
    weights.until("done")
    for producer in producers:
        producer.until("ready")
    batches = []
    for turn in range(5):
        if turn:
            learner.tell()
        while not (line := learner.line()).startswith("batch "):
            pass
        batches += line.split()[1:] if turn < 4 else []
    for each in [learner, weights, *producers]:
        each.process.send_signal(signal.SIGKILL)
    for each in [learner, weights, *producers]:
        each.kill()
    released: dict[str, list[int]] = {"parent": []}
    for producer, sequence, _ in (record.split("/") for record in batches):
        released.setdefault(producer, []).append(int(sequence))
    # without the parent's lane, if both of its records were released in time for the learner to remove it
    words = lane_words()
    assert set(words) | {"parent"} == {"parent", *(f"p{number}" for number in range(5))}
    assert "parent" in words or len(released["parent"]) == 2
    for name, lane in words.items():
        assert lane.unreleased == lane.committed - len(released.get(name, []))
    return words, released


def test_the_next_consumer_gets_what_was_committed_and_not_released(
    wreck, orphan, make_consumer, make_producer, take, segments
):
    """The sweep comes after that, also where a child of a dead producer lives on. A producer that starts
    earlier removes nothing.
    """
    words, released = wreck
    make_producer(producer_id="early").close()
    consumer = make_consumer()
    due = {
        name: [
            (sequence, sequence < lane.head)
            for sequence in range(lane.committed)
            if sequence not in released.get(name, [])
        ]
        for name, lane in words.items()
    }
    assert take(consumer, {name: len(records) for name, records in due.items()}) == due
    stats = consumer.stats()
    assert stats["held"] == stats["discarded_total"] == stats["lanes_live"] == 0
    os.kill(orphan, 0)
    consumer.close()
    assert segments() == []


def test_clean_shows_and_then_removes(bridge, wreck, orphan, make_consumer, segments):
    words, _ = wreck
    before = segments()
    code, lines = clean_command(bridge)
    shown = [
        f"{lane.name} with {lane.unreleased} undelivered records"
        for lane in words.values()
        if lane.unreleased
    ]
    others = [
        control_name(bridge),
        weights_name(bridge),
        *(lane.name for lane in words.values() if not lane.unreleased),
    ]
    assert code == 0
    assert sorted(lines[:-1]) == sorted(f"would remove {name}" for name in shown + others)
    assert lines[-1] == f"nothing was touched -> shmbridge clean {bridge} --yes"
    assert segments() == before

    code, lines = clean_command(bridge, "--yes")
    assert code == 0
    assert sorted(lines) == sorted(f"removed {name}" for name in shown + others)
    assert segments() == []
    os.kill(orphan, 0)
    assert make_consumer().poll() == []


def test_clean_leaves_a_living_consumer_what_it_has_not_had_yet(
    bridge, faulty, make_consumer, take, segments, until
):
    """Records of dead and closed producers are still for this consumer, adopted or not; once it is gone clean
    may remove them.
    """
    consumer = make_consumer(lanes=1)
    for name in ("first", "second"):
        assert faulty("produce", name, 2).end() == 0
    with consumer.get(10) as held:
        code, lines = clean_command(bridge, "--yes")
        assert code == 4
        assert all(line.startswith("kept ") for line in lines), lines
        assert held.meta.sequence == 0
    rest = []
    for _ in range(3):  # the second lane's turn comes when the first is done with
        with consumer.get(10) as record:
            rest.append((record.meta.producer_id, record.meta.sequence))
    assert len(set(rest)) == 3, rest
    consumer.close()
    assert segments() == []


def test_clean_tells_whose_records_wait_once_the_consumer_is_gone(bridge, faulty, make_consumer):
    make_consumer().close()
    assert faulty("produce", "left", 2).end() == 0
    (name,) = lane_names(bridge)
    assert f"removed {name} with 2 undelivered records" in clean_command(bridge, "--yes")[1]


@pytest.mark.parametrize("end", ["producer", "consumer"])
def test_a_bridge_swept_between_open_and_lock_is_entered_again(
    end, bridge, make_producer, make_consumer, monkeypatch
):
    """The window is too narrow for the races below, so here a sweeper comes exactly then, once."""
    opened = membership.open_segment
    swept = []

    def open_and_lose(name: str, flags: int = 0) -> int:
        file = opened(name, flags)
        if name == control_name(bridge) and not swept:
            swept.append(name)
            (MOUNT / name[1:]).unlink()
        return file

    monkeypatch.setattr(membership, "open_segment", open_and_lose)
    first = (make_producer if end == "producer" else make_consumer)()
    assert swept
    words = first._control if end == "producer" else first._state.words
    assert still_named(words.mapping.fd, control_name(bridge)), (
        "it takes part in a bridge nobody else can find"
    )


needs_namespaces = pytest.mark.skipif(
    shutil.which("unshare") is None
    or subprocess.run(["unshare", "-pf", "--mount-proc", "true"], capture_output=True).returncode != 0,
    reason="no pid namespaces available",
)


def elsewhere(fault_build, role: str, *arguments: str) -> "subprocess.Popen[str]":
    """A role in a pid namespace of its own, where it is pid 1: it dies with `unshare`."""
    script = Path(__file__).with_name("takeover_roles.py" if role == "look" else "roles.py")
    return subprocess.Popen(
        ["unshare", "-pf", "--mount-proc", "--kill-child", sys.executable, str(script), role, *arguments],
        env={**os.environ, "PYTHONPATH": str(fault_build)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd="/",
    )


@needs_namespaces
def test_nothing_live_is_touched_across_pid_namespaces(
    bridge, fault_build, make_producer, make_consumer, roles, segments
):
    """Pids mean nothing in the other namespace, where ours do not exist: the locks show who lives."""
    producer = make_producer(producer_id="here", on_full="raise")
    consumer = make_consumer()
    producer.put(roles.pattern("here", 0), group_id=0)
    before = segments()
    with elsewhere(fault_build, "look", bridge) as there:
        said = there.stdout.read().splitlines()
    assert said == ["sees 1 True", "removed 0"]
    assert segments() == before
    with consumer.get(5) as record:
        roles.check(record)


@needs_namespaces
def test_a_death_in_another_pid_namespace_is_noticed(
    bridge, fault_build, make_consumer, take, segments, until
):
    consumer = make_consumer()
    with elsewhere(fault_build, "produce_when_told", bridge, "there") as there:
        assert there.stdout.readline() == "ready\n"
        until(lambda: consumer.stats()["lanes_live"] == 1)
        there.stdin.write("\n")
        there.stdin.flush()
        assert there.stdout.readline() == "put 0\n"
        assert shmbridge.clean(bridge, dry_run=False).removed == []
        assert consumer.stats()["lanes_live"] == 1
        there.kill()
    until(lambda: consumer.stats()["lanes_live"] == 0, 5.0)  # half a second, on a machine of its own
    assert take(consumer, {"there": 1}) == {"there": [(0, False)]}
    consumer.close()
    assert segments() == []


class Race:
    """The output of a nursery's starters so far."""

    def __init__(self, nursery: FaultyChild) -> None:
        self.nursery = nursery
        self.hubs: list[int] = []
        self.epochs: list[int] = []
        self.dead: set[int] = set()
        self.lanes: dict[int, str] = {}  # of the producers that have put everything
        self.got: dict[int, list[tuple[int, bool]]] = {}

    def hear_until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            word, number, *rest = self.nursery.line().split()
            if word == "hub":
                # the previous one is dead, or there are two
                wait_until(lambda: not any(map(alive, self.hubs)), 10.0)
                self.hubs.append(int(rest[0]))
                self.epochs.append(int(rest[1]))
            elif word == "delivered":
                self.lanes[int(number)] = rest[1]
            elif word == "got":
                self.got.setdefault(int(number), []).append((int(rest[0]), rest[1] == "True"))
            else:
                assert word == "ended", f"{word} {number} {rest}"
                assert int(rest[1]) == -signal.SIGKILL, f"starter {number} ended with {rest}"
                self.dead.add(int(number))

    @property
    def living(self) -> list[int]:
        """Producers; those with an odd number are."""
        return [number for number in range(1, 20, 2) if number not in self.dead]

    def everything_came(self) -> bool:
        """Whether every group of the living producers came to a living consumer."""
        came = all(
            number in self.lanes and len({each[0] for each in self.got.get(number, [])}) == 3
            for number in self.living
        )
        return came and bool(self.hubs) and alive(self.hubs[-1])


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


@pytest.mark.parametrize("seed", range(4))
def test_twenty_starters_race_and_some_are_killed(seed, actor):
    """One consumer at a time; nothing of a living producer is lost, also over two consumers more that are
    killed.
    """
    race = Race(actor("nursery", seed))
    for _ in range(3):
        race.hear_until(race.everything_came)
        gone = [number for number in race.living if not (MOUNT / race.lanes[number][1:]).exists()]
        assert not gone, f"lanes of living producers were removed: {gone}"
        count = len(race.hubs)
        os.kill(race.hubs[-1], signal.SIGKILL)
        race.hear_until(lambda count=count: len(race.hubs) > count)
    assert race.epochs == sorted(set(race.epochs)), "every consumer is a new epoch"
    for number, records in race.got.items():
        fresh = [sequence for sequence, marked in records if not marked]
        assert fresh == sorted(set(fresh)), f"producer {number} gave {records}"
    race.nursery.process.terminate()
    assert race.nursery.end() == 0


def test_sweepers_race_with_all_who_come_and_go(bridge, actor, segments):
    """198 starts and stops of producers, writers and readers of weights, and some of consumers, under four
    that do nothing but clean.
    """
    children = actor("come_and_go", 198, 7)
    put: dict[str, list[int]] = {}
    got: dict[str, list[int]] = {}
    swept, over, told = 0, False, False
    while (line := children.line(60)) != "done":
        assert line is not None, children.said[-5:]
        word, *rest = line.split()
        assert word != "failed", line
        if word == "put":
            put[rest[0]] = list(range(int(rest[1])))
        elif word == "got":
            got.setdefault(rest[0], []).append(int(rest[1]))
        elif word == "swept":
            swept += int(rest[0])
        over |= line == "rounds over"
        if over and not told and sum(map(len, got.values())) >= sum(map(len, put.values())):
            children.tell()
            told = True
    assert children.end() == 0
    assert got == put, "every record once, in order"
    assert swept > 0
    shmbridge.clean(bridge, dry_run=False)
    assert segments() == []
