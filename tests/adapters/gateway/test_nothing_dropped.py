"""Every record that goes through a gateway is released explicitly: at the end none occupies room, and no
lease was dropped.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
from gateway_clients import GatewayProcess, group, marks

RECORDS, POSTED_AT_ONCE, ROWS_OF_A_BATCH = 10_000, 500, 2_000


@pytest.mark.parametrize("mode", [(), ("--compat", "strict")], ids=["default", "strict"])
def test_ten_thousand_records_pass_and_no_lease_is_dropped(
    start_gateway: Callable[..., GatewayProcess], mode: tuple[str, ...]
):
    gateway = start_gateway(*mode, lane_bytes="16M")
    gateway.start(batch_size=ROWS_OF_A_BATCH)
    taken: list[int] = []
    for first in range(0, RECORDS, POSTED_AT_ONCE):
        posted = [group(mark, rows=1) for mark in range(first, first + POSTED_AT_ONCE)]
        answer = gateway.post("/scored_data_list", posted)
        assert answer.json() == {"status": "received", "groups_processed": POSTED_AT_ONCE}
        while (batch := gateway.batch()) is not None:
            taken += marks(batch)
    assert taken == list(range(RECORDS))
    gateway.until("batches_out", 0)
    stats = gateway.stats()
    counted = ("records_total", "released_total", "leases_dropped_total", "leases_returned_total", "held")
    assert [stats[f"bridge_{name}"] for name in counted] == [RECORDS, RECORDS, 0, 0, 0]
