"""The API from outside, as trainers and environments use it: every route, in both modes."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from gateway_clients import RUN, Api, GatewayProcess, group, marks

KEYS = [
    "tokens",
    "masks",
    "scores",
    "advantages",
    "ref_logprobs",
    "messages",
    "generation_params",
    "inference_logprobs",
    "overrides",
    "group_overrides",
    "images",
    "env_id",
    "distill_token_ids",
    "distill_logprobs",
]


@pytest.fixture(params=["default", "strict"])
def api(shared_gateway: Callable[..., GatewayProcess], request: pytest.FixtureRequest) -> GatewayProcess:
    return shared_gateway("--compat", request.param)


@pytest.fixture
def gateway(shared_gateway: Callable[..., GatewayProcess]) -> GatewayProcess:
    return shared_gateway("--compat", "default")


@pytest.mark.parametrize("mode", ["default", "strict"])
def test_routes_answer_before_anybody_registers(start_gateway: Callable[..., GatewayProcess], mode: str):
    api = start_gateway("--compat", mode)
    assert api.get("/").status_code == 200
    assert api.get("/info").json() == {"batch_size": -1, "max_token_len": -1}
    assert api.get("/wandb_info").json() == {"group": None, "project": None}
    assert api.get("/status").json() == {"current_step": 0, "queue_size": 0}
    assert api.get("/batch").json() == {
        "status": "error",
        "message": "Trainer not registered. Call /register first.",
        "batch": [],
    }
    assert api.register_env() == {"status": "wait for trainer to start"}
    assert api.get("/latest_example").json()["tokens"] == []
    assert api.post("/disconnect-env", {"env_id": 3}).json()["status"] == "failure"
    assert api.get("/reset_data").text == "Reset successful"


def test_the_first_registration_holds_until_a_reset(api: Api):
    first = api.register()
    assert 0 < first < 1 << 128
    assert api.register(batch_size=99, wandb_group="other") != first
    assert api.get("/info").json() == {"batch_size": 8, "max_token_len": 64}
    assert api.get("/wandb_info").json() == {"group": "group", "project": "project"}
    api.get("/reset_data")
    assert api.get("/info").json()["batch_size"] == -1
    assert api.get("/wandb_info").json() == {"group": None, "project": None}
    api.register(batch_size=99, starting_step=7)
    assert api.get("/info").json()["batch_size"] == 99
    assert api.get("/status").json()["current_step"] == 7


def test_every_field_of_a_registration_is_wanted(gateway: GatewayProcess):
    for left_out in RUN:
        for wrong in ({key: value for key, value in RUN.items() if key != left_out}, RUN | {left_out: None}):
            assert gateway.post("/register", wrong).status_code == 422


def test_a_request_that_fits_nothing_names_what_fits(gateway: GatewayProcess):
    """An unknown path, a wrong method, a form, a wrong value in a list."""
    good = {"tokens": [[1, 2]], "masks": [[1, 2]], "scores": [1.0]}
    form = {"content-type": "application/x-www-form-urlencoded"}
    for answer, status, named in [
        (gateway.post("/scored-data", {}), 404, "/scored_data"),
        (gateway.get("/xyzzy"), 404, "docs/reference/gateway.md"),
        (gateway.get("/scored_data"), 405, "POST /scored_data"),
        (gateway.post("/register", data="{}", headers=form), 422, "application/json"),
        (gateway.post("/scored_data_list", [good, good | {"scores": ["x"]}]), 422, "group 1: scores[0]"),
    ]:
        assert (answer.status_code, named in answer.json()["detail"]) == (status, True), answer.text


def test_environments_get_names_numbers_and_the_run(api: Api):
    api.start(starting_step=3)
    admitted = [api.register_env(name) for name in ("a", "b", "a")]
    assert [each["env_id"] for each in admitted] == [0, 1, 2]
    assert [each["wandb_name"] for each in admitted] == ["a_0", "b_0", "a_1"]
    assert {
        key: admitted[0][key]
        for key in ("status", "checkpoint_dir", "starting_step", "checkpoint_interval", "num_steps")
    } == {
        "status": "success",
        "checkpoint_dir": "/ckpt",
        "starting_step": 3,
        "checkpoint_interval": 5,
        "num_steps": 100,
    }
    wish = {"max_token_length": 1, "desired_name": None, "weight": 1.0, "group_size": 1}
    assert api.post("/register-env", wish).status_code == 422
    assert api.post("/disconnect-env", {"env_id": 1}).json() == {"status": "success"}
    assert api.env_status(0)["env_weight"] == 0.5


def test_a_share_above_one_is_refused(gateway: GatewayProcess):
    gateway.start()
    wish = {
        "max_token_length": 1,
        "desired_name": "e",
        "weight": 1.0,
        "group_size": 1,
        "min_batch_allocation": 7.0,
    }
    answer = gateway.post("/register-env", wish)
    assert (answer.status_code, "min_batch_allocation" in answer.text) == (422, True)


def test_an_environment_steers_by_its_status(api: Api):
    api.start(batch_size=16)
    one, other = (
        api.register_env("one", weight=3.0)["env_id"],
        api.register_env("other", share=0.25)["env_id"],
    )
    for mark in range(3):
        api.put(mark, env_id=one)
    assert api.env_status(one) == {
        "current_step": 0,
        "queue_size": 3,
        "unallocated_fraction": 0.75,
        "self_queue_size": 3,
        "max_group_size": 4,
        "env_weight": 0.75,
    }
    answer = api.env_status(other)
    assert (answer["queue_size"], answer["self_queue_size"], answer["env_weight"]) == (3, 0, 0.25)


FULL = {
    "advantages": [[0.5, -0.25, 0.0]] * 4,
    "ref_logprobs": [],
    "messages": [[{"role": "user", "content": "é", "reward": 0.5}]] * 4,
    "generation_params": {"temperature": 0.7, "stop": None},
    "inference_logprobs": [[1.0, -0.5, -2.0]] * 4,
    "overrides": [{"set_advantage_to_zero": True}, {}, {}, {}],
    "group_overrides": {},
    "images": [None, ["a", "b"], "c", {"d": 1}],
    "distill_token_ids": [[[1, 2], [3, 4], [5, 6]]] * 4,
    "distill_logprobs": [[[0.5, -0.5], [0.0, 1.0], [-1.0, -2.0]]] * 4,
}


FORMS: list[dict[str, Any]] = [
    {},
    FULL,
    dict.fromkeys(FULL),
    {"images": "one for all"},
    {"overrides": [{"of": "another length"}]},
]


def test_a_group_comes_back_as_it_was_posted(gateway: GatewayProcess):
    """All fourteen keys, null, [] and {} told apart."""
    gateway.start(batch_size=4)
    for mark, more in enumerate(FORMS):
        posted = group(mark, 4, **more)
        assert gateway.post("/scored_data", posted).json() == {"status": "received"}
        expected = dict.fromkeys(KEYS) | posted
        assert gateway.get("/latest_example").json() == expected
        (served,) = gateway.batch()
        assert served == expected
        assert list(served) == KEYS


def test_rows_of_unequal_length_pass(api: Api):
    """Upstream does not check lengths; unequal rows are carried as they are."""
    api.start(batch_size=4)
    posted = group(1, 4, advantages=[[0.5], [], [1.0, 2.0], [0.25]], inference_logprobs=[[-0.5, 1.0, -0.5]])
    posted["masks"][0] = [-100]
    posted["masks"][1] = [-100, 77, 3]  # no token id of the row
    api.post("/scored_data", posted)
    (served,) = api.batch()
    assert {key: served[key] for key in posted} == posted


def test_lists_of_groups_are_taken(api: Api):
    api.start(batch_size=8)
    assert api.post("/scored_data_list", [group(0), group(1)]).json() == {
        "status": "received",
        "groups_processed": 2,
    }
    assert api.post("/scored_data_list", []).json() == {"status": "received", "groups_processed": 0}
    assert api.batch_marks() == [0, 1]
    assert api.get("/status").json() == {"current_step": 1, "queue_size": 0}


def test_content_type_is_not_asked_for(gateway: GatewayProcess):
    """Older clients do not send the header."""
    assert gateway.post("/register", data=json.dumps(RUN)).status_code == 200
    assert gateway.post("/scored_data", data=json.dumps(group(0))).status_code == 200


def test_a_long_batch_passes_both_ways(shared_gateway: Callable[..., GatewayProcess]):
    """More than any socket's buffer, in both directions."""
    gateway = shared_gateway(lane_bytes="32M")
    gateway.start(batch_size=4)
    rows = [list(range(100_000))] * 4
    posted = {"tokens": rows, "masks": rows, "scores": [1.0] * 4, "advantages": [[0.125] * 100_000] * 4}
    assert gateway.post("/scored_data", posted).status_code == 200
    (served,) = gateway.batch()
    assert all(served[key] == posted[key] for key in posted)
    assert marks([served]) == [0]
