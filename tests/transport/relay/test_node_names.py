"""The names of nodes: a lane says 63 bytes, and they are the same after a node has come again."""

import sys
from types import SimpleNamespace

import pytest

from shmbridge.put import LaneOrigin
from shmbridge.relay.ray import place
from shmbridge.relay.ray.place import living_nodes


def node(name: str, node_id: str) -> dict:
    """As Ray describes it."""
    return {
        "NodeID": node_id, "Alive": True, "Labels": {}, "NodeName": name,
        "NodeManagerAddress": "127.0.0.1", "NodeManagerHostname": "host",
    }  # fmt: skip


@pytest.fixture
def cluster(monkeypatch) -> list[dict]:
    """What Ray says of its nodes."""
    nodes: list[dict] = []
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(nodes=lambda: nodes))
    return nodes


def names(cluster: list[dict], *nodes: dict) -> list[str]:
    cluster[:] = nodes
    return [each.name for each in living_nodes("run1")]


@pytest.mark.parametrize("letter", ["a", "é", "漢"])
def test_a_long_name_fits_a_lane_and_stays(cluster, letter):
    one, other = letter * 40 + "x" * 60 + "1", letter * 40 + "x" * 60 + "2"
    first = names(cluster, node(one, "0" * 56), node(other, "1" * 56))
    assert len(set(first)) == 2
    for name in first:
        LaneOrigin(name, "gsm8k-1").words()  # raises if it does not fit
        assert name.startswith(letter * 18)
    assert names(cluster, node(one, "7" * 56), node(other, "8" * 56)) == first


def test_names_that_are_the_same_are_told_apart(cluster):
    for name in ("short", "é" * 70):
        found = names(cluster, node(name, "0" * 56), node(name, "1" * 56))
        assert len(set(found)) == 2
        for each in found:
            LaneOrigin(each, "gsm8k-1").words()


def test_a_name_that_fits_is_itself(cluster):
    assert names(cluster, node("e" * 63, "0" * 56), node("127.0.0.1", "1" * 56)) == ["e" * 63, "host"]


@pytest.mark.parametrize(
    ("said", "weight"),
    [(None, 1.0), ("2.5", 2.5), ("0", 1.0), ("-1", 1.0), ("nan", 1.0), ("inf", 1.0), ("much", 1.0)],
)
def test_a_label_gives_a_node_its_weight(cluster, caplog, said, weight):
    cluster[:] = [node("env-1", "0" * 56) | {"Labels": {} if said is None else {"shmbridge-weight": said}}]
    place._weight.cache_clear()
    for _ in range(3):
        (living,) = living_nodes("run1")
        assert place._placed(living).weight == weight
    assert len(caplog.messages) == (said is not None and weight == 1.0)
