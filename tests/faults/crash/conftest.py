"""A build with fail-points, children that die on them, and checks of what must be true afterwards."""

import contextlib
import importlib.util
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pytest

import shmbridge
from shmbridge._ext import header
from shmbridge.segments import lane_names, open_mapping
from shmbridge.testing.faults import Fault, FaultyChild
from shmbridge.testing.faults import fault_build as build_with_faults

ROOT = Path(__file__).parents[3]
ROLES = Path(__file__).with_name("roles.py")


@pytest.fixture(scope="session")
def fault_build() -> Path:
    """Folder of a build with fail-points, made again if a source is newer.

    It shares nothing with the in-place extensions.
    """
    return build_with_faults(ROOT, ROOT / "build" / "faults")


@pytest.fixture
def faulty(fault_build: Path, bridge: str) -> Iterator[Callable[..., FaultyChild]]:
    """Starts a child in a role of roles.py, with a fault armed or none; killed at the end of the test."""
    with contextlib.ExitStack() as children:
        yield _starter(ROLES, fault_build, bridge, children)


@pytest.fixture
def actor(fault_build: Path, bridge: str) -> Iterator[Callable[..., FaultyChild]]:
    """As `faulty`, for the roles of takeover_roles.py."""
    with contextlib.ExitStack() as children:
        yield _starter(ROLES.with_name("takeover_roles.py"), fault_build, bridge, children)


def _starter(
    script: Path, build: Path, bridge: str, children: contextlib.ExitStack
) -> Callable[..., FaultyChild]:
    def start(role: str, *arguments: object, fault: Fault | None = None) -> FaultyChild:
        argv = [str(script), role, bridge, *map(str, arguments)]
        return children.enter_context(FaultyChild(argv, build=build, fault=fault))

    return start


@dataclass(frozen=True)
class LaneWords:
    """The words of a lane, whether or not its producer lives."""

    name: str
    committed: int
    head: int
    unreleased: int
    discarded: list[int]


@pytest.fixture
def lane_words(bridge: str) -> Callable[[], dict[str, LaneWords]]:
    """Call it for the words of every lane there is now, by producer."""

    def read() -> dict[str, LaneWords]:
        found = {}
        for name in lane_names(bridge):
            mapping = open_mapping(name, readonly=True)
            info = header.read_lane(mapping)
            words = header.lane_counters(mapping)
            held = header.undelivered(mapping)
            found[_given(info["producer_id"])] = LaneWords(
                name, words["tail"], words["head"], held, words["discarded"]
            )
        return found

    return read


def _given(producer_id: str) -> str:
    given: str = _roles().given(producer_id)
    return given


def _roles() -> ModuleType:
    spec = importlib.util.spec_from_file_location("shmbridge_crash_roles", ROLES)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def roles() -> ModuleType:
    """roles.py itself: pattern() and check()."""
    return _roles()


@pytest.fixture
def take(roles: ModuleType) -> Callable[..., dict[str, list[tuple[int, bool]]]]:
    """Takes, checks and releases records until each producer has given what is wanted: producer ->
    [(sequence, redelivered)].

    No other record may come, then or afterwards.
    """

    def take_all(
        consumer: shmbridge.Consumer, wanted: dict[str, int], timeout_s: float = 10.0
    ) -> dict[str, list[tuple[int, bool]]]:
        taken: dict[str, list[tuple[int, bool]]] = {producer: [] for producer in wanted}
        while any(len(taken[producer]) < count for producer, count in wanted.items()):
            with consumer.get(timeout_s) as record:
                taken[roles.given(record.meta.producer_id)].append(
                    (roles.check(record), record.meta.redelivered)
                )
        late = consumer.poll()
        assert not late, (
            f"nobody has put these: {[(each.meta.producer_id, each.meta.sequence) for each in late]}"
        )
        return taken

    return take_all


def fresh(*sequences: int) -> list[tuple[int, bool]]:
    return [(sequence, False) for sequence in sequences]


def again(*sequences: int) -> list[tuple[int, bool]]:
    return [(sequence, True) for sequence in sequences]
