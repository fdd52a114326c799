"""The store of values, room that is bounded, who owns a bridge, and what an ended queue leaves. No Ray."""

import subprocess
import sys
import threading

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf
from transfer_queue.storage.bootstrap.provider import StorageBootstrapProvider
from transfer_queue.storage.managers.base import StorageManagerFactory
from transfer_queue.storage.simple_storage import StorageKeyNotFoundError

import shmbridge
from shmbridge.consumers import transfer_queue as room
from shmbridge.consumers.transfer_queue.backend import Opened
from shmbridge.consumers.transfer_queue.columns import Column
from shmbridge.consumers.transfer_queue.store import Queue, ValueStore, begin, join
from shmbridge.segments import bridge_names, membership, mount_id, segment, value_names, write_values
from shmbridge.segments import stored as values

VALUES = {"a": [torch.arange(3), torch.arange(5)], "b@c": ["text", {"k": 1}]}


def put(store, **fields):
    """Puts values by field, of rows from 0; returns the name of their segment."""
    count = len(next(iter(fields.values())))
    return store.put(range(count), [Column(name, values, count) for name, values in fields.items()])


def get(store, field, owner, name):
    column, row = Opened(store).find(field, owner, name)
    return column.value(row)


def zeros(size):
    return [torch.zeros(size, dtype=torch.uint8)]


@pytest.fixture
def make_store(bridge):
    yield lambda *limits: ValueStore(bridge, *limits)
    ValueStore(bridge).clear(range(100))
    assert segment.value_names(bridge) == []


def test_it_is_registered_by_its_name():
    room.register()
    room.register()
    assert StorageBootstrapProvider.get_provider("shmbridge") is not None
    assert "shmbridge" in StorageManagerFactory._registry


def test_put_get_and_clear(make_store, bridge):
    store = make_store()
    name = put(store, **VALUES)
    assert [get(make_store(), "b@c", owner, name) for owner in (1, 0)] == [{"k": 1}, "text"]
    assert [get(make_store(), "a", owner, name).tolist() for owner in (0, 1)] == [[0, 1, 2], [0, 1, 2, 3, 4]]
    for field, owner, place in (("a", 0, None), ("a", 7, name), ("z", 0, name)):
        with pytest.raises(StorageKeyNotFoundError):
            get(store, field, owner, place)
    make_store().clear([0])
    assert get(store, "a", 1, name).tolist() == [0, 1, 2, 3, 4]
    store.clear([0, 1])
    assert segment.value_names(bridge) == []
    with pytest.raises(StorageKeyNotFoundError, match="its rows were cleared"):
        get(store, "a", 0, name)


def test_a_full_bridge_makes_a_put_wait_until_rows_are_cleared(make_store):
    store = make_store(1 << 20, 30)
    put(store, a=zeros(600_000))
    late = threading.Thread(target=store.put, args=([1], [Column("a", zeros(600_000), 1)]))
    late.start()
    late.join(0.2)
    assert late.is_alive()
    store.clear([0])
    late.join(20)
    assert not late.is_alive()


@pytest.mark.parametrize(
    ("size", "says"),
    [
        (600_000, r"in 1 puts that nobody has cleared, of 1 MiB.*kv_clear"),
        (2_000_000, r"can never fit.* 1 MiB .*fewer rows"),
    ],
)
def test_no_room_in_time_names_the_numbers(size, says, make_store, bridge):
    store = make_store(1 << 20, 0.05)
    put(store, a=zeros(600_000))
    with pytest.raises(shmbridge.LaneFull, match=says):
        put(store, a=zeros(size))
    assert len(segment.value_names(bridge)) == 1


def test_garbage_in_a_table_is_refused(make_store):
    name = put(make_store(), a=[torch.arange(3)])
    path = segment.MOUNT / name[1:]
    raw = path.read_bytes()
    at = raw.index(b"int64")
    path.write_bytes(raw[:at] + b"int99" + raw[at + 5 :])
    with pytest.raises(shmbridge.RecordUnreadable, match="'int99' is no type"):
        get(make_store(), "a", 0, name)


def test_a_bridge_has_one_living_queue(bridge):
    first = Queue(bridge)
    with pytest.raises(shmbridge.QueueTaken, match=f"backend.shmbridge.bridge={bridge}2"):
        Queue(bridge)
    first.close()
    first.close()
    Queue(bridge).close()
    assert bridge not in bridge_names()


ENDED = """
import os, sys, numpy as np
from shmbridge.consumers.transfer_queue.store import Queue
from shmbridge.segments import write_values
queue = Queue(sys.argv[1])
write_values(sys.argv[1], np.arange(3), b"", [(0, [b"abc"])])
if sys.argv[2] == "killed":
    os.kill(os.getpid(), 9)
"""


