"""A gateway with `--record` has in its files what it has handed out, also after it is killed."""

from __future__ import annotations

import pytest

from shmbridge import Producer
from shmbridge.archive.reading import read_archive


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
