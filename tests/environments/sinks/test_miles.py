"""miles' data buffer on a bridge: its contract, and what a restart finds."""

import asyncio
import random
from types import SimpleNamespace

import numpy as np
import pytest

import shmbridge
from shmbridge.consumers.miles import ShmDataBuffer

BATCH, SIZE = 2, 3


def drops_ones(args, group):
    """A dynamic filter: a group whose first reward is 1 is not kept."""
    from miles.rollout.filter_hub.base_types import DynamicFilterOutput

    return DynamicFilterOutput(keep=group[0].reward != 1.0, reason="ones")


def arguments(**more) -> SimpleNamespace:
    given = {
        "dynamic_sampling_filter_path": None, "async_data_buffer_capacity_factor": 2.0,
        "rollout_batch_size": BATCH, "n_samples_per_prompt": SIZE, "max_weight_staleness": None,
        "reward_key": None,
    }  # fmt: skip
    return SimpleNamespace(**given | more)


class Made:
    """Buffers on one bridge, one after the other, and the groups that went back."""

    def __init__(self, miles, monkeypatch, bridge) -> None:
        monkeypatch.setenv("SHMBRIDGE_BRIDGE", bridge)
        monkeypatch.setenv("SHMBRIDGE_LANE_BYTES", "4M")
        self.miles, self.unused, self.buffer = miles, [], None

    def make(self, **more) -> ShmDataBuffer:
        given = self.miles.Constructor(args=arguments(**more), unused_handler_fn=self.unused.append)
        self.buffer = ShmDataBuffer(given)
        return self.buffer

    def sample(self, group: int, number: int, version: int | None, **more):
        chance = random.Random(f"{group} {number}")
        prompt, said = chance.randint(1, 4), chance.randint(1, 6)
        given = {
            "group_index": group, "index": group * SIZE + number, "prompt": f"prompt {group}",
            "tokens": [chance.randrange(50_000) for _ in range(prompt + said)], "response": "\u00e9" * said,
            "response_length": said, "label": "l", "reward": chance.random(),
            "loss_mask": [chance.randint(0, 1) for _ in range(said)],
            "weight_versions": [] if version is None else [str(version), str(version + 1)],
            "rollout_log_probs": [float(np.float32(-chance.random())) for _ in range(said)],
            "status": self.miles.Sample.Status.COMPLETED, "metadata": {"group": group, "deep": [{"a": 1}]},
        }  # fmt: skip
        return self.miles.Sample(**given | more)

    def group(self, number: int, version: int | None = 5, **more):
        samples = [self.sample(number, each, version, **more) for each in range(SIZE)]
        prompts = [self.miles.Sample(group_index=number, prompt=f"prompt {number}") for _ in range(SIZE)]
        return self.miles.Input(prompt_group=prompts, group=samples)


@pytest.fixture
def made(miles, monkeypatch, bridge):
    holder = Made(miles, monkeypatch, bridge)
    yield holder
    if holder.buffer is not None:
        holder.buffer.close()


def fields(sample) -> dict:
    """All that a sample has, arrays as lists."""
    return {
        name: value.tolist() if isinstance(value, np.ndarray) else getattr(value, "__dict__", value)
        for name, value in vars(sample).items()
    }


async def test_groups_come_back_as_they_were_put(made):
    """Every field, arrays and nested episodes too, in the order of `put`; prompts can be asked again."""
    buffer, routes = made.make(), np.arange(24, dtype=np.int32).reshape(4, 3, 2)
    put = [made.group(n) for n in range(3)]
    put[1].group[0] = [put[1].group[0], made.sample(1, 7, 9, rollout_routed_experts=routes)]
    put[2].group[1] = made.sample(2, 1, None, loss_mask=None, rollout_log_probs=None, reward=None)
    for each in put:
        await buffer.put(each)
    for expected in put:
        got = await buffer.get(current_version=7)
        for mine, theirs in zip(got.group, expected.group, strict=True):
            pairs = zip(mine, theirs, strict=True) if isinstance(theirs, list) else [(mine, theirs)]
            for one, other in pairs:
                assert fields(one) == fields(other)
        assert [prompt.prompt for prompt in got.prompt_group] == [
            f"prompt {expected.group[2].group_index}"
        ] * 3
    assert not made.unused


