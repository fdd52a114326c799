"""Versions of which only some tensors are given: the others keep their value, and a lease says what
changed.
"""

import itertools
import os

import numpy as np
import posix_ipc
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import shmbridge
from shmbridge.segments import weights_name
from shmbridge.weights import WeightsReader, WeightsWriter

NAMES = ["a", "b", "c"]
SHAPES = {"a": (4, 3), "b": (7,), "c": ()}
SPECS = [(name, "int64", shape) for name, shape in SHAPES.items()]


@pytest.fixture
def ends(bridge):
    with WeightsWriter(bridge) as writer, WeightsReader(bridge) as reader:
        yield writer, reader


def tensors(version: int, names=NAMES) -> list[tuple[str, np.ndarray]]:
    return [(name, np.full(SHAPES[name], version)) for name in names]


def interrupted(given):
    yield from given
    raise InterruptedError


def values(lease) -> dict[str, int]:
    assert all(len(np.unique(tensor)) == 1 for tensor in lease.tensors.values())
    return {name: int(tensor.flat[0]) for name, tensor in lease.tensors.items()}


def test_tensors_not_given_keep_their_value(ends) -> None:
    writer, reader = ends
    writer.publish(1, tensors(1))
    for version, names in ((2, "b"), (3, "c"), (4, "cb"), (5, ""), (6, "a")):
        writer.publish(version, tensors(version, list(names)), changed_only=True)
    with reader.lease() as lease:
        assert values(lease) == {"a": 6, "b": 4, "c": 4}
        assert lease.changed_since(6) == frozenset()
        assert lease.changed_since(5) == lease.changed_since(4) == {"a"}
        assert lease.changed_since(3) == {"a", "b", "c"}


def test_an_unknown_difference_counts_as_all_changed(ends) -> None:
    writer, reader = ends
    writer.publish(3, tensors(3))
    writer.publish(4, tensors(4, ["a"]), changed_only=True)
    with reader.lease() as lease:
        for unknown in (-1, 0, 2, 5, 99):
            assert lease.changed_since(unknown) == {"a", "b", "c"}


def test_versions_of_an_earlier_segment_are_not_compared_with(bridge) -> None:
    """Here the successor begins with a lower version: the segment was removed by force, so it cannot know the
    last one.
    """
    with WeightsReader(bridge) as reader:
        with WeightsWriter(bridge) as first:
            first.publish(2, tensors(2))
            with reader.lease():
                pass
            posix_ipc.unlink_shared_memory(weights_name(bridge))
        with WeightsWriter(bridge) as second:
            second.publish(1, tensors(1))
            second.publish(3, tensors(3, ["a"]), changed_only=True)
            with reader.lease() as lease:
                assert lease.changed_since(2) == {"a", "b", "c"}
            second.publish(4, tensors(4, ["b"]), changed_only=True)
            with reader.lease() as lease:
                assert lease.changed_since(3) == {"b"}


def test_the_first_version_is_whole(ends) -> None:
    writer, reader = ends
    with pytest.raises(shmbridge.WeightsMismatch, match="no version yet"):
        writer.publish(1, tensors(1, ["a"]), changed_only=True)
    assert reader.version is None


@pytest.mark.parametrize(
    ("changed", "what"),
    [
        ([("new", np.zeros(1))], "'new' was given, the segment has 3: it is not of them"),
        ([("b", np.zeros((7, 1), int))], r"'b' int64\[7, 1\]"),
        (tensors(2, ["a", "a"]), "'a' was given, the segment has 3: it comes twice"),
    ],
)
def test_a_tensor_that_is_not_of_the_table_is_refused_by_name(ends, changed, what) -> None:
    writer, reader = ends
    writer.publish(1, tensors(1))
    with pytest.raises(shmbridge.WeightsMismatch, match=what):
        writer.publish(2, changed, changed_only=True)
    with reader.lease() as lease:
        assert values(lease) == dict.fromkeys(NAMES, 1)


def test_a_successor_goes_on_from_the_last_value(bridge) -> None:
    with WeightsReader(bridge) as reader:
        with WeightsWriter(bridge) as first:
            first.publish(1, tensors(1))
            first.publish(2, tensors(2, ["a"]), changed_only=True)
        with WeightsWriter(bridge) as second:
            second.publish(3, tensors(3, ["b"]), changed_only=True)
        with reader.lease() as lease:
            assert values(lease) == {"a": 2, "b": 3, "c": 1}
            assert lease.changed_since(1) == {"a", "b"}


STEP = st.one_of(
    st.tuples(st.just("whole"), st.just(frozenset(NAMES)), st.booleans()),
    st.tuples(st.just("changed"), st.frozensets(st.sampled_from(NAMES)), st.booleans()),
    st.tuples(st.just("fill"), st.just(frozenset(NAMES)), st.booleans()),
    st.tuples(st.just("abandoned"), st.frozensets(st.sampled_from(NAMES)), st.booleans()),
    st.tuples(st.just("broken off"), st.frozensets(st.sampled_from(NAMES)), st.booleans()),
    st.tuples(st.just("successor"), st.just(frozenset()), st.booleans()),
)


@settings(
    derandomize=True, database=None, max_examples=60, deadline=None, suppress_health_check=list(HealthCheck)
)
@given(steps=st.lists(STEP, max_size=10))
def test_any_order_of_writes_is_what_the_model_says(steps) -> None:
    """Values, and what changed since any version, after every step: whole, changed only, filled, begun and
    abandoned, by a new writer.
    """
    bridge = f"changed-{os.getpid()}-{next(NUMBERS)}"
    with WeightsReader(bridge) as reader:
        writer = WeightsWriter(bridge)
        writer.publish(0, tensors(0))
        last, model = 0, dict.fromkeys(NAMES, 0)
        for kind, names, changed_only in steps:
            version = last + 1
            if kind == "successor":
                writer.close()
                writer = WeightsWriter(bridge)
                continue
            if kind == "broken off":
                with pytest.raises(InterruptedError):
                    writer.publish(
                        version, interrupted(tensors(version, sorted(names))), changed_only=changed_only
                    )
                version, names = last, frozenset()
            elif kind in ("whole", "changed"):
                writer.publish(
                    version, tensors(version, sorted(names)), changed_only=kind == "changed", timeout_s=0
                )
            else:
                try:
                    with writer.fill(version, SPECS, timeout_s=0) as filling:
                        for name, tensor in tensors(version, sorted(names)):
                            filling.write(name, tensor)
                        if kind == "abandoned":
                            raise InterruptedError
                except InterruptedError:
                    version, names = last, frozenset()
            last = version
            model |= dict.fromkeys(names, version)
            with reader.lease() as lease:
                assert (lease.version, values(lease)) == (last, model)
                for since in range(last + 1):
                    assert lease.changed_since(since) == {
                        name for name, changed in model.items() if changed > since
                    }
            assert {name: int(tensor.flat[0]) for name, tensor in reader.copy()[1].items()} == model
        writer.close()


NUMBERS = itertools.count()


def test_a_successor_may_begin_with_the_very_number_that_is_held(bridge) -> None:
    """The segment was removed by force here, too."""
    with WeightsReader(bridge) as reader:
        with WeightsWriter(bridge) as first:
            first.publish(2, tensors(2))
            with reader.lease():
                pass
            posix_ipc.unlink_shared_memory(weights_name(bridge))
        with WeightsWriter(bridge) as second:
            second.publish(2, tensors(3))
            with reader.lease() as lease:
                assert lease.changed_since(2) == {"a", "b", "c"}
            with reader.lease() as lease:
                assert lease.changed_since(2) == frozenset(), "by now it is this segment's"
