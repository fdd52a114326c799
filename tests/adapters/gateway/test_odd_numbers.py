"""Senseless numbers in a registration or a request are refused; other clients notice nothing."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
from gateway_clients import RUN, GatewayProcess

from shmbridge.consumers.gateway.bodies import read_post
from shmbridge.httpd.door import Refused

ENV = {"max_token_length": 64, "desired_name": "env", "weight": 1.0, "group_size": 4}
BEYOND = 1 << 70


def post_of(**columns: object) -> bytes:
    return json.dumps({"tokens": [["1", 2]], "masks": [[-100, 2.0]], "scores": [1.0]} | columns).encode()


def test_numbers_as_text_are_numbers_as_they_are_to_the_server():
    floats = {name: [["-0.5", 1]] for name in ("advantages", "ref_logprobs", "inference_logprobs")}
    body = post_of(scores=["1.5"], **floats, distill_logprobs=[[["-1e-1"], [0]]], env_id="3")
    (said,) = read_post(body, many=False, extras=True).groups
    assert said["scores"] == [1.5]
    assert all(said[name] == [[-0.5, 1.0]] for name in floats)
    assert (said["tokens"], said["masks"], said["distill_logprobs"], said["env_id"]) == (
        [[1, 2]],
        [[-100, 2]],
        [[[-0.1], [0.0]]],
        3,
    )


@pytest.mark.parametrize(
    "wrong", ["nan", "inf", "-Infinity", "1e999", " 1", "+1", "one", "", True, None, [1.0]], ids=str
)
def test_text_of_no_number_is_refused_by_column(wrong: object):
    for columns in ({"scores": [wrong]}, {"advantages": [[0.5, wrong]]}):
        with pytest.raises(Refused, match=next(iter(columns))) as caught:
            read_post(post_of(**columns), many=False, extras=False)
        assert caught.value.status == 422


@pytest.mark.parametrize(
    "body",
    [
        json.dumps({str(key): 0 for key in range(50_000)}),
        json.dumps({"k" * 500_000: 0}),
        json.dumps({"k" * 9000: {"l" * 9000: float("nan")}}),
    ],
    ids=["keys", "key", "path"],
)
def test_a_refusal_is_short_whatever_it_names(body: str):
    with pytest.raises(Refused) as caught:
        read_post(body.encode(), many=False, extras=True)
    assert len(caught.value.detail) < 2100
    assert caught.value.detail.count(" -> ") == 1


@pytest.mark.parametrize("column", ["tokens", "advantages"])
def test_null_as_text_is_no_column_that_is_left_out(column: str):
    with pytest.raises(Refused, match=f"{column}: 'null' is not a list -> "):
        read_post(post_of(**{column: "null"}), many=False, extras=False)


@pytest.mark.parametrize("mode", ["default", "strict"])
def test_only_the_sender_of_a_senseless_number_is_refused(
    shared_gateway: Callable[..., GatewayProcess], mode: str
):
    gateway = shared_gateway("--compat", mode)
    for field in ("batch_size", "max_token_len", "starting_step", "num_steps", "save_checkpoint_interval"):
        assert gateway.post("/register", RUN | {field: BEYOND}).status_code == 422, field
    assert gateway.post("/register", RUN | {"wandb_group": "\ud800"}).status_code == 422
    gateway.start()
    number = gateway.register_env()["env_id"]
    for field, value in (("group_size", BEYOND), ("max_token_length", BEYOND), ("desired_name", "\ud800")):
        assert gateway.post("/register-env", ENV | {field: value}).status_code == 422, field
    for path, ask in (("/status-env", gateway.get), ("/disconnect-env", gateway.post)):
        assert ask(path, {"env_id": BEYOND}).status_code == 422
        assert (
            ask(path, data='{"env_id": 1e999}', headers={"content-type": "application/json"}).status_code
            == 422
        )
    assert gateway.env_status(number)["env_weight"] == 1.0
    assert gateway.register_env()["wandb_name"] == "env_1"
    assert gateway.post("/disconnect-env", {"env_id": number}).json() == {"status": "success"}
    assert gateway.get("/info").json() == {
        "batch_size": RUN["batch_size"],
        "max_token_len": RUN["max_token_len"],
    }


@pytest.mark.parametrize("mode", ["default", "strict"])
def test_a_log_probability_that_is_none_costs_no_group_and_is_served_as_one(
    shared_gateway: Callable[..., GatewayProcess], mode: str
):
    """Null and vLLM's -9999 come as Atropos' mark, rounding above 0 as 0; never null among numbers."""
    gateway = shared_gateway("--compat", mode)
    gateway.start(batch_size=2)
    rows = [[None, -0.5, 1e-7], [1.0, -9999.0, -2.0]]
    for name in ("inference_logprobs", "ref_logprobs"):
        body = {"tokens": [[1, 2, 3]] * 2, "masks": [[-100, 2, 3]] * 2, "scores": [1.0, 0.0], name: rows}
        assert gateway.post("/scored_data", body).status_code == 200
        assert None not in gateway.get("/latest_example").json()[name][0]
        (served,) = gateway.batch()
        assert served[name] == [[1.0, -0.5, 0.0], [1.0, 1.0, -2.0]]
