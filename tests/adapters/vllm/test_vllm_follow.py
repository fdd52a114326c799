"""vLLM's follower of a bridge, with an engine that records its calls: order of steps, failures, closing."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import numpy as np
import pytest

from shmbridge.consumers.learner.train.publishing import first_version
from shmbridge.consumers.vllm.follow import Follower, follow_settings
from shmbridge.errors import BadBridgeName, BadConfig, NotReady, WeightsMismatch
from shmbridge.weights import WeightsReader, WeightsWriter

UPDATE = ["pause", "load", "empty_caches", "resume"]


class Segment:
    """A weights segment by its newest version alone."""

    def __init__(self, version: int | None = None) -> None:
        self._changed = threading.Condition()
        self._version = version
        self.broken: Exception | None = None
        self.looks = 0
        self.closed = False
        self.held: list[int] = []
        self.not_finite: set[int] = set()

    @property
    def version(self) -> int | None:
        if self.broken:
            raise self.broken
        return self._version

    def publish(self, version: int) -> None:
        with self._changed:
            self._version = version
            self._changed.notify_all()

    def wait(self, after: int | None, timeout_s: float) -> int:
        self.looks += 1
        if self.broken:
            raise self.broken
        with self._changed:
            if not self._changed.wait_for(lambda: self._version not in (None, after), timeout_s):
                raise NotReady("nothing new")
        return self.version

    @contextmanager
    def lease(self, *, timeout_s: float) -> Iterator[SimpleNamespace]:
        if self.version is None:
            raise NotReady("no weights")
        self.held.append(self.version)
        try:
            yield SimpleNamespace(version=self.held[-1], require_finite=self._require_finite)
        finally:
            self.held.pop()

    def _require_finite(self) -> None:
        if self.version in self.not_finite:
            raise WeightsMismatch("values that are not finite")

    def close(self) -> None:
        self.closed = True


class Engine:
    """Notes the steps; fails at those in `fail`, as often as that says."""

    def __init__(self) -> None:
        self.steps: list[str] = []
        self.loaded: list[int] = []
        self.fail: dict[str, int] = {}
        self.alive = True
        self.in_doubt = False
        self.paused = False
        self.slow_s = 0.0
        self.versions_at_resume: list[int | None] = []
        self.follower: Follower | None = None
        self.at_load: Callable[[], object] = lambda: None

    async def is_paused(self) -> bool:
        return self.paused

    async def _step(self, name: str) -> None:
        self.steps.append(name)
        await asyncio.sleep(self.slow_s)
        if self.fail.get(name, 0):
            self.fail[name] -= 1
            raise WeightsMismatch(f"{name} says no")

    async def pause(self) -> None:
        await self._step("pause")
        self.paused = True

    async def load(self, version: int) -> None:
        await self._step("load")
        self.at_load()
        self.loaded.append(version)

    async def empty_caches(self) -> None:
        await self._step("empty_caches")

    async def resume(self) -> None:
        self.versions_at_resume.append(self.follower.version if self.follower else None)
        self.paused = False
        await self._step("resume")


async def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20.0
    while not condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.005)


@pytest.fixture
async def following():
    """Yield a maker of started followers: (segment, engine) -> Follower; all are closed afterwards."""
    started = []

    async def start(segment: Segment, engine: Engine) -> Follower:
        engine.follower = follower = Follower(segment, engine)
        started.append((follower, segment))
        await follower.start()
        return follower

    yield start
    for follower, segment in started:
        await follower.close()
        assert segment.closed


async def test_newest_version_is_there_once_it_has_started(following):
    engine = Engine()
    follower = await following(Segment(7), engine)
    assert (follower.version, engine.steps, engine.loaded) == (7, UPDATE, [7])
    assert (follower.stats().loaded_total, follower.stats().last_update.total_ms > 0) == (1, True)
    assert engine.versions_at_resume == [7], "a token of version 7 could be said to be of the version before"


async def test_a_follower_without_a_segment_starts_and_waits(following):
    segment, engine = Segment(), Engine()
    follower = await following(segment, engine)
    assert follower.version is None
    assert not engine.steps
    segment.publish(0)
    await until(lambda: follower.stats().loaded_total == 1)
    assert follower.version == 0
    assert engine.steps == UPDATE


async def test_segment_that_begins_again_is_followed_down(following):
    segment, engine = Segment(500), Engine()
    follower = await following(segment, engine)
    segment.publish(3)
    await until(lambda: follower.version == 3)


async def test_version_after_a_dead_learner_of_another_model_is_loaded(bridge):
    """It had replaced the segment and published nothing: the next learner's first version has another number,
    and is not passed over.
    """
    engine = Engine()
    with WeightsWriter(bridge) as writer:
        writer.publish(7, [("a", np.zeros(4))])
        engine.follower = follower = Follower(WeightsReader(bridge), engine)
        await follower.start()
    with (
        WeightsWriter(bridge) as other,
        pytest.raises(ZeroDivisionError),
        other.fill(8, [("b", "float32", (4,))]),
    ):
        raise ZeroDivisionError
    with WeightsWriter(bridge) as writer:
        writer.publish(first_version(None, -1, writer.last_version), [("a", np.ones(4))])
        await until(lambda: follower.stats().loaded_total == 2)
    assert engine.loaded == [7, 8]
    await follower.close()


@pytest.mark.parametrize("step", ["pause", "load", "empty_caches"])
async def test_failed_step_leaves_nothing_paused(following, step, monkeypatch):
    monkeypatch.setattr("shmbridge.consumers.vllm.follow._FIRST_RETRY_S", 0.01)
    segment, engine = Segment(1), Engine()
    follower = await following(segment, engine)
    engine.fail[step] = 1
    segment.publish(2)
    await until(lambda: follower.stats().loaded_total == 2)
    assert engine.steps[-1] == "resume"
    assert not engine.paused
    assert follower.stats().failed_total == 1
    assert follower.stats().last_error is None, "the second try went well"


async def test_failure_is_said_once_and_the_old_version_stays(following, monkeypatch, caplog):
    monkeypatch.setattr("shmbridge.consumers.vllm.follow._FIRST_RETRY_S", 0.01)
    caplog.set_level(logging.WARNING, "vllm.shmbridge")
    segment, engine = Segment(1), Engine()
    follower = await following(segment, engine)
    engine.fail["load"] = 3
    segment.publish(2)
    await until(lambda: follower.stats().failed_total == 3)
    tries = engine.steps.count("load")
    looks = segment.looks
    await until(lambda: segment.looks > looks + 1)
    assert engine.steps.count("load") == tries, "a version that fails three times is left alone"
    assert follower.version == 1
    assert "policy version 2 was not loaded" in follower.stats().last_error
    assert "load says no" in follower.stats().last_error
    assert follower.stats().refused_version == 2, "those who wait for it need wait no longer"
    assert (
        [record.message for record in caplog.records].count(caplog.records[0].message)
        == len(caplog.records)
        == 1
    )
    segment.publish(3)
    await until(lambda: follower.stats().loaded_total == 2)
    assert follower.version == 3
    assert follower.stats().last_error is None
    assert follower.stats().refused_version is None


async def test_engine_of_which_a_part_took_a_version_is_of_none_and_forgets_what_it_cached(
    following, monkeypatch
):
    monkeypatch.setattr("shmbridge.consumers.vllm.follow._FIRST_RETRY_S", 0.01)
    segment, engine = Segment(1), Engine()
    follower = await following(segment, engine)
    engine.fail["load"], engine.in_doubt = 3, True
    segment.publish(2)
    await until(lambda: follower.stats().failed_total == 3)
    assert follower.version is None
    assert engine.steps[4:] == UPDATE * 3
    assert engine.versions_at_resume == [1, None, None, None]
    engine.in_doubt = False
    segment.publish(3)
    await until(lambda: follower.version == 3)


async def test_weights_of_another_model_are_said_once_not_with_every_version(following, monkeypatch, caplog):
    monkeypatch.setattr("shmbridge.consumers.vllm.follow._FIRST_RETRY_S", 0.01)
    caplog.set_level(logging.WARNING, "vllm.shmbridge")
    segment, engine = Segment(1), Engine()
    follower = await following(segment, engine)
    engine.fail["load"] = 9
    for version in (2, 3, 4):
        segment.publish(version)
        await until(lambda: follower.stats().failed_total == 3 * (version - 1))  # noqa: B023
        assert f"policy version {version} was not loaded" in follower.stats().last_error
    assert len(caplog.records) == 1
    segment.publish(5)
    await until(lambda: follower.version == 5)
    engine.fail["load"] = 1
    segment.publish(6)
    await until(lambda: follower.version == 6)
    assert len(caplog.records) == 2, "what fails after it went well is said again"


async def test_weights_that_are_not_finite_reach_no_engine(following, monkeypatch):
    """Whose parts would otherwise refuse them one by one; it goes on with its version, and says why."""
    monkeypatch.setattr("shmbridge.consumers.vllm.follow._FIRST_RETRY_S", 0.01)
    segment, engine = Segment(1), Engine()
    segment.not_finite = {2}
    follower = await following(segment, engine)
    segment.publish(2)
    await until(lambda: follower.stats().refused_version == 2)
    assert (follower.version, engine.loaded, engine.paused, segment.held) == (1, [1], False, [])
    assert "policy version 2 was not loaded: " in follower.stats().last_error
    assert "not finite" in follower.stats().last_error
    segment.publish(3)
    await until(lambda: follower.version == 3)
    assert (follower.stats().refused_version, follower.stats().last_error) == (None, None)


async def test_version_that_was_overtaken_is_no_failure(following):
    segment, engine = Segment(1), Engine()
    follower = await following(segment, engine)
    engine.fail["load"] = 1
    engine.slow_s = 0.05
    segment.publish(2)
    await until(lambda: engine.steps.count("load") == 2)
    segment.publish(3)
    await until(lambda: follower.version == 3)
    assert follower.stats().failed_total == 0
    assert engine.loaded == [1, 3]


async def test_the_version_that_is_newest_after_the_pause_is_loaded(following):
    segment, engine = Segment(1), Engine()
    follower = await following(segment, engine)
    engine.slow_s = 0.05
    segment.publish(2)
    await until(lambda: len(engine.steps) > len(UPDATE))
    segment.publish(3)
    await until(lambda: follower.version == 3)
    assert engine.loaded == [1, 3], "nobody waits for a version that is overtaken before it is loaded"


async def test_a_version_stays_in_the_segment_while_it_is_loaded(following):
    """A worker that found a later version there would have to refuse it, since the label is that of the
    version it was told.
    """
    segment, engine = Segment(1), Engine()
    held: list[list[int]] = []
    engine.at_load = lambda: (segment.publish(9), held.append(list(segment.held)))
    follower = await following(segment, engine)
    await until(lambda: follower.version == 9)
    assert held[:2] == [[1], [9]]
    assert engine.loaded[:2] == [1, 9]
    await until(lambda: not segment.held)


async def test_lease_of_a_load_that_fails_or_is_cut_short_ends(following):
    segment, engine = Segment(1), Engine()
    follower = await following(segment, engine)
    engine.slow_s, engine.fail["load"] = 0.2, 1
    segment.publish(2)
    await until(lambda: segment.held)
    await until(lambda: not segment.held)
    await until(lambda: segment.held)  # the second try
    await follower.close()
    assert not segment.held


async def test_engine_that_somebody_paused_stays_paused(following):
    segment, engine = Segment(1), Engine()
    follower = await following(segment, engine)
    engine.paused, engine.steps = True, []
    segment.publish(2)
    await until(lambda: follower.stats().loaded_total == 2)
    assert follower.version == 2
    assert engine.steps == ["load", "empty_caches"]
    assert engine.paused


async def test_broken_segment_is_said_and_followed_again(following, caplog):
    caplog.set_level(logging.WARNING, "vllm.shmbridge")
    segment, engine = Segment(1), Engine()
    follower = await following(segment, engine)
    segment.broken = WeightsMismatch("no table")
    await until(lambda: follower.stats().last_error is not None)
    assert "no table" in follower.stats().last_error
    segment.broken = None
    await until(lambda: follower.stats().last_error is None)
    segment.publish(2)
    await until(lambda: follower.version == 2)
    assert sum("no table" in record.message for record in caplog.records) == 1


async def test_closing_in_the_middle_of_a_load_resumes(following):
    segment, engine = Segment(1), Engine()
    follower = await following(segment, engine)
    engine.slow_s = 0.2
    segment.publish(2)
    await until(lambda: engine.steps[len(UPDATE) :] == ["pause", "load"])
    await follower.close()
    assert engine.steps[-1] == "resume"
    assert not engine.paused
    await follower.close()


async def test_dead_engine_is_left_alone(following):
    segment, engine = Segment(1), Engine()
    follower = await following(segment, engine)
    engine.alive = False
    segment.publish(2)
    await until(lambda: follower._task.done())


async def test_idle_following_takes_less_than_a_hundredth_of_a_core(bridge):
    """CPU of this whole process, which does nothing else; the quietest of some windows counts."""
    with WeightsWriter(bridge) as writer:
        writer.publish(1, [("a", np.zeros(4))])
        follower = Follower(WeightsReader(bridge), Engine())
        await follower.start()
        shares = []
        while len(shares) < 4 and min(shares, default=1.0) >= 0.01:
            began, cpu = time.monotonic(), time.process_time()
            await asyncio.sleep(2.5)
            shares.append((time.process_time() - cpu) / (time.monotonic() - began))
        await follower.close()
    assert min(shares) < 0.01, shares


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({}, "no bridge is named"),
        (None, "no bridge is named"),
        ({"shmbridge": {}}, "missing required field `bridge`"),
        ({"shmbridge": {"bridge": "b", "pause": "later"}}, "Invalid enum value 'later'"),
        ({"shmbridge": {"bridge": "b", "paus": "keep"}}, "unknown field `paus`"),
        ({"shmbridge": "b"}, "Expected `object`"),
    ],
)
def test_settings_that_are_none_are_refused(given, told):
    with pytest.raises(BadConfig, match=told):
        follow_settings(given)
    with pytest.raises(BadBridgeName):
        follow_settings({"shmbridge": {"bridge": "a b"}})
    assert follow_settings({"shmbridge": {"bridge": "b"}, "other": 1}).pause == "keep"
