"""A bridge as a torch data set in real processes: killed and resumed, in a worker, under ranks, with
torchdata.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from torch.utils.data import DataLoader

import shmbridge
from shmbridge.consumers.dataset import BridgeDataset

pytestmark = pytest.mark.timeout(120)

ROOT = Path(__file__).parents[3]

# A training run whose only state is the checkpoint. It kills itself where the test says, for a kill to hit
# that very place.
TRAINER = """
import json, os, signal, sys
from shmbridge.consumers.dataset import BridgeDataset

bridge, folder, hold, steps, save_every, kill_at, kill_step = sys.argv[1:]
path = os.path.join(folder, "checkpoint.json")

def reach(place, step):
    if (place, step) == (kill_at, int(kill_step)):
        os.kill(os.getpid(), signal.SIGKILL)

with BridgeDataset(bridge, groups=2, hold=hold, timeout_s=60) as data:
    trained, again = [], []
    if os.path.exists(path):
        saved = json.load(open(path))
        trained, again = saved["trained"], saved["again"]
        data.load_state_dict(saved["state"])
    for batch in data:
        reach("item", data.stats()["handed_out_items_total"])
        numbers = batch["tokens"][batch["cu_seqlens"][:-1]].tolist()
        trained += numbers
        again += [number for number, twice in zip(numbers, batch["redelivered"].tolist()) if twice]
        step = int(data.stats()["handed_out_items_total"])
        if step % int(save_every) == 0:
            with open(path + ".new", "w") as file:
                json.dump({"trained": trained, "again": again, "state": data.state_dict()}, file)
            os.replace(path + ".new", path)
            reach("saved", step)
            if hold == "checkpoint":
                data.release()
            reach("released", step)
        if step >= int(steps):
            break
    print(json.dumps(data.stats()))
"""


@pytest.fixture
def producer(bridge):
    with shmbridge.Producer(bridge, env_name="test", lane_bytes="4M") as producer:
        yield producer


def put(producer, first, count):
    for number in range(first, first + count):
        producer.put({"tokens": [[number, 1, 2]], "score": [1.0]}, timeout_s=10.0)


def test_a_worker_that_waits_too_long_says_how_long_it_waited(bridge, producer):
    items = iter(DataLoader(BridgeDataset(bridge, groups=1, timeout_s=1.5), batch_size=None, num_workers=1))
    with pytest.raises(shmbridge.ConsumerEmpty, match=r"no batch of .* within 1\.5 s; "):
        next(items)
    items._shutdown_workers()  # the error's traceback keeps the iterator, and with it the worker


def started(program, *arguments, **env):
    quiet = {
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
    }
    return subprocess.Popen(
        [sys.executable, "-c", program, *map(str, arguments)],
        env=os.environ | quiet | env,
        stdout=subprocess.PIPE,
        text=True,
    )


def train(bridge, folder, hold, *, steps, save_every, kill_at="never", kill_step=0):
    """Run the trainer; return its status, its counters and what the checkpoint says afterwards."""
    process = started(TRAINER, bridge, folder, hold, steps, save_every, kill_at, kill_step)
    out, _ = process.communicate(timeout=90)
    path = folder / "checkpoint.json"
    saved = json.loads(path.read_text()) if path.exists() else {"trained": [], "again": []}
    return process.returncode, json.loads(out) if out else {}, saved


@pytest.mark.parametrize(
    ("kill_at", "in_checkpoint", "skipped"),
    [("item", 4, 0), ("saved", 8, 4), ("released", 8, 0)],
    ids=["training", "saved", "released"],
)
def test_every_group_is_trained_once_with_leases_until_the_checkpoint(
    bridge, producer, tmp_path, kill_at, in_checkpoint, skipped
):
    put(producer, 0, 12)
    status, _, saved = train(
        bridge, tmp_path, "checkpoint", steps=6, save_every=2, kill_at=kill_at, kill_step=4
    )
    assert status == -signal.SIGKILL
    assert saved["trained"] == list(range(in_checkpoint))

    status, stats, saved = train(bridge, tmp_path, "checkpoint", steps=6, save_every=2)
    assert status == 0
    assert saved["trained"] == list(range(12))
    assert stats["rows_skipped_total"] == skipped
    assert stats["records_gone_total"] == 0
    assert set(saved["again"]) <= set(range(in_checkpoint, 12))
    assert (4 in saved["again"]) == (kill_at == "item")


def test_a_kill_without_held_leases_costs_and_counts_what_was_released_since_the_checkpoint(
    bridge, producer, tmp_path
):
    put(producer, 0, 14)
    status, _, saved = train(bridge, tmp_path, "step", steps=7, save_every=2, kill_at="item", kill_step=4)
    assert status == -signal.SIGKILL
    assert saved["trained"] == [0, 1, 2, 3]

    status, stats, saved = train(bridge, tmp_path, "step", steps=6, save_every=2)
    assert status == 0
    # 4 and 5 had been given back when the fourth item was asked for
    assert saved["trained"] == [0, 1, 2, 3, *range(6, 14)]
    assert saved["again"][:2] == [6, 7]
    assert stats["records_gone_total"] == 2


@pytest.mark.parametrize("how", ["fork", "spawn"])
def test_one_worker_is_the_consumer(bridge, producer, how):
    put(producer, 0, 6)
    data = BridgeDataset(bridge, groups=2)
    loader = DataLoader(data, batch_size=None, num_workers=1, multiprocessing_context=how)
    items = iter(loader)
    assert [next(items)["tokens"][::3].tolist() for _ in range(3)] == [[0, 1], [2, 3], [4, 5]]
    with pytest.raises(shmbridge.ConsumerTaken):
        shmbridge.Consumer(bridge)
    del items  # ends the worker
    shmbridge.Consumer(bridge).close()
    assert data.stats()["handed_out_items_total"] == 0  # of this process


def test_a_worker_does_not_outlive_its_killed_trainer(bridge, producer):
    put(producer, 0, 2)
    program = """
