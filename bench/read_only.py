"""What reading a lane through a mapping whose data is read-only costs, beside one that is writable whole;
both in turn in one run.

One process puts, gets what it put and reads every byte, as a consumer that keeps up.
"""

import argparse
import json
import logging
import os
import statistics
import time

import numpy as np

import shmbridge

RECORDS = {"35 KB": 2_048, "279 KB": 16_384, "2.2 MB": 131_072}  # tokens, 17 bytes each


def record_of(tokens: int) -> dict[str, list[np.ndarray]]:
    """Eight rows of the dense core."""
    rows = 8
    each = tokens // rows
    floats = {
        name: [np.ones(each, np.float32)] * rows
        for name in ("advantages", "inference_logprobs", "token_rewards")
    }
    return {
        "tokens": [np.ones(each, np.int32)] * rows,
        "loss_mask": [np.ones(each, np.uint8)] * rows,
        **floats,
    }


def rates(tokens: int, writable: bool, seconds: float) -> tuple[float, float]:
    """Records a second put, and got with every byte read, each by the time spent in it."""
    bridge = f"bench-ro-{os.getpid()}-{os.urandom(2).hex()}"
    group = record_of(tokens)
    with shmbridge.Producer(bridge, lane_bytes="64M") as producer, shmbridge.Consumer(bridge) as consumer:
        put_s = got_s = 0.0
        count, until = -8, time.perf_counter() + seconds
        while time.perf_counter() < until or count <= 0:
            began = time.perf_counter()
            producer.put(group)
            put = time.perf_counter()
            record = consumer.get(5)
            if writable and count == -8:
                record.map_lane_writable()
            for name in record.columns:
                record[name].values.view(np.uint8).max()
            record.release()
            count += 1
            if count > 0:  # the first ones map pages
                put_s, got_s = put_s + put - began, got_s + time.perf_counter() - put
            del record
    return count / put_s, count / got_s


def main() -> None:
    """Prints the medians, and read-only as a fraction of writable."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument(
        "--seconds", type=float, default=0.5, help="of each round, by size and kind of mapping"
    )
    arguments = parser.parse_args()
    # that lanes are mapped writable is what is asked here
    logging.getLogger("shmbridge").setLevel(logging.ERROR)
    for size, tokens in RECORDS.items():
        found: dict[bool, list[tuple[float, float]]] = {False: [], True: []}
        for _ in range(arguments.rounds):
            for writable in found:
                found[writable].append(rates(tokens, writable, arguments.seconds))
        put, got = (
            [statistics.median(rate[which] for rate in found[kind]) for kind in (True, False)]
            for which in (0, 1)
        )
        print(
            json.dumps(
                {
                    "record": size,
                    "huge_pages": os.environ.get("SHMBRIDGE_HUGE_PAGES", "") != "never",
                    "put_writable_per_s": round(put[0]),
                    "put_read_only_per_s": round(put[1]),
                    "put_ratio": round(put[1] / put[0], 3),
                    "get_writable_per_s": round(got[0]),
                    "get_read_only_per_s": round(got[1]),
                    "get_ratio": round(got[1] / got[0], 3),
                }
            )
        )


if __name__ == "__main__":
    main()
