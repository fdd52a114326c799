"""A producer's process: makes its groups and its Writer, says that it is ready, then writes as many groups as
it is told, again and again.

`python -m shmbridge.bench.child JSON` speaks in lines of JSON on its standard input and output; `serve` is
the same for other channels.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from shmbridge.bench import baselines, groups
from shmbridge.bench.contract import Plan
from shmbridge.bench.groups import Form, Shape
from shmbridge.bench.machine import Cores

# How a contender's prepare() wants its groups, whatever form the plan names: transports of bytes and of
# tensors have no lists.
FORM: Form = "arrays"


def serve(
    plan: Plan,
    address: Any,
    number: int,
    receive: Callable[[], int | None],
    say: Callable[[dict[str, Any]], None],
) -> None:
    """Says {} when ready; then for each count received writes that many groups.

    For 0 it says the CPU since then; ends with None.

    So what threads of the transport did for a round after the last write is in its CPU.
    """
    os.sched_setaffinity(0, {plan.cores.of_producer(number)})
    contender = baselines.load(plan.contender)
    writer = contender.Writer(address, plan)
    form = plan.form if plan.contender == baselines.RING else FORM
    ready = writer.prepare(groups.sources(plan.shape, form))
    say({})
    began = time.process_time()
    while (count := receive()) is not None:
        if count:
            began = time.process_time()
            writer.write(ready, count)
        else:
            say({"cpu_s": time.process_time() - began})
    writer.close()


def encode(plan: Plan) -> dict[str, Any]:
    """A plan as JSON has it."""
    return asdict(plan)


def decode(plan: dict[str, Any]) -> Plan:
    """What `encode` made, as a plan again."""
    shape, cores = plan["shape"], plan["cores"]
    made = {
        "shape": Shape(shape["rows"], shape["length"], tuple(shape["columns"])),
        "cores": Cores(tuple(cores["producers"]), cores["consumer"]),
    }
    return Plan(**(plan | made))


def _receive() -> int | None:
    line = sys.stdin.readline()
    return json.loads(line) if line else None


def _say(message: dict[str, Any]) -> None:
    print(json.dumps(message), flush=True)


if __name__ == "__main__":
    job = json.loads(sys.argv[1])
    serve(decode(job["plan"]), job["address"], job["number"], _receive, _say)
