"""A gateway that is killed and restarted: queue, batches in delivery, trainer and environments are there
again.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from gateway_clients import GatewayProcess, RawClient

import shmbridge
from shmbridge.segments import gateway_directory

ROOT = Path(__file__).parents[3]
SEEDED = ROOT / "tests" / "adapters" / "atropos" / "envs" / "seeded_env.py"
MODES = pytest.mark.parametrize("mode", ["default", "strict"])


@pytest.fixture
def api(start_gateway: Callable[..., GatewayProcess], mode: str) -> GatewayProcess:
    return start_gateway("--compat", mode)


@MODES
def test_a_killed_gateway_has_everything_again(api: GatewayProcess, bridge: str):
    """Queue, registration, step, environments, and the two batches that were out."""
    api.start(starting_step=5)
    first, second = (api.register_env(name)["env_id"] for name in ("one", "two"))
    for mark in range(10):
        api.put(mark, env_id=first if mark % 2 else second)
    read = api.batch_marks()
    api.until("batches_out", 0)
    out = [RawClient(api) for _ in range(2)]
    for client in out:
        client.ask("/batch")
        client.read_answer()
    api.restart()
    assert api.get("/info").json()["batch_size"] == 8
    assert api.get("/wandb_info").json() == {"group": "group", "project": "project"}
    assert api.get("/status").json()["current_step"] == 6
    status = [api.env_status(env_id) for env_id in (first, second)]
    assert [each["env_weight"] for each in status] == [0.5, 0.5]
    assert api.register_env("one")["wandb_name"] == "one_1"
    api.put(10, env_id=first)
    api.put(11, env_id=second)
    lanes = [lane for info in shmbridge.list_bridges() if info.name == bridge for lane in info.lanes]
    assert {lane.env_name for lane in lanes if lane.alive and lane.records} == {"one", "two"}, (
        "an environment's metrics keep their name"
    )
    found = list(read)
    for _ in range(5):
        found += api.until_batch()
    assert sorted(found) == list(range(12))
    assert api.get("/status").json()["current_step"] == 11
    assert api.batch_marks() is None


@MODES
def test_an_orderly_end_leaves_the_same(api: GatewayProcess):
    api.start()
    api.put(0)
    assert api.end(signal.SIGTERM) == 0
    api.start_process(api.address[1])
    api.put(1)
    assert sorted(api.until_batch()) == [0, 1]


@MODES
def test_reset_leaves_nothing(api: GatewayProcess, bridge: str):
    api.start()
    api.put(0)
    api.get("/reset_data")
    api.restart()
    assert api.get("/info").json()["batch_size"] == -1
    api.register(batch_size=4)
    assert api.batch_marks() is None
    api.end(signal.SIGINT)


def test_an_unreadable_state_is_ignored_with_a_line(gateway: GatewayProcess, bridge: str):
    gateway.start()
    gateway.put(0)
    gateway.end()
    file = gateway_directory(bridge) / "state.json"
    assert file.stat().st_mode & 0o777 == 0o600
    assert file.parent.stat().st_mode & 0o777 == 0o700
    file.write_bytes(file.read_bytes()[:40])
    gateway.start_process(gateway.address[1])
    assert gateway.get("/info").json()["batch_size"] == -1
    assert "is ignored" in gateway.output
    gateway.register(batch_size=4)
    assert gateway.until_batch() == [0]


def test_clean_keeps_the_state_of_a_living_bridge(gateway: GatewayProcess, bridge: str):
    """Kept while the bridge lives, also after a kill -9 while others leave; removed with the rest by
    clean.
    """
    name = f"/{gateway_directory(bridge).name}"
    gateway.start()
    assert name in shmbridge.clean(bridge, dry_run=False).kept
    gateway.end()
    shmbridge.Producer(bridge, lane_bytes="64K").close()  # the last to leave sweeps
    assert gateway_directory(bridge).exists()
    assert name in shmbridge.clean(bridge).removed
    assert gateway_directory(bridge).exists()
    assert name in shmbridge.clean(bridge, dry_run=False).removed
    assert not gateway_directory(bridge).exists()


def test_a_killed_gateway_is_up_again_before_an_environment_gives_up(gateway: GatewayProcess):
    """BaseEnv tries three times within 3 s at most, and about half of that as a rule."""
    gateway.start()
    began = time.monotonic()
    gateway.restart()
    gateway.get("/status")
    assert time.monotonic() - began < 6  # two cores that others use too; 0.6 s alone


def test_a_second_gateway_posts_beside_the_first(
    gateway: GatewayProcess, start_gateway: Callable[..., GatewayProcess]
):
    """Only one serves batches; posts to either are delivered."""
    gateway.start()
    other = start_gateway()
    refused = other.get("/batch")
    assert refused.status_code == 409
    assert f"pid {gateway.pid}" in refused.json()["detail"]
    assert other.post("/register", {}).status_code == 422
    other.put(0)
    gateway.put(1)
    assert sorted(gateway.until_batch()) == [0, 1]


class Env:
    """envs/seeded_env.py, unedited and un-attached, as a process that speaks HTTP."""

    def __init__(self, log: Path, url: str, tokenizer: str, record: Path, *arguments: str) -> None:
        self.log = log
        self.process = subprocess.Popen(
            [
                sys.executable,
                str(SEEDED),
                "serve",
                "--env.rollout_server_url",
                url,
                "--env.tokenizer_name",
                tokenizer,
                "--env.wandb_name",
                "seeded",
                "--env.data_path_to_save_groups",
                str(record),
                *arguments,
            ],
            stdout=log.open("wb"),
            stderr=subprocess.STDOUT,
            env=os.environ | {"HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)},
        )


@pytest.mark.timeout(180)
def test_a_real_environment_survives_two_kills_of_its_gateway(
    start_gateway: Callable[..., GatewayProcess], tmp_path: Path, tokenizer: str
):
    """Killed twice while an unedited BaseEnv posts: it lives on, and every group it recorded is read, at
    least once.

    The listening socket is another's, as with systemd's socket activation, so that nobody is refused
    meanwhile.
    """
    api = start_gateway(own_socket=False)
    api.start(batch_size=4, num_steps=10_000, max_token_len=4096)
    record = tmp_path / "groups.jsonl"
    env = Env(
        tmp_path / "env.log",
        api.url,
        tokenizer,
        record,
        "--env.items",
        "60",
        "--env.collect_s",
        "0.05",
        "--env.group_size",
        "4",
        "--env.max_num_workers",
        "4",
        "--env.max_batches_offpolicy",
        "8",
        "--env.ensure_scores_are_not_same",
        "false",
    )
    read: list[Any] = []
    kills = [5, 25]
    deadline = time.monotonic() + 150
    try:
        # 60 items, a tenth of which are lists of two groups
        while len({item_of(each) for each in read}) < 66:
            assert env.process.poll() is None, env.log.read_text()[-3000:]
            assert time.monotonic() < deadline, (len(read), api.stats(), env.log.read_text()[-2000:])
            batch = api.batch()
            read += batch or []
            if batch is None:
                time.sleep(0.05)
            if kills and len(read) > kills[0]:
                kills.pop(0)
                api.restart()
    finally:
        env.process.kill()
        env.process.wait()
    assert not kills
    assert "Failed to send" not in env.log.read_text()


def item_of(served: dict[str, Any]) -> tuple[int, int]:
    return tuple(served["tokens"][0][:2])


TIGHT = """
import sys, threading
from pathlib import Path

