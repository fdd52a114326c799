"""`relay --stop` ends the actors of its bridge, whichever of Ray's namespaces the caller has joined."""

import sys
from types import SimpleNamespace

import pytest

from shmbridge.relay.ray import place
from shmbridge.relay.ray.directory import NAMESPACE, names


@pytest.fixture
def killed(monkeypatch):
    """A cluster without nodes, as far as stop() sees it, whose caller is in a namespace of its own."""
    killed: list[str] = []
    wanted, other = names("run1"), names("run2")
    everywhere = [{"name": name, "namespace": NAMESPACE} for name in (*wanted, *other)]
    everywhere.append({"name": wanted[1], "namespace": "somebody's"})

    def list_named_actors(all_namespaces=False):
        return everywhere if all_namespaces else []

    def get_actor(name, namespace):
        assert namespace == NAMESPACE
        return SimpleNamespace(name=name, stop=SimpleNamespace(remote=lambda: None))

    ray = SimpleNamespace(
        nodes=list,
        util=SimpleNamespace(list_named_actors=list_named_actors),
        get_actor=get_actor,
        get=lambda ref, timeout: None,
        kill=lambda actor: killed.append(actor.name),
        exceptions=SimpleNamespace(RayError=RuntimeError),
    )
    monkeypatch.setitem(sys.modules, "ray", ray)
    return killed


def test_the_actors_of_the_bridge_are_ended_and_no_others(killed):
    directory, destination = names("run1")
    assert place.stop("run1") == [destination, directory]
    assert killed == [destination, directory]
