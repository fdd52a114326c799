"""Faults of the Atropos server that lose data or end environments: shown there first, and absent at the
gateway.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

import pytest
from gateway_clients import RUN, Api, GatewayProcess, RawClient, UpstreamProcess, group, marks

Scenario = Callable[[Any], Any]
ITEMS: list[tuple[str, Scenario, Any, Any]] = []


def item(original: Any, here: Any) -> Callable[[Scenario], Scenario]:
    """A scenario's result at the original, and at the gateway."""

    def add(scenario: Scenario) -> Scenario:
        ITEMS.append((scenario.__name__, scenario, original, here))
        return scenario

    return add


def status_of(answer: Any) -> int:
    return int(answer.status_code)


@item(original=(0, [500, 500]), here=(6, [200, 200]))
def killed_and_restarted(api: Any) -> Any:
    """The queue is gone, and an environment whose number is unknown ends after three failures."""
    api.start(batch_size=24)
    env_id = api.register_env()["env_id"]
    for mark in range(6):
        api.put(mark, env_id=env_id)
    api.restart()
    alive = [status_of(api.get("/status-env", {"env_id": env_id})) for _ in range(2)]
    if isinstance(api, UpstreamProcess):
        api.start(batch_size=24)
    return len(api.batch() or ()), alive


@item(original=[2, 3], here=[0, 1])
def socket_dropped_before_the_answer_was_read(api: Any) -> Any:
    """A batch is popped before it is written."""
    api.start()
    for mark in range(4):
        api.put(mark)
        if mark == 1:
            client = RawClient(api)
            client.ask("/batch")
            client.read_head()
            client.reset()
    return api.batch_marks()


@item(original=([200, 500, 500], None), here=([422, 200, 200], [0, 1]))
def not_a_number(api: Any) -> Any:
    """One infinity takes a batch of good groups with it."""
    api.start()
    api.put(0)
    bad = json.dumps(group(9) | {"scores": [float("-inf"), 1.0, 2.0, 3.0]})
    statuses = [status_of(api.post("/scored_data", data=bad, headers={"content-type": "application/json"}))]
    if statuses == [422]:
        api.put(1)
    found = api.get("/batch")
    statuses += [status_of(found), status_of(api.get("/latest_example"))]
    return statuses, marks(found.json()["batch"]) if found.status_code == 200 else api.batch_marks()


@item(original=("buffered", None), here=("received", [7]))
def group_of_another_size(api: Any) -> Any:
    """The group is buffered for ever."""
    api.start()
    env_id = api.register_env(group_size=4)["env_id"]
    return api.put(7, rows=8, env_id=env_id)["status"], api.batch_marks()


@item(original=("buffered", None), here=("received", [9, 1]))
def normal_groups_after_a_large_one(api: Any) -> Any:
    """An environment's size grows to the largest group of it in the queue and never back; normal groups are
    parts from then on.
    """
    api.start(batch_size=12)
    api.put(9, rows=8, env_id=0)  # of an environment that goes on under its number after a reset
    assert api.register_env(group_size=4)["env_id"] == 0
    api.env_status(0)
    return api.put(1, rows=4, env_id=0)["status"], api.batch_marks()


@item(original=[None, None, None], here=[[0], [1], [2]])
def batch_that_cannot_be_filled_exactly(api: Any) -> Any:
    """Groups of 8 and batches of 12: null for ever."""
    api.start(batch_size=12)
    for mark in range(4):
        api.put(mark, rows=8)
    return [api.batch_marks() for _ in range(3)]


@item(original=[None, None], here=[[0], [1, 2]])
def group_larger_than_a_batch(api: Any) -> Any:
    """At the head of the queue it stops everything."""
    api.start()
    api.put(0, rows=16)
    api.put(1)
    api.put(2)
    return [api.batch_marks() for _ in range(2)]


@item(original=(-1, "error"), here=(8, [0, 1]))
def posts_before_the_trainer_registers(api: Any) -> Any:
    """The registration then sets nothing."""
    api.put(0)
    api.put(1)
    api.register()
    answer = api.get("/batch").json()
    return api.get("/info").json()["batch_size"], answer.get("status") or marks(answer["batch"])


@item(original=(-1, None), here=(8, [0, 1]))
def posts_between_reset_and_register(api: Any) -> Any:
    """A trainer that starts again while environments run gets nothing, ever."""
    api.start()
    api.get("/reset_data")
    api.put(0)
    api.put(1)
    api.register()
    return api.get("/info").json()["batch_size"], api.batch_marks()


@item(original=500, here=200)
def batch_after_reset(api: Any) -> Any:
    api.start()
    api.get("/reset_data")
    return status_of(api.get("/batch"))


@item(original=(500, None), here=(200, 0.01))
def weight_of_nothing(api: Any) -> Any:
    """-1 is documented as "to ignore", and divides by zero."""
    api.start()
    env_id = api.register_env(weight=-1.0)["env_id"]
    answer = api.get("/status-env", {"env_id": env_id})
    return status_of(answer), answer.json()["env_weight"] if answer.status_code == 200 else None


@item(original=500, here=200)
def unknown_environment(api: Any) -> Any:
    api.start()
    return status_of(api.get("/status-env", {"env_id": 77}))


