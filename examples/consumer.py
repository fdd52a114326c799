"""Takes the groups of a bridge one by one. Kill it with `kill -9` and start it again: no group is lost.

    python examples/consumer.py [BRIDGE [SECONDS]]        # default: run1 30; producer.py is the other side

The group that it had in hand comes again, marked. It ends once nothing has come for so many seconds.
"""

import sys
import time

import shmbridge


def main(bridge: str = "run1", seconds: str = "30") -> None:
    taken = 0
    with shmbridge.Consumer(bridge) as consumer:
        while True:
            try:
                record = consumer.get(timeout_s=float(seconds))
            except shmbridge.ConsumerEmpty:
                break
            with record:  # its end releases the record
                mark = " (again)" if record.meta.redelivered else ""
                print(
                    f"group {record.meta.group_id}{mark}: {record['tokens'][0]} {record['score']}", flush=True
                )
                time.sleep(0.1)  # work
            taken += 1
    print(taken, "groups taken")


if __name__ == "__main__":
    main(*sys.argv[1:])
