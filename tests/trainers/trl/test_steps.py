"""When records are released, which versions are published, and that the model learns."""

import math

import numpy as np
import pytest
import torch
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from shmbridge.consumers.feed import Drained
from shmbridge.consumers.trl import (
    NotJoined,
    ShmGRPOTrainer,
    UnevenGroups,
    Unsupported,
    environment_scores,
    shm_rollout_func,
)
from shmbridge.consumers.trl.grpo import placeholder_prompts
from tests.trainers.trl.target_groups import TARGET, group


class AtEnds(TrainerCallback):
    """Calls a function at the end of each step, after the bridge's own callback."""

    def __init__(self, call) -> None:
        self.call, self.seen = call, []

    def on_step_end(self, args, state, control, **kwargs):
        self.seen.append(self.call(state.global_step))


@pytest.fixture
def start(bridge, tiny, settings):
    """Makes a trainer on the bridge: start(changes of GRPOConfig, **options of shm_rollout_func)."""
    made = []

    def make(changed=None, trainer=ShmGRPOTrainer, extra=None, **options):
        rollouts = shm_rollout_func(bridge, **{"timeout_s": 30, **options})
        made.append(rollouts)
        return trainer(tiny, args=settings(**(changed or {})), rollout_func=rollouts, **(extra or {}))

    yield make
    for rollouts in made:
        rollouts.close()


@pytest.mark.parametrize(
    ("changed", "released"),
    [
        pytest.param({}, [1, 2, 3, 4], id="one step per batch"),
        pytest.param({"gradient_accumulation_steps": 2}, [2, 4, 6, 8], id="two parts of a step"),
        pytest.param({"steps_per_generation": 2}, [0, 2, 2, 4], id="two steps per batch"),
        pytest.param({"num_iterations": 2}, [0, 1, 1, 2], id="each batch twice"),
        pytest.param(
            {"gradient_accumulation_steps": 2, "steps_per_generation": 1},
            [2, 4, 6, 8],
            id="two batches a step",
        ),
        pytest.param(
            {"gradient_accumulation_steps": 2, "steps_per_generation": 3}, [0, 3, 6, 6], id="not aligned"
        ),
    ],
)
def test_a_batch_is_released_after_its_last_step(start, make_producer, changed, released):
    trainer = start({"max_steps": 4, **changed})
    producer = make_producer(lane_bytes="1M")
    for number in range(12):
        producer.put(group(number))
    after = AtEnds(lambda _: trainer.rollouts.stats()["released_total"])
    trainer.add_callback(after)
    trainer.train()
    assert after.seen == released


def test_a_batch_that_was_trained_in_part_comes_again(start, make_producer, make_consumer):
    trainer = start({"max_steps": 3, "steps_per_generation": 2})
    producer = make_producer(lane_bytes="1M")
    for number in range(4):
        producer.put(group(number), group_id=f"group-{number}")
    trainer.train()
    assert trainer.rollouts.stats()["trl_batches_held"] == 1
    trainer.rollouts.close()
    again = [(record.meta.group_id, record.meta.redelivered) for record in make_consumer().poll()]
    assert again == [("group-2", True), ("group-3", True)]


def test_max_staleness_is_kept_and_versions_are_published(start, make_producer):
    trainer = start({"max_steps": 3}, max_staleness=1)
    producer = make_producer(lane_bytes="1M")
    for number in range(3):
        producer.put(group(number), group_id=f"old-{number}", policy_version=0)
    versions, trained = [], []

    def after(step):
        versions.append(producer.policy_version)
        if step == 2:
            producer.put(group(9), group_id="new", policy_version=producer.policy_version)

    class Trained(TrainerCallback):
        def on_pre_optimizer_step(self, args, state, control, **kwargs):
            trained.extend(meta.group_id for meta in {*trainer.rollouts._held[0][1].batch.meta})

    trainer.add_callback(AtEnds(after))
    trainer.add_callback(Trained())
    trainer.train()
    assert trained == ["old-0", "old-1", "new"]  # old-2 would have been two versions behind
    assert versions == [1, 2, 3]
    stats = trainer.rollouts.stats()
    assert stats["discarded_total{stale}"] == 1
    assert stats["staleness_max"] == 1
    assert [each["bridge/staleness_max"] for each in trainer.state.log_history[:-1]] == [0, 1, 0]


