"""What a wheel must do where it was installed: move records, outlive a killed producer, leave nothing behind.

A program of its own, for environments that have the wheel and its dependencies alone.
"""

import os
import signal
import subprocess
import sys

import shmbridge

GROUP = {"tokens": [[1, 2, 3], [4, 5]], "loss_mask": [[0, 1, 1], [0, 1]], "scores": [1.0, 0.5]}
PUT_AND_WAIT = """
import sys, shmbridge
producer = shmbridge.Producer(sys.argv[1], lane_bytes="256K")
for number in range(20):
    producer.put({"tokens": [[number, 7]], "loss_mask": [[0, 1]], "scores": [1.0]})
print("put", flush=True)
sys.stdin.read()
"""


def main() -> None:
    """Raises if anything is missing, lost or left."""
    bridge = f"wheel-check-{os.getpid()}"
    producer = shmbridge.Producer(bridge, lane_bytes="256K")
    with shmbridge.Consumer(bridge) as consumer, producer:
        producer.put(GROUP)
        with consumer.get(timeout_s=20) as record:
            assert record["tokens"].values.tolist() == [1, 2, 3, 4, 5]
            assert record.to_scored_data()["tokens"] == GROUP["tokens"]
            assert record.to_arrow().num_rows == 2
        producer.put_many([GROUP] * 4)
        consumer.drain()
        batches = [batch.tokens.tolist() for batch in consumer.batches(groups=2, layout="packed")]
        assert batches == [[1, 2, 3, 4, 5] * 2] * 2, batches
    with shmbridge.Consumer(bridge) as consumer:
        argv = [sys.executable, "-c", PUT_AND_WAIT, bridge]
        killed = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert killed.stdout is not None
        assert killed.stdout.readline() == "put\n"
        killed.send_signal(signal.SIGKILL)
        killed.communicate()
        seen = []
        for _ in range(20):
            with consumer.get(timeout_s=20) as record:
                seen.append(int(record["tokens"].values[0]))
        assert seen == list(range(20)), seen
    assert bridge not in [each.name for each in shmbridge.list_bridges()], "a segment was left"
    subprocess.run([sys.executable, "-m", "shmbridge.cli", "--help"], check=True, stdout=subprocess.DEVNULL)
    print(f"good: {shmbridge.__file__}")


if __name__ == "__main__":
    main()
