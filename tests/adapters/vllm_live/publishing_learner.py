"""Publishes folders of weights as a learner would, in the environment of learners, on commands over stdin.

python tests/adapters/vllm_live/publishing_learner.py BRIDGE

publish VERSION FOLDER     answers "published VERSION"
half VERSION FOLDER        writes half of the tensors, answers "half", and waits to be killed
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from safetensors.numpy import load_file

from shmbridge.weights import WeightsWriter


def main(bridge: str) -> None:
    """Do as told until stdin ends."""
    with WeightsWriter(bridge) as writer:
        for line in sys.stdin:
            what, version, folder = line.split()
            tensors = load_file(Path(folder) / "model.safetensors")
            if what == "publish":
                writer.publish(int(version), tensors.items())
                print("published", version, flush=True)
                continue
            specs = [(name, tensor.dtype.name, tensor.shape) for name, tensor in tensors.items()]
            with writer.fill(int(version), specs) as filling:
                for name in list(tensors)[: len(tensors) // 2]:
                    filling.write(name, tensors[name])
                print("half", flush=True)
                time.sleep(600.0)


if __name__ == "__main__":
    main(sys.argv[1])
