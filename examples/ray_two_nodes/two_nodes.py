"""Two nodes of a Ray cluster, both on this machine: an environment on one, its learner on the other.

    python examples/ray_two_nodes/two_nodes.py        # needs shmbridge[ray]

The environment is ../numpy_env.py, unedited: Ray starts it on the node with the label. `shmbridge relay`
brings its groups to the learner's node, and versions and weights back. The mean score rises; then all ends.
"""

import os
import subprocess
import sys
from pathlib import Path

os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}  # all on 127.0.0.1

import numpy as np
import ray
from ray.cluster_utils import Cluster

import shmbridge
from shmbridge.weights import WeightsWriter

ENVIRONMENT, VOCABULARY, RATE = Path(__file__).parents[1] / "numpy_env.py", 16, 8.0
STEPS, ENOUGH = 600, 0.95  # it ends with the first
BRIDGE = f"two-nodes-{os.getpid()}"
# Nodes of a real cluster have one name for the bridge. These two share one machine's memory: the label
# `shmbridge-suffix` tells their bridges apart.
THERE = f"{BRIDGE}-env"
LEARNER = {"shmbridge": "learner", "shmbridge-name": "learner"}
ENVIRONMENTS = {"shmbridge": "environments", "shmbridge-name": "env-1", "shmbridge-suffix": "-env"}


def start_cluster() -> Cluster:
    """Starts what `ray start --labels=...` starts on two machines."""
    options = {"num_cpus": 1, "object_store_memory": 100 << 20}
    cluster = Cluster(initialize_head=True, head_node_args=options | {"labels": LEARNER})
    cluster.add_node(**options, labels=ENVIRONMENTS)
    ray.init(address=cluster.address, log_to_driver=False, logging_level="error")
    return cluster


@ray.remote(label_selector={"shmbridge": "environments"})
def play(bridge: str) -> str:
    """Runs the environment until its learner's run is over; returns what it prints."""
    command = [sys.executable, ENVIRONMENT, bridge, "1000000"]
    return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout.strip()


def gradient(batch: shmbridge.Batch, table: np.ndarray) -> np.ndarray:
    """The policy gradient of a table, token -> logits of the next token."""
    trained = np.flatnonzero(batch.loss_mask)
    before, sampled = batch.tokens[trained - 1], batch.tokens[trained]
    means = np.bincount(batch.group_index, batch.scores) / np.bincount(batch.group_index)
    rows = np.searchsorted(batch.cu_seqlens, trained, side="right") - 1
    better = (batch.scores - means[batch.group_index])[rows]
    pull = -np.exp(table[before] - np.logaddexp.reduce(table[before], axis=1, keepdims=True))
    pull[np.arange(len(sampled)), sampled] += 1
    up = np.zeros_like(table)
    np.add.at(up, before, better[:, None] * pull)
    return up / len(batch.scores)


def learn(consumer: shmbridge.Consumer, weights: WeightsWriter) -> None:
    """A learner's loop as on one node: nothing in it knows of the other."""
    table, mean = np.zeros((VOCABULARY, VOCABULARY), np.float32), 0.0
    for step, batch in enumerate(consumer.batches(groups=4, max_staleness=8, timeout_s=60), start=1):
        with batch:
            table += RATE * gradient(batch, table)
            weights.publish(step, {"weight": table}.items())
            consumer.publish_policy_version(step)
        mean += (batch.scores.mean() - mean) / 5
        if step % 20 == 0 or mean > ENOUGH:
            meta = batch.meta[0]
            sampled = max(meta.min_policy_version, 0)
            print(
                f"step {step}: mean score {mean:.2f}; {meta.origin.node} sampled with version {sampled}",
                flush=True,
            )
        if step == STEPS or mean > ENOUGH:
            return


def main() -> None:
    cluster = start_cluster()
    relay = [sys.executable, "-m", "shmbridge", "relay", "--bridge", BRIDGE, "--address", cluster.address]
    try:
        with shmbridge.Consumer(BRIDGE) as consumer, WeightsWriter(BRIDGE) as weights:
            with subprocess.Popen([*relay, "--learner-label", "shmbridge=learner"]) as relaying:
                played = play.remote(THERE)
                learn(consumer, weights)
                consumer.drain()  # the run is over, there too: the environment ends
                print(f"the environment: {ray.get(played, timeout=60)}")
                relaying.terminate()
            subprocess.run([*relay, "--stop"], check=True, stdout=subprocess.DEVNULL)
    finally:
        ray.shutdown()
        cluster.shutdown()
        for bridge in (BRIDGE, THERE):  # groups that were put after the last step
            shmbridge.clean(bridge, dry_run=False)


if __name__ == "__main__":
    main()