def test_a_second_run_goes_on_above_the_versions_of_the_first(start, make_producer, bridge):
    producer = make_producer(lane_bytes="1M")
    for expected in (2, 5):  # two steps from 0, two from 3
        trainer = start({"max_steps": 2}, start="from-scratch")
        for number in range(2):
            producer.put(group(number))
        trainer.train()
        assert producer.policy_version == expected
        trainer.rollouts.close()


def test_a_version_every_few_steps(start, make_producer):
    trainer = start({"max_steps": 4}, extra={"publish_every": 2})
    producer = make_producer(lane_bytes="1M")
    for number in range(4):
        producer.put(group(number))
    after = AtEnds(lambda _: producer.policy_version)
    trainer.add_callback(after)
    trainer.train()
    assert after.seen == [0, 2, 2, 4]


def target_logprob(trainer) -> float:
    """log p(TARGET | 2 3 4) of the trained model."""
    with torch.no_grad():
        logits = trainer.model(input_ids=torch.tensor([[2, 3, 4]])).logits[0, -1].float()
    return float(torch.log_softmax(logits, -1)[TARGET])


def test_the_log_probability_of_target_tokens_rises(start, make_producer):
    trainer = start({"max_steps": 12})
    producer = make_producer(lane_bytes="1M")
    for number in range(12):
        producer.put(group(number))
    before = target_logprob(trainer)
    trainer.train()
    after = target_logprob(trainer)
    print(f"log p(target) {before:.2f} -> {after:.2f}")
    assert before < -2
    assert after > before + 2
    rewards = [each["reward"] for each in trainer.state.log_history[:-1]]
    assert rewards == pytest.approx([1.5] * 12)  # TRL's metric shows the environments' scores 0, 1, 2, 3


def test_uneven_groups_are_refused_filled_or_skipped(start, make_producer):
    producer = make_producer(lane_bytes="1M")
    refusing = start()
    producer.put(group(0, rows=3), group_id="short")
    with pytest.raises(UnevenGroups, match=r"3 rows and the trainer wants 4; group 'short'.*has 3"):
        refusing.train()
    refusing.rollouts.close()

    filling = start(uneven="fill")
    filling.train()
    stats = filling.rollouts.stats()
    assert (stats["trl_rows_total"], stats["trl_rows_filled_total"], stats["released_total"]) == (3, 1, 1)
    assert stats["feed_groups_redelivered_total"] == 1  # it was refused, not released
    producer.put(group(1, rows=5), group_id="long")
    with pytest.raises(UnevenGroups, match="5 rows and the trainer wants 4"):
        filling.train()
    filling.rollouts.close()

    skipping = start(uneven="skip", start="from-scratch")
    producer.put(group(2, rows=3))
    producer.put(group(3), split="eval")
    producer.put(group(4), group_id="whole")
    skipping.train()
    stats = skipping.rollouts.stats()
    assert (stats["trl_rows_total"], stats["screened_total"], stats["held"]) == (4, 2, 0)
    assert stats["left_out_total{eval}"] == 1


def test_columns_go_to_reward_functions_and_what_cannot_is_counted(start, make_producer):
    got = {}

    def look(completions, **columns):
        got.update(columns)
        return [0.0] * len(completions)

    trainer = start({"max_steps": 1}, extra={"reward_funcs": [environment_scores, look]})
    rewards = [[0.5], [0.25, 1.0], [], [2.0]]
    texts = [f'[{{"role": "user", "content": "é{n}"}}]' for n in range(4)]
    more = {"step_rewards": rewards, "step_ends": [[4], [5, 7], [], [7]], "messages": texts}
    make_producer(lane_bytes="1M").put(group(0, images=[["x"]] * 4, **more))
    trainer.train()
    assert got["messages"] == texts
    assert [row.tolist() for row in got["step_rewards"]] == rewards
    assert got["score"] == [0, 1, 2, 3]
    assert trainer.rollouts.stats()["columns_ignored_total{images}"] == 4