async def test_filters_and_metrics_are_those_of_the_default(made):
    buffer = made.make(dynamic_sampling_filter_path=f"{__name__}.drops_ones", max_weight_staleness=3)
    await buffer.put(made.group(0, reward=1.0))
    await buffer.put(made.group(1, status=made.miles.Sample.Status.ABORTED))
    await buffer.put(made.group(2, version=1))
    await buffer.put(made.group(3, version=5))
    await buffer.put(made.group(4, version=None))
    assert (await buffer.get(current_version=6)).group[0].group_index == 3
    assert [prompts[0].prompt for prompts in made.unused] == ["prompt 1", "prompt 2"]
    metrics = buffer.get_metrics()
    prefix = "rollout/fully_async/"
    assert {name: value for name, value in metrics.items() if name.startswith(prefix)} == {
        f"{prefix}queue_size": 1, f"{prefix}aborted_groups_filtered": 1, f"{prefix}stale_groups_filtered": 1,
        f"{prefix}avg_staleness": 3.0, f"{prefix}max_staleness": 5,
    }  # fmt: skip
    assert metrics["rollout/dynamic_filter/drop_ones"] == 1
    assert (await buffer.get(current_version=6)).group[0].group_index == 4
    assert buffer.get_metrics()[f"{prefix}aborted_groups_filtered"] == 0


async def test_a_full_buffer_makes_put_wait_and_a_cancelled_get_loses_nothing(made):
    buffer = made.make()
    for n in range(2 * BATCH):
        await buffer.put(made.group(n))
    waiting = asyncio.create_task(buffer.put(made.group(4)))
    done, _ = await asyncio.wait({waiting}, timeout=0.3)
    assert not done
    assert (await buffer.get()).group[0].group_index == 0
    await waiting
    for n in range(1, 5):
        assert (await buffer.get()).group[0].group_index == n
    for _ in range(3):
        got = asyncio.create_task(buffer.get())
        await asyncio.sleep(0.05)
        got.cancel()
        await asyncio.gather(got, return_exceptions=True)
    await buffer.put(made.group(5))
    assert (await asyncio.wait_for(buffer.get(), 10)).group[0].group_index == 5


async def test_cancelled_puts_leave_no_place_taken(made):
    """Those that had a place are stored; the others are as if they had never been."""
    buffer = made.make()
    puts = [asyncio.create_task(buffer.put(made.group(n))) for n in range(3 * BATCH)]
    await asyncio.sleep(0)
    for each in puts:
        each.cancel()
    await asyncio.gather(*puts, return_exceptions=True)
    for n in range(2 * BATCH):
        await asyncio.wait_for(buffer.get(), 10)
    for n in range(100, 100 + 2 * BATCH):
        await asyncio.wait_for(buffer.put(made.group(n)), 10)
        assert (await asyncio.wait_for(buffer.get(), 10)).group[0].group_index == n


async def test_a_restart_gets_what_was_not_trained(made):
    """Batches 0 to 2 are taken, 3 waits: the last two batches that were taken come again, then the rest."""
    buffer = made.make(async_data_buffer_capacity_factor=10)
    for n in range(8):
        await buffer.put(made.group(n))
    for _ in range(3):
        for _ in range(BATCH):
            await buffer.get()
        buffer.get_metrics()
    buffer.close()
    again = made.make()
    order = [(await again.get()).group[0].group_index for _ in range(6)]
    assert order == [2, 3, 4, 5, 6, 7]
    assert again.get_metrics()["shmbridge/redelivered_groups"] == 4


async def test_groups_of_other_environments_are_samples_too(made, bridge):
    buffer = made.make()
    with shmbridge.Producer(bridge, env_name="other", lane_bytes="1M") as producer:
        for rows in (2, SIZE):
            producer.put(
                {
                    "tokens": [[1, 2, 3 + row] for row in range(rows)],
                    "loss_mask": [[0, 1, 1]] * rows,
                    "inference_logprobs": [[0.0, -0.5, -0.25]] * rows,
                    "score": [float(row) for row in range(rows)],
                },
                policy_version=4,
            )
        got = await buffer.get(current_version=5)
    assert [sample.tokens for sample in got.group] == [[1, 2, 3], [1, 2, 4], [1, 2, 5]]
    assert [sample.reward for sample in got.group] == [0.0, 1.0, 2.0]
    assert got.group[0].rollout_log_probs == [-0.5, -0.25]
    assert got.group[0].weight_versions == ["4"]
    metrics = buffer.get_metrics()
    assert (metrics["shmbridge/groups_of_another_size"], metrics["rollout/fully_async/avg_staleness"]) == (
        1,
        1,
    )


async def test_a_field_that_cannot_be_stored_is_refused_by_name(made):
    buffer = made.make()
    with pytest.raises(shmbridge.InvalidRecord, match="multimodal_inputs"):
        await buffer.put(made.group(0, multimodal_inputs={"image": object()}))
    with pytest.raises(shmbridge.InvalidRecord, match="'reward' of sample 3 cannot be stored: float nan"):
        await buffer.put(made.group(1, reward=float("nan")))
    await buffer.put(made.group(1))
    assert (await buffer.get()).group[0].group_index == 1
