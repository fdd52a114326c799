"""A relay that writes weights and dies in the middle: python write_weights.py BRIDGE HEAD PART... (files).

It says when it has written the parts, and waits to be killed.
"""

import sys
import time
from pathlib import Path

import numpy as np

from shmbridge.relay.weights import WeightsReceiver, decode_head

bridge, head, *parts = sys.argv[1:]
inward = WeightsReceiver(bridge)
about = decode_head(Path(head).read_bytes())
assert inward.begin(about)
for number, part in enumerate(parts):
    inward.write(about.transfer, number, np.fromfile(part, np.uint8))
print("written", flush=True)
time.sleep(600)