@pytest.mark.parametrize("how", ["killed", "ended"])
def test_what_an_ended_queue_left_goes_at_the_next_start(how, bridge, caplog):
    """Its controller is gone, and with it all that was known of the values."""
    done = subprocess.run([sys.executable, "-c", ENDED, bridge, how], timeout=60, check=False)
    assert done.returncode == (-9 if how == "killed" else 0)
    left = value_names(bridge)
    assert len(left) == (1 if how == "killed" else 0)
    membership.sweep_bridge(bridge)
    assert value_names(bridge) == left, "a start of something else does not throw them away"
    queue = Queue(bridge)
    assert value_names(bridge) == []
    assert ("3 rows that nobody had cleared were removed" in caplog.text) == (how == "killed")
    queue.close()


def test_the_configuration_reaches_the_clients(bridge):
    conf = OmegaConf.create(
        {"backend": {"storage_backend": "shmbridge", "shmbridge": {"bridge": bridge, "capacity": "1G"}}}
    )
    room.register()
    queue = StorageBootstrapProvider.get_provider("shmbridge")(conf)
    settings = conf.backend.shmbridge
    assert (settings.bridge, settings.capacity, settings.mount) == (bridge, "1G", mount_id())
    join(settings).leave()
    queue.close()


def test_another_node_is_refused(bridge):
    queue, settings = begin({"bridge": bridge})
    with pytest.raises(shmbridge.BadConfig, match="keep all clients of the queue on one node"):
        join({**settings, "mount": "elsewhere"})
    queue.close()


def test_without_a_name_the_bridge_has_one(monkeypatch, bridge):
    monkeypatch.setattr("shmbridge.consumers.transfer_queue.store.BRIDGE", bridge)
    queue, settings = begin({})
    assert settings["bridge"] == bridge
    queue.close()


def test_a_put_that_is_being_written_is_not_cleared(make_store, bridge):
    """It belongs to nobody yet; a clear leaves it alone."""
    with open(segment.MOUNT / segment.new_name(bridge, "v")[1:], "wb") as half:
        make_store().clear([0])
        assert segment.value_names(bridge) == [f"/{half.name.rpartition('/')[2]}"]
        assert membership.sweep_bridge(bridge).removed == segment.value_names(
            bridge
        ) or not segment.value_names(bridge)
    assert values.value_bytes(bridge) == (0, 0)


def test_of_two_values_for_a_row_in_one_put_the_last_counts(make_store, bridge):
    store = make_store()
    name = store.put([5, 5], [Column("x", torch.tensor([[1, 1], [2, 2]]), 2)])
    assert get(store, "x", 5, name).tolist() == [2, 2]
    store.clear([5])
    assert segment.value_names(bridge) == []


@pytest.mark.parametrize("value", [np.zeros(2, "V8"), np.zeros(2, [("a", "i4")]), np.zeros((), "V3")[()]])
def test_values_of_no_type_are_refused_before_anything_is_stored(value, make_store, bridge):
    """numpy would bring the fields of their records back, but raw bytes not as they were."""
    with pytest.raises(shmbridge.InvalidRecord, match=r"field 'a', row 0: a numpy\.(ndarray|void)"):
        put(make_store(), a=[value])
    assert segment.value_names(bridge) == []


def test_a_limit_of_the_process_ends_a_clear_with_its_name(make_store, bridge, monkeypatch):
    """Segments that are being written are skipped; one that cannot be opened may be what is to be cleared."""
    store = make_store()
    put(store, a=[torch.arange(3)])

    def no_descriptor(name):
        raise shmbridge.ProcessLimit("1024 of 1024 descriptors are open", hint="ulimit -n 65536")

    with monkeypatch.context() as patched:
        patched.setattr("shmbridge.consumers.transfer_queue.store.read_values_head", no_descriptor)
        with pytest.raises(shmbridge.ProcessLimit, match="ulimit"):
            store.clear([0])
    store.clear([0])
    assert segment.value_names(bridge) == []


def test_what_a_queue_puts_that_begins_during_a_sweep_stays(bridge, monkeypatch):
    """The sweep lists names before it looks at the lock: then names of a living queue mean a lock."""
    began = []

    def listed(name):
        if not began:
            began.append(None)
            began.append(Queue(bridge))
            write_values(bridge, np.arange(3), b"", [(0, [b"abc"])])
        return value_names(name)

    monkeypatch.setattr(membership, "value_names", listed)
    report = membership.sweep_bridge(bridge, with_records=True)
    assert len(value_names(bridge)) == 1
    assert "its queue is alive" in "".join(report.kept.values())
    began[1].close()


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"capcity": "8G"}, "has no setting capcity.*bridge, capacity, timeout_s"),
        ({"capacity": "lots"}, r"backend\.shmbridge\.capacity: 'lots'"),
        ({"capacity": 0}, "no put would fit"),
        ({"bridge": "a/b"}, "a/b"),
        ({"timeout_s": "soon"}, "timeout_s='soon'"),
    ],
)
def test_settings_that_no_client_could_use_are_refused(settings, says, bridge):
    with pytest.raises(shmbridge.ShmBridgeError, match=says):
        begin({"bridge": bridge, **settings})
    assert bridge not in bridge_names()
