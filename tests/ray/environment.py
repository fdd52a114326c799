"""An environment: puts groups 0, 1, 2, ... into a bridge. Says its producer id, then how many it put.

python environment.py BRIDGE NAME GROUPS TOKENS PACE_S LANE_BYTES
"""

import sys
import time

import numpy as np

import shmbridge

bridge, name, groups, tokens, pace_s, lane_bytes = sys.argv[1:]
with shmbridge.Producer(bridge, name, lane_bytes) as producer:
    print(producer.producer_id, flush=True)
    for number in range(int(groups)):
        rows = np.full((4, int(tokens)), number, np.int32)
        producer.put(
            {
                "tokens": list(rows),
                "loss_mask": list(np.ones_like(rows, np.uint8)),
                "score": [float(number)] * 4,
            }
        )
        time.sleep(float(pace_s))
    print(number + 1, producer.policy_version, flush=True)
    sys.stdin.readline()  # stays until it is told to leave
