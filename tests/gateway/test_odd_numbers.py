"""What makes no sense in a registration or a question is refused to whoever says it, and to nobody else."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from gateway_clients import RUN, GatewayProcess

ENV = {"max_token_length": 64, "desired_name": "env", "weight": 1.0, "group_size": 4}
BEYOND = 1 << 70


@pytest.mark.parametrize("mode", ["default", "strict"])
def test_only_who_says_it_is_refused(start_gateway: Callable[..., GatewayProcess], mode: str):
    gateway = start_gateway("--compat", mode)
    for field in ("batch_size", "max_token_len", "starting_step", "num_steps", "save_checkpoint_interval"):
        assert gateway.post("/register", RUN | {field: BEYOND}).status_code == 422, field
    assert gateway.post("/register", RUN | {"wandb_group": "\ud800"}).status_code == 422
    gateway.start()
    number = gateway.register_env()["env_id"]
    for field, value in (("group_size", BEYOND), ("max_token_length", BEYOND), ("desired_name", "\ud800")):
        assert gateway.post("/register-env", ENV | {field: value}).status_code == 422, field
    for path, ask in (("/status-env", gateway.get), ("/disconnect-env", gateway.post)):
        assert ask(path, {"env_id": BEYOND}).status_code == 422
        assert ask(path, data='{"env_id": 1e999}', headers={"content-type": "application/json"}).status_code == 422
    assert gateway.env_status(number)["env_weight"] == 1.0
    assert gateway.register_env()["wandb_name"] == "env_1"
    assert gateway.post("/disconnect-env", {"env_id": number}).json() == {"status": "success"}
    assert gateway.get("/info").json() == {"batch_size": RUN["batch_size"], "max_token_len": RUN["max_token_len"]}
