"""Remote environments that have fallen silent: they lose their lane to others, and after a longer time are
forgotten.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

import shmbridge
from shmbridge.consumers.gateway.environments import RemoteEnvs, StateFile
from shmbridge.consumers.gateway.limits import GatewayOptions
from shmbridge.httpd.door import Refused
from shmbridge.segments import lane_names

WISH = {"max_token_length": 64, "weight": 1.0, "group_size": 4, "min_batch_allocation": None}
SILENT_S, LANES = 60.0, 4  # one of them shared


@pytest.fixture
def begin(
    bridge: str, make_consumer: Callable[..., shmbridge.Consumer]
) -> Iterator[Callable[[], RemoteEnvs]]:
    """The table of a gateway beside a learner, after the one before has ended."""
    make_consumer(run=shmbridge.Run(batch_size=4, max_token_len=64))
    ends: list[Callable[[], None]] = []

    def end() -> None:
        while ends:
            ends.pop()()

    def begin() -> RemoteEnvs:
        end()
        state = StateFile(bridge)
        assert state.open()
        ends.append(state.close)
        options = GatewayOptions(bridge, lanes=LANES, lane_bytes="64K", env_timeout_s=SILENT_S)
        envs = RemoteEnvs(options, state, lambda lane: None)
        envs.restore()
        ends.append(envs.close)
        return envs

    yield begin
    end()


async def register(envs: RemoteEnvs, name: str = "env", weight: float = 1.0) -> Any:
    answer = await envs.register(WISH | {"desired_name": name, "weight": weight})
    assert answer["status"] == "success"
    return answer["env_id"]


async def pass_by(envs: RemoteEnvs, seconds: float) -> None:
    """Lets that much time pass without a request of any environment."""
    for env in envs._table.values():
        env.heard_s -= seconds
    await envs.let_the_silent_go()


async def test_the_lanes_of_the_silent_are_free(begin: Callable[[], RemoteEnvs], bridge: str):
    envs = begin()
    for _ in range(2 * LANES):
        await register(envs)
        await pass_by(envs, SILENT_S + 1)
    assert lane_names(bridge) == []
    for _ in range(LANES - 1):
        await register(envs)
    with pytest.raises(Refused, match="3 environments have lanes"):
        await register(envs)


async def test_an_environment_that_speaks_again_keeps_its_number(
    begin: Callable[[], RemoteEnvs], bridge: str
):
    envs = begin()
    number, other = await register(envs, weight=3.0), await register(envs)
    await pass_by(envs, SILENT_S + 1)
    assert (await envs.status(other))["env_weight"] == 1.0
    assert (await envs.status(number))["env_weight"] == 0.75
    assert len(lane_names(bridge)) == 2


async def test_an_environment_that_speaks_again_shares_a_lane_when_all_are_taken(
    begin: Callable[[], RemoteEnvs], bridge: str
):
    """No consumer would take from a lane of its own."""
    envs = begin()
    number = await register(envs, weight=3.0)
    await pass_by(envs, SILENT_S + 1)
    for _ in range(LANES - 1):
        await register(envs)
    assert envs.lane_of(number) is envs.shared
    assert (await envs.status(number))["env_weight"] == 0.5
    assert len(lane_names(bridge)) == LANES - 1


async def test_a_gateway_that_is_started_again_opens_no_lanes_for_the_silent(
    begin: Callable[[], RemoteEnvs], bridge: str
):
    envs = begin()
    for _ in range(LANES):
        number = await register(envs, weight=3.0)
        await pass_by(envs, SILENT_S + 1)
    envs = begin()
    await register(envs, "new")
    assert len(lane_names(bridge)) == 1
    assert (await envs.status(number))["env_weight"] == 0.75
    assert len(lane_names(bridge)) == 2


async def test_environments_that_are_silent_for_long_leave_nothing(begin: Callable[[], RemoteEnvs]):
    """The same holds for posters that never registered. No number is given twice."""
    envs = begin()
    number = await register(envs)
    await envs.status(77)
    assert len(envs) == 2
    await pass_by(envs, SILENT_S + 1)
    assert len(envs) == 2
    await pass_by(envs, 60 * SILENT_S)
    assert len(envs) == 0
    envs = begin()
    assert len(envs) == 0
    assert await register(envs) > number
