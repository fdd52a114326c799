"""A million small records and a thousand large ones go through, and neither process has more memory at the
end than after its first lap.
"""

import json
import subprocess
import sys

import numpy as np
import pytest

import shmbridge

MOST_GROWTH = 1 << 20  # one leaked object of 64 bytes per record would be 64 times as much
# records, of them a first lap, tokens of each
SIZES = {"small": (1_000_000, 100_000, 8), "large": (1_000, 200, 1 << 19)}
LANE = "16M"
AT_ONCE = 16  # records of one poll; a list of 256 first met after the first lap takes 1.5 MiB by itself


def anonymous_bytes() -> int:
    """Memory of this process that is no file's: its heap and stacks."""
    with open("/proc/self/status") as lines:
        found = dict(line.split(":", 1) for line in lines)
    return 1024 * int(found["RssAnon"].split()[0])


def produce(bridge: str, records: int, warm: int, tokens: int) -> None:
    group = {"tokens": [np.arange(tokens, dtype=np.int32)], "scores": [1.0]}
    with shmbridge.Producer(bridge, lane_bytes=LANE) as producer:
        for _ in range(warm):
            producer.put(group)
        before = anonymous_bytes()
        for _ in range(records - warm):
            producer.put(group)
        print(
            json.dumps(
                {"before": before, "after": anonymous_bytes(), "records": producer.stats()["records_total"]}
            )
        )


def consume(bridge: str, records: int, warm: int, tokens: int) -> None:
    with shmbridge.Consumer(bridge) as consumer:
        print("ready", flush=True)
        before = taken = 0
        while taken < records:
            with consumer.get(30) as record:
                assert record["tokens"].values[-1] == tokens - 1
            taken += 1
            for record in consumer.poll(AT_ONCE):
                assert record["tokens"].values[-1] == tokens - 1
                record.release()
                taken += 1
            del record
            if taken >= warm and not before:
                before = anonymous_bytes()
        print(json.dumps({"before": before, "after": anonymous_bytes(), "records": taken}))


@pytest.mark.timeout(400)
@pytest.mark.parametrize("size", SIZES)
def test_memory_stays_flat(bridge, size) -> None:
    records, warm, tokens = SIZES[size]
    run = [sys.executable, __file__]
    arguments = [bridge, str(records), str(warm), str(tokens)]
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
        assert said["after"] - said["before"] < MOST_GROWTH, (
            f"the {who} grew from {said['before']} to {said['after']} bytes"
        )


if __name__ == "__main__":
    role, name, *numbers = sys.argv[1:]
    {"produce": produce, "consume": consume}[role](name, *map(int, numbers))
