"""`--compat strict` beside the original: the same scripted requests, the same answers, word for word and in
the same order.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

import pytest
from gateway_clients import RUN, Api, GatewayProcess, UpstreamProcess, group

Step = tuple[str, str, Any]


def answers(api: Api, steps: list[Step]) -> Iterator[tuple[Step, int, Any]]:
    """A server's answer to each request; for /register, whose number is random, only that there is one."""
    for method, path, body in steps:
        answer = api.post(path, body) if method == "POST" else api.get(path, body)
        said = answer.json() if answer.headers["content-type"].startswith("application/json") else answer.text
        if path == "/register" and answer.status_code == 200:
            assert 0 < said.pop("uuid") < 1 << 128
        yield (method, path, body), answer.status_code, said


def same(upstream: Api, strict: Api, steps: list[Step]) -> None:
    for (step, *there), (_, *here) in zip(answers(upstream, steps), answers(strict, steps), strict=True):
        assert here == there, json.dumps(step)[:200]


def script(seed: int) -> list[Step]:
    """Environments of several sizes, with and without guarantees, that come, post, ask and go, and a trainer
    that polls.
    """
    rng = random.Random(seed)
    batch = rng.choice([8, 16, 32])
    steps: list[Step] = [("POST", "/register", RUN | {"batch_size": batch}), ("GET", "/batch", None)]
    envs: list[int] = []
    for number in range(rng.randint(1, 4)):
        size = rng.choice([2, 4, 4, 8])
        wish = {
            "max_token_length": rng.choice([64, 128]),
            "desired_name": rng.choice("ab"),
            "weight": rng.choice([0.5, 1.0, 2.0]),
            "group_size": size,
            "min_batch_allocation": rng.choice([None, None, 0.25, 0.5, 0.9]),
        }
        steps.append(("POST", "/register-env", wish))
        envs.append(size)
    for mark in range(rng.randint(20, 45)):
        env_id = rng.randrange(len(envs))
        rows = envs[env_id] if rng.random() < 0.8 else rng.choice([1, 2, 4, 8])
        posted = group(mark, rows, env_id=None if rng.random() < 0.05 else env_id)
        what = rng.random()
        if what < 0.7:
            steps.append(("POST", "/scored_data", posted))
        elif what < 0.8:
            steps.append(
                ("POST", "/scored_data_list", [posted, group(1000 + mark, envs[env_id], env_id=env_id)])
            )
        if rng.random() < 0.4:
            steps.append(("GET", "/status-env", {"env_id": rng.randrange(len(envs))}))
        if rng.random() < 0.3:
            steps.append(("GET", "/batch", None))
        if rng.random() < 0.2:
            steps.append(("GET", rng.choice(["/status", "/info", "/wandb_info", "/latest_example"]), None))
        if rng.random() < 0.04:
            steps.append(("POST", "/disconnect-env", {"env_id": rng.randrange(len(envs) + 1)}))
    steps += [("GET", "/batch", None)] * 12
    return [*steps, ("GET", "/status", None), ("GET", "/latest_example", None)]


def test_scripted_arrivals(upstream: UpstreamProcess, strict: GatewayProcess):
    """A dozen of them on one gateway, with a reset between."""
    for seed in range(12):
        same(upstream, strict, [*script(seed), ("GET", "/reset_data", None)])
        assert strict.stats()["bridge_held"] == 0


@pytest.mark.parametrize("seed", [100, pytest.param(101, marks=pytest.mark.long)])
def test_scripted_arrivals_over_a_restart(upstream: UpstreamProcess, strict: GatewayProcess, seed: int):
    """Killed in the middle: the original, which is not killed, cannot be told from it.

    What it had formed ahead it forms again.
    """
    steps = [step for step in script(seed) if step[1] != "/latest_example"]
    middle = next(place for place, step in enumerate(steps) if place > 12 and step[1] == "/scored_data")
    same(upstream, strict, steps[:middle])
    while not upstream_has_none_ready(upstream, strict):
        pass
    strict.restart()
    same(upstream, strict, steps[middle:])


def upstream_has_none_ready(upstream: Api, strict: Api) -> bool:
    """Polls both once; returns whether there was no batch, so that none is formed ahead."""
    there, here = upstream.batch(), strict.batch()
    assert here == there
    return there is None


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.long) for seed in (1, 2))])
def test_odd_orders_of_registration(upstream: UpstreamProcess, strict: GatewayProcess, seed: int):
    """Posts before a registration, polls after a reset, resets of nothing, environments before the trainer:
    odd there, and so here.
    """
    rng = random.Random(seed)
    wish = {
        "max_token_length": 64,
        "desired_name": "e",
        "weight": 1.0,
        "group_size": 4,
        "min_batch_allocation": None,
    }
    choices: list[Step] = [
        ("GET", "/batch", None),
        ("GET", "/reset_data", None),
        ("POST", "/register", RUN),
        ("POST", "/register", RUN | {"batch_size": 4}),
        ("POST", "/register-env", wish),
        ("GET", "/info", None),
        ("GET", "/wandb_info", None),
        ("GET", "/status", None),
        ("GET", "/status-env", {"env_id": 0}),
        ("POST", "/disconnect-env", {"env_id": 0}),
        ("POST", "/scored_data", group(1, env_id=0)),
        ("POST", "/scored_data", group(2)),
        ("GET", "/latest_example", None),
    ]
    same(upstream, strict, [rng.choice(choices) for _ in range(60)])


def test_groups_have_only_the_fourteen_keys(upstream: UpstreamProcess, strict: GatewayProcess):
    """The original drops keys that it does not know; a key that it knows is always there, null where it was
    absent.
    """
    full = group(
        1,
        4,
        env_id=0,
        seed=3,
        messages=[[{"role": "user", "content": "é"}]] * 4,
        overrides=[{"a": 1}] * 4,
        group_overrides={},
        generation_params={"temperature": 0.5, "stop": None},
        images=[None, "x", ["y"], None],
        advantages=[],
        inference_logprobs=[[-0.5, -0.25, 1.0]] * 4,
        distill_token_ids=[[[1, 2]] * 3] * 4,
        distill_logprobs=[[[0.5, -1.5]] * 3] * 4,
    )
    same(
        upstream,
        strict,
        [
            ("POST", "/register", RUN | {"batch_size": 8}),
            ("POST", "/scored_data", full),
            ("POST", "/scored_data", group(2)),
            ("GET", "/latest_example", None),
            ("GET", "/batch", None),
        ],
    )
