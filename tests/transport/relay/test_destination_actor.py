"""The destination's actor without Ray: what it does when Ray does not answer."""

import msgspec
import pytest

from shmbridge.relay.ray import actors as node
from shmbridge.relay.ray.actors import ActorThread
from shmbridge.relay.ray.directory import Placed


@pytest.fixture
def actor(bridge, monkeypatch) -> node.DestinationActor:
    """With one source; its thread does not run."""
    monkeypatch.setattr(ActorThread, "start", lambda self: None)
    monkeypatch.setattr(node, "_is_alive", lambda node_id: True)
    options = msgspec.msgpack.encode(node.Options(weights=False))
    actor = node.DestinationActor(bridge, "learner", options)
    actor.place({"env-1": Placed("source", "id", bridge)})
    return actor


@pytest.mark.parametrize("where", ["actor", "call"])
def test_a_source_that_cannot_be_asked_gives_its_turn_back(actor, make_destination, monkeypatch, where):
    class Broken:
        @property
        def pull(self):
            raise RuntimeError("the control store does not answer")

    def find(name: str) -> Broken:
        return Broken().pull if where == "actor" else Broken()

    monkeypatch.setattr(node, "find", find)
    destination = make_destination()
    for _ in range(3):
        actor._not_before.clear()
        actor._pull(destination)
        assert actor._errors == {"env-1": "the control store does not answer"}
        assert not actor._turns._reserved["env-1"]
        assert not destination.in_session("env-1")


def test_a_source_whose_node_has_another_name_is_asked_under_one(actor):
    """As when a raylet begins again before Ray holds the one before for dead: both nodes have one name."""
    old, new = Placed("source", "id", actor._bridge), Placed("source-2", "id-2", actor._bridge)
    actor.place({"env-1-old": old, "env-1-new": new})
    assert actor._sources == {"env-1": old, "env-1-new": new}
    actor.place({"env-1": new})
    assert actor._sources == {"env-1": old, "env-1-new": new}
    actor._forget("env-1")  # the old one has left
    actor.place({"env-1": new})
    assert actor._sources == {"env-1-new": new}
