"""A gateway with `--record` has in its files what it has handed out, also after it is killed."""

from __future__ import annotations

import pytest
from gateway_clients import group

from shmbridge import Producer
from shmbridge.archive.folder import read_archive


@pytest.mark.parametrize("compat", ["default", "strict"])
def test_what_is_handed_out_is_recorded(start_gateway, bridge, tmp_path, compat):
    gateway = start_gateway("--compat", compat, "--record", str(tmp_path / "records"))
    gateway.register(batch_size=4)
    gateway.start()
    with Producer(bridge, env_name="math", lane_bytes="1M") as producer:
        tokens = [[7, 1, 2]] * 4
        producer.put({"tokens": tokens, "masks": tokens, "scores": [1.0] * 4}, group_id="first")
        gateway.until_batch()
        gateway.end()
    assert [record.group_id for record in read_archive(tmp_path / "records")] == ["first"]


@pytest.mark.parametrize("compat", ["default", "strict"])
@pytest.mark.parametrize(
    ("asked", "served"), [((), [1, 3]), (("--split", "eval"), [0, 2]), (("--split", "both"), [0, 1, 2, 3])]
)
def test_a_trainer_that_polls_gets_the_train_split(start_gateway, bridge, compat, asked, served):
    gateway = start_gateway("--compat", compat, *asked)
    gateway.register(batch_size=len(served))
    gateway.start()
    with Producer(bridge, env_name="math", lane_bytes="1M") as producer:
        for number, split in enumerate(("eval", "train", "eval", "train")):
            producer.put(group(number, rows=1), split=split)
        assert gateway.until_batch() == served