sys.path.insert(0, sys.argv[1])
from gateway_clients import GatewayProcess, group

gateway = GatewayProcess(Path(sys.argv[2]), "--bridge", "tight", "--lane-bytes", "1M")
try:
    gateway.start(batch_size=8)
    envs = [gateway.register_env(f"env{number}")["env_id"] for number in range(3)]
    for mark, env in enumerate(envs):
        gateway.put(mark, env_id=env)
    gateway.restart()
    for env in envs:
        assert gateway.get("/status-env", {"env_id": env}).status_code == 200
    answers = []

    def post_group(mark: int) -> None:
        answers.append(gateway.post("/scored_data", group(mark, env_id=0)))

    posts = [threading.Thread(target=post_group, args=(mark,)) for mark in (10, 11, 12)]
    for post in posts:
        post.start()
    gateway.until("posts_waiting", 3)
    found = gateway.until_batch() + gateway.until_batch() + gateway.until_batch()
    for post in posts:
        post.join()
    assert [answer.status_code for answer in answers] == [200] * 3, answers
    assert sorted(found) == [0, 1, 2, 10, 11, 12], found
finally:
    gateway.end()
"""


def test_a_mount_without_room_for_new_lanes_ends_no_environment(tmp_path: Path):
    """Every environment needs a new lane after a kill, while the old ones still hold records: posts wait, and
    other requests are answered.
    """
    apart = ["unshare", "-m", "bash", "-ec", 'mount -t tmpfs -o size=4m tmpfs /dev/shm; exec "$@"', "bash"]
    if subprocess.run([*apart, "true"], capture_output=True).returncode:
        pytest.skip("needs a mount namespace")
    command = [*apart, sys.executable, "-c", TIGHT, str(Path(__file__).parent), str(tmp_path / "log")]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=120, env=os.environ | {"PYTHONPATH": str(ROOT)}
    )
    assert done.returncode == 0, done.stderr + (tmp_path / "log").read_text()


HALF_WRITTEN = """
import resource, sys
from shmbridge.consumers.gateway.environments import SavedEnv, StateFile

state = StateFile(sys.argv[1])
assert state.open()
state.update(next_env_id=7)
# as a full mount: the first pages are taken, the rest is not
resource.setrlimit(resource.RLIMIT_FSIZE, (8192, 8192))
state.update(next_env_id=8, envs=[SavedEnv(number, "env" * 99, "env", 64, 4, 1.0) for number in range(99)])
again = StateFile(sys.argv[1])
state.close()
assert again.open()
assert again.saved.next_env_id == 7, again.saved
again.forget()
again.close()
"""


def test_a_state_that_is_half_written_takes_no_place(bridge: str):
    done = subprocess.run(
        [sys.executable, "-c", HALF_WRITTEN, bridge],
        capture_output=True,
        text=True,
        timeout=60,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(("third", "why"), [("3<&-", "Bad file descriptor"), ("3</dev/null", "non-socket")])
def test_listen_fds_without_a_socket_is_an_error_of_one_line(third, why, bridge):
    command = [sys.executable, "-m", "shmbridge.cli", "gateway", "--bridge", bridge, "--port", "0"]
    shell = ["bash", "-c", f'exec {third}; LISTEN_PID=$$ LISTEN_FDS=1 exec "$@"', "-", *command]
    ended = subprocess.run(
        shell,
        capture_output=True,
        text=True,
        timeout=60,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        check=False,
    )
    assert (ended.returncode, ended.stderr.count("\n")) == (2, 1), ended.stderr
    assert why in ended.stderr
    assert "LISTEN_FDS" in ended.stderr
