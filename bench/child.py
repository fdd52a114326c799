"""A producer's process: makes its groups and its Writer, says that it is ready, then writes as many groups as
it is asked for, again and again. Started by shmbridge.bench.session.
"""

import os
import time
from multiprocessing.connection import Connection
from typing import Any

from shmbridge.bench import baselines, groups
from shmbridge.bench.contract import Plan
from shmbridge.bench.groups import Form

# How a contender's prepare() wants its groups, whatever form the plan names: transports of bytes and of
# tensors have no lists.
FORM: Form = "arrays"


def serve(plan: Plan, address: Any, number: int, session: "Connection[float, int]") -> None:
    """Sends 0 when ready; then for each count received writes that many groups.

    For 0 it sends the CPU seconds since the last count, so that they include what threads of the transport
    did after the last write. Ends with the session.
    """
    os.sched_setaffinity(0, {plan.cores.of_producer(number)})
    contender = baselines.load(plan.contender)
    writer = contender.Writer(address, plan)
    form = plan.form if plan.contender == baselines.RING else FORM
    ready = writer.prepare(groups.sources(plan.shape, form))
    session.send(0.0)
    began = time.process_time()
    try:
        while True:
            if count := session.recv():
                began = time.process_time()
                writer.write(ready, count)
            else:
                session.send(time.process_time() - began)
    except EOFError:
        writer.close()