@item(original=(200, 1), here=(422, 0))
def empty_group(api: Any) -> Any:
    """The empty group stays in the queue for ever."""
    api.start()
    answer = api.post("/scored_data", {"tokens": [], "masks": [], "scores": []})
    return status_of(answer), api.get("/status").json()["queue_size"]


@item(original=[0, 0, 1], here=[0, 1])
def post_whose_answer_was_lost(api: Any) -> Any:
    """The client sends it again, and it counts twice."""
    api.start(batch_size=4)
    client = RawClient(api)
    client.ask(
        "/scored_data", "content-type: application/json", body=json.dumps(group(0)).encode(), method="POST"
    )
    client.read_head()
    client.reset()
    api.put(0)
    api.put(1)
    found = []
    while (batch := api.batch_marks()) is not None:
        found += batch
    return sorted(found)


@item(original=[None, None], here=[[0, 1], [2, 3]])
def environment_with_a_guarantee_that_has_gone(api: Any) -> Any:
    """No batch is formed as long as it has nothing queued; the server never learns that it left."""
    api.start()
    gone = api.register_env("gone", share=0.5)["env_id"]
    stays = api.register_env("stays")["env_id"]
    if isinstance(api, GatewayProcess):
        api.post("/disconnect-env", {"env_id": gone})
    for mark in range(4):
        api.put(mark, env_id=stays)
    return [api.batch_marks() for _ in range(2)]


@item(original=[[4, 5], [2, 3], [0, 1]], here=[[0, 1], [2, 3], [4, 5]])
def order_of_batches(api: Any) -> Any:
    """The newest goes first, and the others age."""
    api.start()
    for mark in range(6):
        api.put(mark)
    return [api.batch_marks() for _ in range(3)]


@item(original=(3, 0), here=(1, 4))
def steps_counted_ahead(api: Any) -> Any:
    """One poll counts every batch that can be formed."""
    api.start()
    for mark in range(6):
        api.put(mark)
    api.batch()
    status = api.get("/status").json()
    return status["current_step"], status["queue_size"]


@item(original=None, here={"seed": 3, "note": {"a": [1]}})
def keys_nobody_knows(api: Any) -> Any:
    api.start(batch_size=4)
    api.put(0, seed=3, note={"a": [1]})
    (served,) = api.batch()
    return {key: served[key] for key in ("seed", "note")} if "seed" in served else None


@item(original=None, here=([[0.5, 0.25]] * 4, [[1, 3]] * 4))
def step_rewards(api: Any) -> Any:
    """There is no field for the rewards of a process reward model."""
    api.start(batch_size=4)
    api.put(0, step_rewards=[[0.5, 0.25]] * 4, step_ends=[[1, 3]] * 4)
    (served,) = api.batch()
    return (served["step_rewards"], served["step_ends"]) if "step_rewards" in served else None


@pytest.mark.parametrize(
    ("scenario", "expected"), [pytest.param(each[1], each[2], id=each[0]) for each in ITEMS]
)
def test_a_fault_shows_at_the_original(upstream: UpstreamProcess, scenario: Scenario, expected: Any):
    assert scenario(upstream) == expected


@pytest.mark.parametrize(
    ("scenario", "expected"), [pytest.param(each[1], each[3], id=each[0]) for each in ITEMS]
)
def test_a_fault_does_not_show_at_the_gateway(
    request: pytest.FixtureRequest, scenario: Scenario, expected: Any
):
    first = scenario is normal_groups_after_a_large_one  # wants the number 0, which no environment ever had
    gateway = request.getfixturevalue("start_gateway" if first else "shared_gateway")()
    assert scenario(gateway) == expected


def test_a_dead_environment_loses_its_weight(
    start_gateway: Callable[..., GatewayProcess], upstream: UpstreamProcess
):
    """A silent environment's weight does not count until it speaks again; at the original a dead one's counts
    for ever.
    """
    gateway = start_gateway("--env-timeout", "0.5")
    for api in (upstream, gateway):
        api.start()
        lives, dies = (api.register_env(name)["env_id"] for name in ("lives", "dies"))
        assert [api.env_status(each)["env_weight"] for each in (lives, dies)] == [0.5, 0.5]
    until_weight(gateway, lives, 1.0)
    assert gateway.env_status(dies)["env_weight"] == 0.5
    assert upstream.env_status(lives)["env_weight"] == 0.5


def until_weight(api: Api, env_id: int, weight: float) -> None:
    deadline = time.monotonic() + 30
    while api.env_status(env_id)["env_weight"] != weight:
        assert time.monotonic() < deadline, api.env_status(env_id)
        time.sleep(0.01)


def test_a_trainer_that_registers_again_after_a_restart_is_heard(gateway: GatewayProcess):
    """Another run replaces the run that an earlier gateway saved, so that saved state stops no trainer."""
    gateway.register(batch_size=8)
    gateway.restart()
    assert gateway.get("/info").json()["batch_size"] == 8
    gateway.register(batch_size=16)
    assert gateway.get("/info").json()["batch_size"] == 16
    gateway.register(batch_size=32)
    assert gateway.get("/info").json() == {"batch_size": 16, "max_token_len": RUN["max_token_len"]}
