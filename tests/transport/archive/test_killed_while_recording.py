"""A hub that is killed while it records: every released record is in the files, and the files open."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import shmbridge
from shmbridge._ext import header
from shmbridge.archive import folder as parts
from shmbridge.archive.folder import read_archive
from shmbridge.archive.recorder import Recorder

HUB = Path(__file__).with_name("recording_hub.py")
ROUNDS = 6


@pytest.fixture
def start_hub(bridge, tmp_path):
    """Starts a recording hub and gives its pid."""
    with subprocess.Popen(
        [sys.executable, HUB, bridge], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as nursery:

        def start(rotate_bytes: int) -> int:
            nursery.stdin.write(f"{tmp_path} {rotate_bytes}\n")
            nursery.stdin.flush()
            return int(nursery.stdout.readline())

        yield start
        nursery.stdin.close()
        nursery.wait(20)


def open_as_they_are(folder: Path) -> int:
    """Opens every part with pyarrow alone, as any user may; returns how many streams there are."""
    for path in folder.glob("part-*.parquet"):
        pq.read_table(path, columns=["sequence"])
    streams = list(folder.glob("part-*.arrows"))
    for path in streams:
        if any(path.read_bytes()[:8]):  # its first message, the schema, is there
            pa.ipc.open_stream(path).read_all().validate(full=True)
    return len(streams)


def test_every_released_record_is_in_the_files(bridge, tmp_path, start_hub):
    random_, streams, released_total = random.Random(11), 0, 0
    with shmbridge.Producer(bridge, producer_id="env", lane_bytes="512K", on_full="raise") as producer:
        number = 0
        for _ in range(ROUNDS):
            pid = start_hub(random_.choice([50_000, 150_000, 1 << 30]))
            goal = producer.stats()["records_total"] + random_.randrange(5, 60)
            while producer.stats()["records_total"] - producer.stats()["held"] < goal - 20:
                tokens = np.full(random_.randrange(1, 8_000), number, np.int32)
                try:
                    producer.put({"tokens": [tokens], "loss_mask": [tokens > 0]}, timeout_s=0)
                    number += 1
                except shmbridge.LaneFull:
                    time.sleep(0.0005)
            time.sleep(random_.random() * 0.004)
            os.kill(pid, signal.SIGKILL)
            wait_until_gone(pid)
            streams += open_as_they_are(tmp_path)
            unreleased = set(header.unreleased(producer._lane))
            released = set(range(int(producer.stats()["records_total"]))) - unreleased
            keys = parts.keys_of(tmp_path)
            assert not [each for each in released if not keys.has(producer.producer_id, each)]
            released_total = len(released)
        recorded = {record.sequence: record.group for record in read_archive(tmp_path)}
        for sequence, group in recorded.items():
            assert set(group.values["tokens"].values.tolist()) == {sequence}
        with Recorder(tmp_path) as recorder:
            ((_, last),) = recorder.reached.items()
        assert last == max(recorded)
        assert not [part for part in parts.parts_of(tmp_path) if part.is_stream]
    assert streams > 2, "no kill came while a part was in progress"
    assert released_total > 100


def wait_until_gone(pid: int) -> None:
    while Path(f"/proc/{pid}").exists():
        time.sleep(0.001)
