"""The numbers environments steer by are those of upstream's own server, for the same queue."""

import asyncio
import random
from collections.abc import Callable, Collection
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shmbridge.config import Run
from shmbridge.control.environments import Environments, Queued
from shmbridge.control.messages import Register

server = pytest.importorskip("atroposlib.api.server")


class QueueOf:
    """A hub that is only a queue: producer id -> groups waiting."""

    hub_epoch, policy_version, paused, draining = 1, 0, False, False

    def __init__(self, batch_size: int, step: int, queued: dict[str, int]) -> None:
        self.run = Run(batch_size=batch_size)
        self.current_step = step
        self.queued = queued

    def queue_groups(self) -> int:
        return sum(self.queued.values())

    def look_at_producers(self, producer_ids: Collection[str]) -> dict[str, tuple[bool, int]]:
        return {each: (True, self.queued.get(each, 0)) for each in producer_ids}


def compare_status(upstream: SimpleNamespace, rng: random.Random) -> None:
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


class Seen:
    """Upstream's own queue, as a policy that knows its content would show it."""

    def __init__(self, upstream: SimpleNamespace) -> None:
        self.upstream = upstream

    def by_env(self) -> dict[int | None, Queued]:
        sizes: dict[int | None, list[int]] = {}
        for item in self.upstream.queue:
            sizes.setdefault(item["env_id"], []).append(len(item["tokens"]))
        return {env_id: Queued(len(each), sum(each), max(each)) for env_id, each in sizes.items()}

    def queued(self, producer_id: str) -> int:
        return sum(item["env_id"] == int(producer_id) for item in self.upstream.queue)

    def __len__(self) -> int:
        return len(self.upstream.queue)


def compare_groups_of_any_size(upstream: SimpleNamespace, rng: random.Random) -> None:
    """Compares twice, since an environment's group size grows to its largest group in the queue, and stays
    so.
    """
    hub = QueueOf(rng.choice([8, 16, 64]), rng.randrange(100), {})
    ours = Environments(hub, Seen(upstream))
    upstream.started, upstream.status_dict, upstream.queue = True, {"step": hub.current_step}, []
    upstream.batchsize, upstream.save_checkpoint_interval, upstream.num_steps = hub.run.batch_size, -1, 100
    count = rng.randint(1, 4)
    for number in range(count):
        asks = {
            "max_token_length": rng.choice([512, 2048]),
            "group_size": rng.choice([1, 2, 4, 8]),
            "weight": rng.choice([0.1, 1.0, 2.5]),
            "min_batch_allocation": rng.choice([None, None, 0.1, 0.5]),
        }
        ours.admit(Register(desired_name="env", producer_id=str(number), **asks))
        asyncio.run(server.register_env_url(server.RegisterEnv(desired_name="env", **asks)))
    for _ in range(6):
        senders = [None, *range(count)]
        upstream.queue = [
            {"env_id": rng.choice(senders), "tokens": [[1]] * rng.choice([1, 2, 3, 8])}
            for _ in range(rng.randint(0, 12))
        ]
        hub.queued = {
            str(number): sum(item["env_id"] == number for item in upstream.queue) for number in range(count)
        }
        hub.queued["stranger"] = sum(item["env_id"] is None for item in upstream.queue)
        asker = rng.randrange(count)
        wanted = asyncio.run(server.get_status_env(server.EnvIdentifier(env_id=asker)))
        status = ours.status(asker)
        assert (status.queue_groups, status.self_queue_groups) == (
            wanted["queue_size"],
            wanted["self_queue_size"],
        )
        assert status.max_group_size == wanted["max_group_size"]


@pytest.mark.parametrize("compare", [compare_status, compare_groups_of_any_size])
@pytest.mark.parametrize("cases", [30, pytest.param(200, marks=pytest.mark.long)])
def test_status_is_what_upstream_says(
    compare: Callable[[SimpleNamespace, random.Random], None], cases: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    @given(st.integers(0, 2**32))
    @settings(deadline=None, max_examples=cases)
    def one(seed: int) -> None:
        upstream = SimpleNamespace()
        monkeypatch.setattr(server.app, "state", upstream)
        compare(upstream, random.Random(seed))

    one()
