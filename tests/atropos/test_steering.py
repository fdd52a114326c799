"""The numbers environments steer by are those of upstream's own server, for the same queue."""

import asyncio
import random
from types import SimpleNamespace

import pytest

from shmbridge.config import Run
from shmbridge.environments import Environments
from shmbridge.messages import Register

server = pytest.importorskip("atroposlib.api.server")


class QueueOf:
    """A hub that is only a queue: producer id -> groups waiting."""

    hub_epoch, policy_version, paused, draining = 1, 0, False, False

    def __init__(self, batch_size: int, step: int, queued: dict[str, int]) -> None:
        self.run = Run(batch_size=batch_size)
        self.current_step = step
        self.queued = queued

    def queue_groups(self, producer_id: str | None = None) -> int:
        return sum(self.queued.values()) if producer_id is None else self.queued.get(producer_id, 0)

    def producer_live(self, producer_id: str) -> bool:
        return True


@pytest.fixture
def upstream(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    state = SimpleNamespace()
    monkeypatch.setattr(server.app, "state", state)
    return state


@pytest.mark.parametrize("seed", range(200))
def test_status_is_what_upstream_says(upstream: SimpleNamespace, seed: int) -> None:
    rng = random.Random(seed)
    wishes = [
        Register(
            desired_name=rng.choice(["gsm8k", "code"]),
            max_token_length=rng.choice([512, 2048]),
            group_size=rng.choice([1, 2, 4, 8, 16]),
            weight=rng.choice([0.1, 1.0, 2.5]),
            min_batch_allocation=rng.choice([None, None, 0.1, 0.25, 0.5]),
            producer_id=f"p{number}",
        )
        for number in range(rng.randint(1, 5))
    ]
    queued = {wish.producer_id: rng.choice([0, 1, 3, 7]) for wish in wishes}
    asker = rng.randrange(len(wishes))
    strangers = rng.choice([0, 0, 2])
    hub = QueueOf(rng.choice([8, 16, 64]), rng.randrange(100), {**queued, "stranger": strangers})
    ours = Environments(hub)

    upstream.started, upstream.status_dict = True, {"step": hub.current_step}
    upstream.batchsize, upstream.save_checkpoint_interval, upstream.num_steps = hub.run.batch_size, -1, 100
    upstream.queue = []
    for number, wish in enumerate(wishes):
        admitted = ours.admit(wish)
        wanted = asyncio.run(
            server.register_env_url(
                server.RegisterEnv(
                    max_token_length=wish.max_token_length,
                    desired_name=wish.desired_name,
                    weight=wish.weight,
                    group_size=wish.group_size,
                    min_batch_allocation=wish.min_batch_allocation,
                )
            )
        )
        assert (admitted.env_id, admitted.wandb_name) == (wanted["env_id"], wanted["wandb_name"])
        upstream.queue += [{"env_id": number, "tokens": [[1]] * wish.group_size}] * queued[wish.producer_id]
    upstream.queue += [{"env_id": None, "tokens": [[1]] * wishes[asker].group_size}] * strangers

    wanted = asyncio.run(server.get_status_env(server.EnvIdentifier(env_id=asker)))
    status = ours.status(asker)
    assert status.current_step == wanted["current_step"]
    assert status.queue_groups == wanted["queue_size"]
    assert status.self_queue_groups == wanted["self_queue_size"]
    assert status.max_group_size == wanted["max_group_size"]
    assert status.unallocated_fraction == pytest.approx(wanted["unallocated_fraction"])
    assert status.env_weight == pytest.approx(wanted["env_weight"])
