"""Nodes share the way in proportion to their weights, and never more than the bound is on it."""

from collections import Counter

import pytest

from shmbridge.relay.destination import Turns


def served(turns: Turns, nodes: list[str], rounds: int, brings: dict[str, int]) -> Counter[str]:
    """Bytes that each node brought in so many turns of 8, one at a time."""
    got: Counter[str] = Counter()
    for _ in range(rounds):
        node = turns.next(nodes, 8)
        turns.came(node, brings[node])
        got[node] += brings[node]
    return got


def test_equal_nodes_get_equal_bytes_whatever_a_turn_brings():
    turns = Turns(100)
    for node in ("a", "b"):
        turns.add(node)
    got = served(turns, ["a", "b"], 900, {"a": 8, "b": 1})
    assert got["a"] == pytest.approx(got["b"], rel=0.05)


def test_weights_are_kept():
    turns = Turns(100)
    turns.add("a", 3.0)
    turns.add("b")
    got = served(turns, ["a", "b"], 400, {"a": 8, "b": 8})
    assert got["a"] == pytest.approx(3 * got["b"], rel=0.05)


def test_a_late_node_does_not_catch_up():
    turns = Turns(100)
    turns.add("a")
    served(turns, ["a"], 100, {"a": 8})
    turns.add("b")
    got = served(turns, ["a", "b"], 100, {"a": 8, "b": 8})
    assert got["a"] == pytest.approx(got["b"], rel=0.05)


def test_an_idle_node_does_not_catch_up():
    turns = Turns(100)
    turns.add("a")
    turns.add("b")
    served(turns, ["a"], 100, {"a": 8})
    got = served(turns, ["a", "b"], 100, {"a": 8, "b": 8})
    assert got["a"] == pytest.approx(got["b"], rel=0.05)


def busy(turns: Turns, *nodes: str) -> None:
    """Nodes that have just brought something."""
    for node in nodes:
        turns.add(node)
        assert turns.next([node], 8) == node
        turns.came(node, 8)


def test_every_idle_node_is_asked_at_once_beside_the_bound():
    turns, nodes = Turns(8), [f"env-{number:02}" for number in range(20)]
    for node in nodes:
        turns.add(node)
    asked = []
    while node := turns.next(nodes, 8):
        asked.append(node)
    assert asked == nodes
    assert turns.reserved == 0


def test_idle_nodes_do_not_delay_one_that_brings_something():
    turns, idle = Turns(8), [f"env-{number:02}" for number in range(20)]
    for node in idle:
        turns.add(node)
    busy(turns, "z")
    for _ in range(5):
        while (node := turns.next([*idle, "z"], 8)) != "z":
            assert node in idle
        assert turns.next([*idle, "z"], 8) is None
        turns.came("z", 8)
        turns.came("env-07", 0)


def test_a_node_that_brings_nothing_gives_its_share_to_others():
    turns = Turns(8)
    busy(turns, "a", "b")
    assert turns.next("a", 8) == "a"
    assert turns.next("b", 8) is None
    turns.came("a", 0)
    assert turns.next("ab", 8) == "a"  # beside the bound
    assert turns.next("ab", 8) == "b"


def test_never_more_on_the_way_than_the_bound():
    turns = Turns(20)
    busy(turns, *"abc")
    assert [turns.next("abc", 8) for _ in range(3)].count(None) == 1
    assert turns.reserved == 16
    turns.came("a", 8)
    assert turns.next("abc", 8) is not None
    turns.remove("b")
    turns.remove("a")
    turns.remove("c")
    assert turns.reserved == 0
    assert turns.next("abc", 8) is None


def test_one_pull_is_always_allowed():
    turns = Turns(1)
    busy(turns, "a")
    assert turns.next("a", 8) == "a"
    assert turns.next("a", 8) is None


def test_weights_above_zero():
    with pytest.raises(ValueError, match="above 0"):
        Turns(1).add("a", 0.0)
