"""Groups become batches while a signal handler raises: every batch has its size, and every record comes."""

import contextlib
import gc
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest
from interrupts import Stop, raising_at

import shmbridge
from shmbridge.control.messages import Register
from shmbridge.control.server import ControlClient

SIZE = 4
PUT = 3 * SIZE
MODULES = [
    f"shmbridge.{name}"
    for name in ("hub.former", "hub.batches", "hub.fair", "hub.request", "record.groups", "atropos.queue")
]
POLICIES = ("fair", "shares", "oldest", "atropos", "allocations")
# as leases are lost
pytestmark = pytest.mark.filterwarnings(
    "ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"
)


def hub_of(policy: str, make_consumer: Callable[..., shmbridge.Consumer]) -> shmbridge.Consumer:
    run = shmbridge.Run(batch_size=SIZE)
    name = {"shares": "fair", "allocations": "atropos"}.get(policy, policy)
    return make_consumer(policy=name, run=run, allocation_wait_s=0.0)


@pytest.fixture
def environments(bridge, make_producer) -> Callable[..., list["Environment"]]:
    """Call it for two environments, which have requested the weights and shares that the policy uses."""

    def make(policy: str, **options) -> list[Environment]:
        made = [Environment(make_producer(**options)) for _ in range(2)]
        if policy in ("shares", "allocations"):
            with ControlClient(bridge, role="test", name="t") as control:
                for number, each in enumerate(made):
                    asked = {
                        "weight": 1.0 + number,
                        "min_batch_allocation": 0.5,
                        "group_size": 1,
                        "max_token_length": 64,
                    }
                    each.env_id = control.request(
                        Register(desired_name="env", producer_id=each.producer.producer_id, **asked)
                    ).env_id
        return made

    return make


@dataclass
class Environment:
    producer: shmbridge.Producer
    env_id: int | None = None

    def put(self) -> tuple[str, int]:
        """Puts one group, which it names by producer and sequence."""
        group = {"tokens": [[1]]} | ({} if self.env_id is None else {"env_id": self.env_id})
        return self.producer.producer_id, self.producer.put(group, timeout_s=5)


def take(hub: shmbridge.Consumer, **options) -> list | None:
    return hub.take_groups(**({"groups": SIZE} | options))


def firsts(groups: list) -> list[tuple[str, int]]:
    assert len(groups) == SIZE
    return [(record.meta.producer_id, record._sequence) for group in groups for record in group.records]


def let_go(groups: list) -> None:
    for group in groups:
        for record in group.records:
            record.release()


@pytest.mark.timeout(240)
@pytest.mark.parametrize("policy", POLICIES)
def test_an_interrupt_at_any_line_changes_no_batchs_size_and_loses_nothing(
    make_consumer, environments, policy
) -> None:
    """The interrupt comes at each line in turn that runs while a batch is formed, put back and formed once
    more.
    """
    hub = hub_of(policy, make_consumer)
    puts = environments(policy)
    line, came = 0, True
    while came:
        line += 1
        put = Counter(each.put() for each in puts for _ in range(PUT // 2))
        got: Counter[tuple[str, int]] = Counter()
        with raising_at(line, MODULES) as has_come:
            try:
                groups = take(hub)
                hub.put_back(groups)
                groups = take(hub)
            except Stop:
                groups = None
        came = has_come()
        if groups is not None:
            got.update(firsts(groups))
            let_go(groups)
        del groups
        while got.total() < PUT and (groups := take(hub, timeout_s=0.2)) is not None:
            got.update(firsts(groups))
            let_go(groups)
            del groups
        assert got == put, f"interrupted at line {line}"
        assert (
            hub.queue.groups()
            == sum(hub.queue.groups(each.producer.producer_id) for each in puts)
            == hub.stats()["held"]
            == 0
        )
    assert line > 50


class Storm:
    """A signal comes at a random time, and ends a call with Stop."""

    def __init__(self, seed: int, longest_s: float) -> None:
        self._rng, self._longest_s = random.Random(seed), longest_s
        self._armed = False

    def interrupt(self, *_: object) -> None:
        # a destructor swallows what is raised in it
        if self._armed and sys._getframe(1).f_code.co_name != "__del__":
            self._armed = False
            raise Stop

    def over(self, call: Callable[[], object]) -> None:
        try:
            signal.setitimer(signal.ITIMER_REAL, self._rng.uniform(1e-6, self._longest_s))
            self._armed = True
            call()
            self._armed = False
        except Stop:
            pass

    def calm(self) -> None:
        """Makes a call in which nothing is raised."""
        self._armed = False


@contextmanager
def blowing(seed: int, longest_s: float) -> Iterator[Storm]:
    made = Storm(seed, longest_s)
    before, hook = signal.signal(signal.SIGALRM, made.interrupt), sys.unraisablehook
    # pytest's hook keeps exceptions swallowed in destructors, and their frames with groups
    sys.unraisablehook = lambda *_: None
    try:
        yield made
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        sys.unraisablehook = hook


@pytest.mark.timeout(120, method="thread")
@pytest.mark.parametrize("policy", POLICIES)
def test_batches_have_their_size_in_a_storm_of_interrupts(make_consumer, environments, policy) -> None:
    hub = hub_of(policy, make_consumer)
    puts = environments(policy, lane_bytes="1M")
    put: set[tuple[str, int]] = set()
    got: Counter[tuple[str, int]] = Counter()

    def receive(groups: list) -> None:
        got.update(firsts(groups))
        let_go(groups)

    def receive_one() -> None:
        if (groups := take(hub)) is not None:
            storm.calm()
            receive(groups)

    with blowing(seed=1, longest_s=6e-4) as storm:
        until, rounds = time.monotonic() + 2, 0
        while time.monotonic() < until or rounds < 20:
            rounds += 1
            put |= {each.put() for each in puts for _ in range(PUT // 2)}
            for _ in range(PUT // SIZE):
                storm.over(receive_one)
            while (groups := take(hub)) is not None:
                receive(groups)
    gc.collect()
    hub.take_back_dropped()
    while len(got) < len(put):
        groups = take(hub, timeout_s=5)
        assert groups is not None, f"{sorted(put - set(got))} of {len(put)} did not come; {hub.stats()}"
        receive(groups)
    assert set(got) == put
    assert got.total() == len(put), "a record came twice, and none was released before its batch was whole"


@pytest.mark.timeout(120, method="thread")
def test_iterated_batches_have_their_size_in_a_storm_of_interrupts(make_producer, make_consumer) -> None:
    """With prefetch=0 the iterating thread forms the batches."""
    hub, producer = make_consumer(), make_producer(lane_bytes="1M")
    sizes: Counter[int] = Counter()

    def iterate(timeout_s: float) -> None:
        with contextlib.suppress(shmbridge.ConsumerEmpty):
            for batch in hub.batches(groups=SIZE, prefetch=0, timeout_s=timeout_s):
                sizes[len(batch.groups)] += 1
                batch.release()

    with blowing(seed=2, longest_s=3e-3) as storm:
        until = time.monotonic() + 2
        while time.monotonic() < until:
            for _ in range(PUT):
                producer.put({"tokens": [[1]]}, timeout_s=5)
            storm.over(lambda: iterate(0.001))
            hub.take_back_dropped()
            iterate(0)
    assert set(sizes) == {SIZE}
