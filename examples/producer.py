"""Puts a group into a bridge ten times a second. Kill it and start it again: what it has put stays.

python examples/producer.py [BRIDGE]        # default: run1; consumer.py is the other side
"""

import sys
import time

import shmbridge

bridge = sys.argv[1] if len(sys.argv) > 1 else "run1"
with shmbridge.Producer(bridge, env_name="count", lane_bytes="1M") as producer:
    for number in range(50):
        group = {
            "tokens": [[1, 2, number], [1, 3]],  # two rollouts of one prompt, which is token 1
            "loss_mask": [[0, 1, 1], [0, 1]],  # 1: sampled, and to be trained
            "score": [1.0, 0.0],
        }
        print("put", number, "as record", producer.put(group, group_id=number), flush=True)
        time.sleep(0.1)
print("the groups that nobody has taken wait in shared memory for the next consumer")
