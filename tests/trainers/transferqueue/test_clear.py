"""Rows are cleared by any process, whatever fields they have; the memory goes with the last row of a put."""

import threading
import time

import pytest
import torch
import transfer_queue as tq
from tensordict import TensorDict

from shmbridge.segments import value_names
from shmbridge.testing import wait_until

KEYS = ["k0", "k1", "k2"]


def put(keys, partition, **fields):
    tq.kv_batch_put(keys, partition, TensorDict(fields, batch_size=len(keys)))


def test_another_process_clears(queue, partition, there):
    put(KEYS, partition, x=torch.zeros(3, 2))
    there(tq.kv_clear, KEYS, partition)
    assert value_names(queue) == []
    with pytest.raises(ValueError, match="not found"):
        tq.kv_batch_get(KEYS, partition)


def test_rows_go_one_by_one(queue, partition, there):
    put(KEYS, partition, x=torch.arange(3)[:, None])
    there(tq.kv_clear, "k1", partition)
    assert tq.kv_batch_get(["k0", "k2"], partition)["x"].values().tolist() == [0, 2]
    tq.kv_clear("k0", partition)
    assert len(value_names(queue)) == 1
    tq.kv_clear("k2", partition)
    assert value_names(queue) == []


def test_rows_with_other_fields_are_cleared_together(queue, partition):
    """The controller names only fields that all have; a group's row of verl has none of its trajectories'."""
    put(["group"], partition, prompt=torch.zeros(1, 2))
    put(KEYS, partition, x=torch.zeros(3, 2))
    put(KEYS[:1], partition, more=torch.zeros(1, 2))
    tq.kv_clear(["group", *KEYS], partition)
    assert value_names(queue) == []


def test_what_was_put_over_goes_too(queue, partition):
    for number in range(4):
        put(KEYS, partition, x=torch.full((3, 1), number))
    tq.kv_clear(KEYS, partition)
    assert value_names(queue) == []


def test_clearing_twice_does_nothing(partition):
    put(KEYS, partition, x=torch.zeros(3, 2))
    tq.kv_clear(KEYS, partition)
    tq.kv_clear(KEYS, partition)


def test_a_number_that_is_used_again_is_another_row(partition, there):
    """TransferQueue gives the numbers of cleared rows to new ones."""
    put(KEYS, partition, x=torch.zeros(3, 2))
    tq.kv_clear(KEYS[:2], partition)
    there(put_there, ["new0", "new1"], partition)
    assert tq.kv_batch_get(["new0", "new1", "k2"], partition)["x"].values().tolist() == [1, 1, 1, 1, 0, 0]
    tq.kv_clear("k2", partition)
    assert tq.kv_batch_get(["new0", "new1"], partition)["x"].values().tolist() == [1] * 4


def put_there(keys, partition):
    put(keys, partition, x=torch.ones(2, 2))


def test_a_partition_is_cleared_whole(queue, partition):
    client = tq.get_client()
    client.put(TensorDict({"x": torch.zeros(5, 2)}, batch_size=5), partition_id=partition)
    client.clear_partition(partition)
    assert value_names(queue) == []


def test_a_reader_that_comes_too_late_is_told(partition):
    """It holds metadata of a row that is cleared before it reads."""
    client = tq.get_client()
    put(KEYS, partition, x=torch.zeros(3, 2))
    late = client.kv_retrieve_meta(KEYS, partition)
    tq.kv_clear(KEYS, partition)
    with pytest.raises(tq.StorageKeyNotFoundError, match="its rows were cleared"):
        client.get_data(late)


def test_a_clear_goes_on_while_many_puts_wait_for_room(partition, monkeypatch):
    """More puts wait than the executor has threads: only the clear can make room for them."""
    store = tq.get_client().storage_manager.store
    put(KEYS[:1], partition, x=torch.zeros(1, 50_000))
    monkeypatch.setattr(store, "capacity", 210_000)
    monkeypatch.setattr(store, "timeout_s", 20.0)
    late = [f"late{number}" for number in range(40)]
    threads = [
        threading.Thread(target=put, args=([key], partition), kwargs={"x": torch.ones(1, 1000)})
        for key in late
    ]
    for each in threads:
        each.start()
    wait_until(lambda: len(tq.kv_list(partition)[partition]) == 41, 20.0)
    begun = time.monotonic()
    tq.kv_clear(KEYS[:1], partition)
    assert time.monotonic() - begun < 10
    for each in threads:
        each.join(20)
    assert tq.kv_batch_get(late, partition)["x"].values().sum() == 40_000
