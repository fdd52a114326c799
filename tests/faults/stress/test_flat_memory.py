"""A million small records and a thousand large ones go through, and neither process grows with them.

A leak shows in every stretch of records. What a process allocates once (a first status message, a first full
poll: 1.5 MiB each) shows in one, whenever it comes; so the stretch that grew least is judged.
"""

import json
import subprocess
import sys
from itertools import pairwise

import numpy as np
import pytest

import shmbridge

MOST_GROWTH = 1 << 20  # one leaked object of 64 bytes per small record would be 12 times as much
STRETCHES = 5  # of equal length; memory is read at the end of each
SIZES = {"small": (1_000_000, 8), "large": (1_000, 1 << 19)}  # records, tokens of each
LANE = "16M"


def anonymous_bytes() -> int:
    """Memory of this process that is no file's: its heap and stacks."""
    with open("/proc/self/status") as lines:
        found = dict(line.split(":", 1) for line in lines)
    return 1024 * int(found["RssAnon"].split()[0])


def produce(bridge: str, records: int, tokens: int) -> None:
    group = {"tokens": [np.arange(tokens, dtype=np.int32)], "scores": [1.0]}
    memory = []
    with shmbridge.Producer(bridge, lane_bytes=LANE) as producer:
        for number in range(1, records + 1):
            producer.put(group)
            if number % (records // STRETCHES) == 0:
                memory.append(anonymous_bytes())
        print(json.dumps({"memory": memory, "records": producer.stats()["records_total"]}))


def consume(bridge: str, records: int, tokens: int) -> None:
    memory: list[int] = []
    with shmbridge.Consumer(bridge) as consumer:
        print("ready", flush=True)
        taken = 0
        while taken < records:
            with consumer.get(30) as record:
                assert record["tokens"].values[-1] == tokens - 1
            taken += 1
            for record in consumer.poll():
                assert record["tokens"].values[-1] == tokens - 1
                record.release()
                taken += 1
            del record
            if taken >= (len(memory) + 1) * (records // STRETCHES):
                memory.append(anonymous_bytes())
        print(json.dumps({"memory": memory, "records": taken}))


@pytest.mark.timeout(400)
@pytest.mark.parametrize("size", SIZES)
def test_memory_stays_flat(bridge, size) -> None:
    records, tokens = SIZES[size]
    run = [sys.executable, __file__]
    arguments = [bridge, str(records), str(tokens)]
    consumer = subprocess.Popen([*run, "consume", *arguments], stdout=subprocess.PIPE, text=True)
    try:
        assert consumer.stdout is not None
        assert consumer.stdout.readline() == "ready\n"
        producer = subprocess.run(
            [*run, "produce", *arguments], stdout=subprocess.PIPE, text=True, timeout=300, check=True
        )
        out, _ = consumer.communicate(timeout=60)
    finally:
        consumer.kill()
        consumer.wait()
    for who, said in (("producer", json.loads(producer.stdout)), ("consumer", json.loads(out))):
        assert said["records"] == records
        assert len(said["memory"]) == STRETCHES
        grown = [after - before for before, after in pairwise(said["memory"])]
        assert min(grown) < MOST_GROWTH, f"the {who} grew in every stretch: {said['memory']} bytes"


if __name__ == "__main__":
    role, name, *numbers = sys.argv[1:]
    {"produce": produce, "consume": consume}[role](name, *map(int, numbers))
