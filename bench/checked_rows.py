"""The cost of checks of rows: `put` of the same groups with and without them, in turn.

One process, one thread, its CPU time.
"""

import os
import statistics
import time

import shmbridge
from shmbridge.bench.groups import SEED, SOURCES, Form, Shape, make
from shmbridge.record import CHECK_VARIABLE

_PUTS = 64


def put_ratios(
    everys: tuple[int, ...], shape: Shape, form: Form = "row_arrays", rounds: int = 40
) -> dict[int, float]:
    """CPU time of `put` with checks of one row in N over that without any, by N: medians over rounds that
    take all N in turn.
    """
    groups = [make(shape, form, SEED + number) for number in range(SOURCES)]
    bridge, before = f"bench-checked-{os.getpid()}", os.environ.get(CHECK_VARIABLE)
    spent: dict[int, list[float]] = {every: [] for every in (0, *everys)}
    try:
        with shmbridge.Consumer(bridge) as consumer:
            producers = {}
            for every in spent:
                os.environ[CHECK_VARIABLE] = str(every)
                producers[every] = shmbridge.Producer(bridge)
            for number in range(rounds + 1):
                order = list(spent)
                for every in order[number % len(order) :] + order[: number % len(order)]:
                    began = time.process_time_ns()
                    for put in range(_PUTS):
                        producers[every].put(groups[put % SOURCES])
                    spent[every].append(time.process_time_ns() - began)
                    for record in consumer.poll(2 * _PUTS):
                        record.release()
            for producer in producers.values():
                producer.close()
    finally:
        os.environ.pop(CHECK_VARIABLE)
        if before is not None:
            os.environ[CHECK_VARIABLE] = before
        shmbridge.clean(bridge, dry_run=False)
    without = spent.pop(0)[1:]  # of the first round lanes are touched for the first time
    return {
        every: statistics.median(mine / none for mine, none in zip(times[1:], without, strict=True))
        for every, times in spent.items()
    }