import sys
from torch.utils.data import DataLoader
from shmbridge.consumers.dataset import BridgeDataset
for batch in DataLoader(BridgeDataset(sys.argv[1], groups=2), batch_size=None, num_workers=1):
    print("batch", flush=True)
"""
    trainer = started(program, bridge)
    assert trainer.stdout.readline() == "batch\n"
    trainer.kill()
    trainer.communicate()
    deadline = time.monotonic() + 60
    while True:
        try:
            shmbridge.Consumer(bridge).close()
            return
        except shmbridge.ConsumerTaken:
            assert time.monotonic() < deadline, "the worker lives on"
            time.sleep(0.1)


def test_ranks_share_every_batch_until_the_bridge_is_drained(bridge, producer):
    put(producer, 0, 12)
    program = """
import json, sys
from shmbridge.consumers.dataset import BridgeDataset
with BridgeDataset(sys.argv[1], groups=4, timeout_s=60) as data:
    data.publish_policy_version(0)
    if data.rank == 0:
        data.drain()
    print(json.dumps([batch["tokens"][::3].tolist() for batch in data]), flush=True)
"""
    ranks = [started(program, bridge, RANK=str(rank), WORLD_SIZE="2") for rank in range(2)]
    seen = [json.loads(rank.communicate(timeout=90)[0]) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0]
    assert [[len(batch) for batch in batches] for batches in seen] == [[2, 2, 2]] * 2
    for step in range(3):
        assert sorted(seen[0][step] + seen[1][step]) == list(range(4 * step, 4 * step + 4))


@pytest.mark.parametrize("workers", [0, 1])
def test_torchdata_saves_and_restores_it(bridge, producer, workers):
    stateful = pytest.importorskip("torchdata.stateful_dataloader")
    put(producer, 0, 6)

    def loader(data):
        return stateful.StatefulDataLoader(data, batch_size=None, num_workers=workers)

    with BridgeDataset(bridge, groups=1) as data:
        first = loader(data)
        items = iter(first)
        seen = [next(items)["tokens"][0].item() for _ in range(3)]
        state = first.state_dict()
        del items, first
    assert seen == [0, 1, 2]
    with BridgeDataset(bridge, groups=1) as data:
        second = loader(data)
        second.load_state_dict(state)
        resumed = next(iter(second))["tokens"][0].item()
        del second
    # A worker is ahead of training by what it prefetches: that was given back, and is gone.
    assert resumed == 3 if workers == 0 else resumed >= 3