def test_rows_without_anything_to_train_arrive_masked(start, make_producer):
    """A row of one token, and one without a prompt."""
    trainer = start({"max_steps": 1})
    rows = {
        "tokens": [[5], [5, 6], [5, 6, 7], [5, 6, 7, 8]],
        "prompt_length": [1, 0, 3, 2],
        "loss_mask": [[0], [1, 1], [0] * 3, [0, 0, 1, 1]],
        "score": [1, 2, 3, 4],
    }
    make_producer(lane_bytes="1M").put(rows)
    trainer.train()
    stats = trainer.rollouts.stats()
    assert (stats["trl_rows_untrained_total"], stats["trl_rows_too_short_total"]) == (2, 1)
    assert math.isfinite(trainer.state.log_history[0]["loss"])


def test_another_temperature_is_counted_and_said(start, make_producer, caplog):
    trainer = start({"max_steps": 1})
    make_producer(lane_bytes="1M").put(group(0, temperature=[1.0, 1.0, 0.7, 0.7]))
    trainer.train()
    assert trainer.rollouts.stats()["trl_rows_other_temperature_total"] == 2
    assert "temperature=1.0" in caplog.text


def test_a_drained_bridge_ends_training_with_its_own_error(start, make_producer):
    trainer = start({"max_steps": 3}, prefetch=0)
    make_producer(lane_bytes="1M").put(group(0))
    trainer.rollouts.drain()
    with pytest.raises(Drained, match="save the model"):
        trainer.train()
    assert trainer.state.global_step == 1
    assert trainer.rollouts.stats()["held"] == 0


@pytest.mark.parametrize(
    ("changed", "extra", "words"),
    [
        ({"use_vllm": True}, {}, "use_vllm=False"),
        ({"per_device_train_batch_size": 2, "steps_per_generation": 2, "num_generations": 2}, {}, None),
        ({"per_device_train_batch_size": 6, "num_generations": 3}, {"tools": [print]}, "tools="),
        ({"max_steps": -1}, {}, "max_steps above 0"),
        ({"eval_strategy": "steps", "eval_steps": 1}, {}, "eval_strategy='no'"),
    ],
)
def test_options_that_contradict_a_bridge_are_refused_first(start, changed, extra, words):
    if words is None:
        start(changed, extra=extra)
        return
    with pytest.raises(Unsupported, match=words):
        start(changed, extra=extra)


def test_another_trainer_is_refused(bridge, tiny, settings):
    """The plain trainer would drop advantages per token without a word."""
    args = settings()
    plain = GRPOTrainer(
        tiny, environment_scores, args, placeholder_prompts(args), rollout_func=shm_rollout_func(bridge)
    )
    with pytest.raises(NotJoined, match="ShmGRPOTrainer"):
        plain.train()


def test_placeholders_are_whole_batches_and_whole_steps(tmp_path):
    args = GRPOConfig(
        str(tmp_path), use_cpu=True, bf16=False, per_device_train_batch_size=4, num_generations=4,
        gradient_accumulation_steps=2, steps_per_generation=3,
    )  # fmt: skip
    parts = len(placeholder_prompts(args)) * args.num_generations // args.generation_batch_size
    assert parts * args.steps_per_generation % args.gradient_accumulation_steps == 0


def test_weights_of_a_version_are_in_the_bridge_before_it_is_published(start, make_producer, bridge):
    from shmbridge.consumers.weight_sync import WeightSync
    from shmbridge.weights import WeightsReader

    with WeightSync(bridge, []) as weights, WeightsReader(bridge) as reader:
        trainer = start({"max_steps": 2}, extra={"weights": weights})
        producer = make_producer(lane_bytes="1M")
        seen = []

        def after(_):
            version, tensors = reader.copy()
            seen.append((version, producer.policy_version))
            name = "model.layers.0.self_attn.q_proj.weight"
            own = dict(trainer.model.named_parameters())[name].detach().numpy()
            np.testing.assert_array_equal(tensors[name], own)

        for number in range(2):
            producer.put(group(number))
        trainer.add_callback(AtEnds(after))
        trainer.train()
        assert seen == [(1, 1), (2, 2)]
