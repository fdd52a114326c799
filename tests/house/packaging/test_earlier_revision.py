"""Two revisions on one bridge: each takes the groups and weights of the other.

The earlier revision is built from this repository's history, so these tests are `long`.
"""

import io
import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

import shmbridge

EARLIER = "bd76d61"  # before the modules were moved into folders
HERE = Path(shmbridge.__file__).parents[1]
GROUPS = 60

PUT = """
import sys
import numpy as np
import pyarrow as pa
import shmbridge

bridge, groups = sys.argv[1], int(sys.argv[2])
random = np.random.default_rng(7)
with shmbridge.Producer(bridge, env_name="two revisions", producer_id="p", lane_bytes="4M") as producer:
    for number in range(groups):
        lengths = random.integers(1, 40, 4)
        tokens = [random.integers(0, 1000, length).tolist() for length in lengths]
        group = {"tokens": tokens, "scores": random.random(4).tolist()}
        if number % 3 == 0:
            group["masks"] = [[-100] + row[1:] for row in tokens]
            group["messages"] = [[{"role": "user", "content": f"{number}"}]] * 4
            group["step_rewards"], group["step_ends"] = [[0.5]] * 4, [[len(row)] for row in tokens]
            group["distill_token_ids"] = [[[token, 1] for token in row] for row in tokens]
        elif number % 3 == 1:
            group["advantages"] = [random.standard_normal(length, dtype=np.float32) for length in lengths]
            group["reward_components"] = [{"format": 0.25, "answer": float(n)} for n in range(4)]
        else:
            flat = np.concatenate([np.array(row, np.int32) for row in tokens])
            group = {"tokens": (flat, lengths), "score": group["scores"]}
        producer.put(group, group_id=f"g{number}", policy_version=(number // 2, number))
    print(producer.policy_version, flush=True)
    producer.close(drain=True, timeout_s=60)
"""

TAKE = """
import hashlib
import json
import sys
import shmbridge

bridge, groups = sys.argv[1], int(sys.argv[2])
seen = hashlib.sha256()
with shmbridge.Consumer(bridge, run=shmbridge.Run(batch_size=4)) as consumer:
    consumer.publish_policy_version(17)
    print("ready", flush=True)
    for _ in range(groups):
        with consumer.get(timeout_s=60) as record:
            meta = record.meta
            said = [meta.env_name, meta.group_id, meta.sequence, meta.min_policy_version,
                    meta.max_policy_version, meta.redelivered, sorted(record.columns),
                    record.to_scored_data()]
            seen.update(json.dumps(said, default=str, sort_keys=True).encode())
    counts = consumer.stats()
print(json.dumps([seen.hexdigest(), counts["records_total"], counts["lanes_quarantined"]]))
"""

PUBLISH = """
import sys
import numpy as np
from shmbridge.weights import WeightsWriter

with WeightsWriter(sys.argv[1]) as writer:
    for version in range(3):
        tensors = {"a.weight": np.full((5, 7), version, np.float32), "b": np.arange(version, version + 9)}
        writer.publish(version, tensors.items())
    print("ready", flush=True)
    sys.stdin.read()
"""

READ = """
import sys
from shmbridge.weights import WeightsReader

with WeightsReader(sys.argv[1]) as reader:
    reader.wait(None, 30)
    with reader.lease() as lease:
        print(lease.version, {name: lease.tensors[name].tolist() for name in sorted(lease.tensors)})
"""


@pytest.fixture(scope="module")
def earlier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The earlier revision, its extensions built in place."""
    archive = subprocess.run(["git", "-C", str(HERE), "archive", EARLIER], capture_output=True, check=False)
    if archive.returncode:
        pytest.skip(f"needs the history: git has no {EARLIER}")
    tree = tmp_path_factory.mktemp("earlier")
    with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as files:
        files.extractall(tree, filter="data")
    subprocess.run(
        [sys.executable, "setup.py", "--quiet", "build_ext", "--inplace"], cwd=tree, check=True, timeout=400
    )
    return tree


@pytest.fixture
def start(bridge: str):
    """Starts a program with a tree's shmbridge; ended at the end."""
    begun: list[subprocess.Popen[str]] = []

    def begin(tree: Path, program: str, *arguments: str) -> subprocess.Popen[str]:
        check = f"import shmbridge; assert shmbridge.__file__.startswith({str(tree)!r}), shmbridge.__file__\n"
        begun.append(
            subprocess.Popen(
                [sys.executable, "-c", check + program, bridge, *arguments],
                env={**os.environ, "PYTHONPATH": str(tree)},
                cwd="/",
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
        )
        return begun[-1]

    yield begin
    for process in begun:
        process.kill()
        process.communicate()


@pytest.mark.long
@pytest.mark.timeout(600)
def test_groups_of_one_revision_are_the_same_in_the_other(earlier, start, bridge) -> None:
    found = {}
    for puts in (HERE, earlier):
        for takes in (HERE, earlier):
            consumer = start(takes, TAKE, str(GROUPS))
            assert consumer.stdout.readline() == "ready\n"
            producer = start(puts, PUT, str(GROUPS))
            assert producer.communicate(timeout=120)[0] == "17\n", (
                "the producer did not see the policy version"
            )
            found[puts == HERE, takes == HERE] = json.loads(consumer.communicate(timeout=120)[0])
            assert (consumer.returncode, producer.returncode) == (0, 0)
            shmbridge.clean(bridge, dry_run=False)
    assert len({digest for digest, _, _ in found.values()}) == 1, found
    assert all(counts == [GROUPS, 0] for _, *counts in found.values()), found


@pytest.mark.long
@pytest.mark.timeout(600)
def test_weights_of_one_revision_are_read_by_the_other(earlier, start) -> None:
    for writes, reads in ((HERE, earlier), (earlier, HERE)):
        writer = start(writes, PUBLISH)
        assert writer.stdout.readline() == "ready\n"
        reader = start(reads, READ)
        said = reader.communicate(timeout=60)[0]
        b = list(range(2, 11))
        assert said == f"2 {{'a.weight': {[[2.0] * 7] * 5}, 'b': {b}}}\n"
        writer.communicate(timeout=60)
        assert (writer.returncode, reader.returncode) == (0, 0)
