"""The same seeded environment over Atropos' own server and over a bridge: the same groups, the same
values.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shmbridge

pytestmark = pytest.mark.timeout(300)

pytest.importorskip("atroposlib")

ENV = Path(__file__).parent / "envs" / "seeded_env.py"
ITEMS = 40
RUN = shmbridge.Run(batch_size=4, max_token_len=4096, num_steps=100_000, wandb_group="g", wandb_project="p")
PER_TOKEN = ("advantages", "ref_logprobs", "inference_logprobs", "distill_logprobs")
FIELDS = {
    *(
        "tokens",
        "masks",
        "scores",
        "advantages",
        "ref_logprobs",
        "messages",
        "generation_params",
        "inference_logprobs",
    ),
    *("overrides", "group_overrides", "images", "env_id", "distill_token_ids", "distill_logprobs"),
}


class Server:
    """Upstream's `run-api` on a free port."""

    def __init__(self, log: Path) -> None:
        from shmbridge.bench.atropos_http import _free_port

        self.url = f"http://127.0.0.1:{_free_port()}"
        command = [
            str(Path(sys.executable).with_name("run-api")),
            "--host",
            "127.0.0.1",
            "--port",
            self.url.rpartition(":")[2],
        ]
        with log.open("wb") as output:
            self._process = subprocess.Popen(command, stdout=output, stderr=output)

    def ask(self, route: str, body: Any = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"{self.url}/{route}", data, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=20) as answer:
            return json.load(answer)

    def ready(self) -> bool:
        assert self._process.poll() is None
        try:
            return bool(self.ask("info"))
        except OSError:
            return False

    def end(self) -> None:
        self._process.terminate()
        self._process.wait(20)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    started = Server(tmp_path / "server.log")
    try:
        until(started.ready)
        yield started
    finally:
        started.end()


def until(holds: Callable[[], object], timeout_s: float = 90.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.fixture
def start_unattached(tmp_path: Path, tokenizer: str) -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    started: list[subprocess.Popen[bytes]] = []

    def start(url: str) -> subprocess.Popen[bytes]:
        flags = ("--env.tokenizer_name", tokenizer, "--env.items", str(ITEMS), "--env.wandb_name", "seeded")
        flags += ("--env.rollout_server_url", url)
        with (tmp_path / "unattached.log").open("wb") as output:
            started.append(
                subprocess.Popen(
                    [sys.executable, str(ENV), "serve", *flags],
                    stdout=output,
                    stderr=output,
                    env=os.environ | {"HF_HUB_OFFLINE": "1"},
                )
            )
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait()


def comparable(group: dict[str, Any]) -> dict[str, Any]:
    """The fields on which both paths must agree: upstream's, absent ones null as its server makes them,
    per-token floats as float32.
    """
    fields = {name: group.get(name) for name in FIELDS - {"env_id"}}
    return fields | {name: as_float32(fields[name]) for name in PER_TOKEN}


def as_float32(value: Any) -> Any:
    if isinstance(value, list):
        return [as_float32(each) for each in value]
    return float(np.float32(value)) if isinstance(value, float) else value


def identity(group: dict[str, Any]) -> tuple[int, int]:
    """The item and the part of it, which seeded_env writes into the first two tokens of every row."""
    return group["tokens"][0][0], group["tokens"][0][1]


def test_a_seeded_environment_gives_the_same_groups_over_http_and_over_a_bridge(
    bridge: str,
    server: Server,
    start_unattached: Callable[..., subprocess.Popen[bytes]],
    start_env: Callable[..., Any],
) -> None:
    over_http: dict[tuple[int, int], dict[str, Any]] = {}
    over_bridge: dict[tuple[int, int], dict[str, Any]] = {}
    names = (
        "batch_size",
        "max_token_len",
        "num_steps",
        "starting_step",
        "checkpoint_dir",
        "save_checkpoint_interval",
    )
    server.ask(
        "register",
        {name: getattr(RUN, name) for name in names}
        | {"wandb_group": RUN.wandb_group, "wandb_project": RUN.wandb_project},
    )
    server.ask("batch")  # lets environments in
    start_unattached(server.url)

    def poll_http() -> int:
        while batch := server.ask("batch")["batch"]:
            over_http.update({identity(group): group for group in batch})
        return len(over_http)

    with shmbridge.Consumer(bridge, run=RUN) as consumer:
        env = start_env("--env.items", str(ITEMS))

        def poll_bridge() -> int:
            for record in consumer.poll():
                with record:
                    group = record.to_scored_data()
                    assert identity(group) not in over_bridge
                    over_bridge[identity(group)] = group
            return len(over_bridge)

        made = ITEMS + ITEMS // 10  # one item in ten is a list of two groups
        larger = ITEMS // 10  # and one has twice the rows, which upstream's server buffers for ever
        env.until(lambda: (poll_http(), poll_bridge()) == (made - larger, made), timeout_s=90)

    assert {identity(group) for group in over_bridge.values()} - set(over_http) == {
        (item, 0) for item in range(4, ITEMS, 10)
    }
    for which, group in over_http.items():
        assert comparable(over_bridge[which]) == comparable(group), which
    carried = {name for group in over_bridge.values() for name in group} - FIELDS
    assert carried == {"seed", "parsed_actions"}  # what upstream's server drops
    assert not {name for group in over_http.values() for name in group} - FIELDS
