"""The agent loop manager against a real TransferQueue and verl's own replay buffer and advantage step."""

from __future__ import annotations

import contextlib
import types
import uuid
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from verl_loop import configured
from verl_process import until

import shmbridge
from shmbridge.archive.folder import read_archive
from shmbridge.consumers.feed import BridgeAhead
from shmbridge.testing.fixtures import known_groups, loss_matrix
from tests.trainers.contract import Seen, assert_contract, scored, without

pytestmark = pytest.mark.timeout(400)

NO_LIMIT = ["trainer.atropos.max_off_policy_steps=null"]
NO_LOGPROBS = [
    "actor_rollout_ref.rollout.calculate_log_probs=False",
    "algorithm.rollout_correction.bypass_mode=False",
]


@pytest.fixture(scope="module")
def queue() -> Iterator[Any]:
    """TransferQueue with its controller and one SimpleStorage unit, in Ray."""
    import ray
    import transfer_queue as tq
    from omegaconf import OmegaConf

    ray.init(num_cpus=8, include_dashboard=False, log_to_driver=False)
    tq.init(OmegaConf.create({"backend": {"SimpleStorage": {"num_data_storage_units": 1}}}))
    yield tq
    tq.close()
    ray.shutdown()


@pytest.fixture
def clear(queue: Any) -> Iterator[Any]:
    yield queue
    there = list((queue.kv_list("train") or {}).get("train", {}))
    if there:
        queue.kv_clear(keys=there, partition_id="train")


@pytest.fixture
def make_manager(bridge: str, clear: Any, tiny: Any, tmp_path: Path) -> Iterator[Any]:
    from shmbridge.consumers.verl.agent_loop_manager import ShmAgentLoopManager

    made = []

    def make(*more: str) -> Any:
        options = ["actor_rollout_ref.rollout.n=4", f"trainer.default_local_dir={tmp_path}"]
        config = configured(bridge, str(tiny), 10, [*options, *NO_LOGPROBS, *NO_LIMIT, *more])
        made.append(ShmAgentLoopManager.create(config, llm_client=None, reward_loop_worker_handles=[]))
        made[-1].config = config
        return made[-1]

    yield make
    for each in made:
        each.step_ended([f"{uid}_0_0" for uid in each._folded])
        each.close()


@pytest.fixture
def make_buffer(clear: Any) -> Any:
    from verl.trainer.ppo.v1.replay_buffer import ReplayBufferAsync

    def unasked(count: int) -> None:
        pytest.fail(f"{count} prompts failed or were evicted")

    def make(refill: Any = unasked, threshold: int | None = None, metric: str | None = None) -> Any:
        given = {"poll_interval": 0.05, "refill_fn": refill, "filter_groups_metric": metric}
        return ReplayBufferAsync("shmbridge", {}, threshold, "drop", {}, **given)

    return make


def ask(queue: Any, manager: Any, count: int, step: int = 1) -> list[str]:
    """Issues prompts as verl's trainer does; returns their uids."""
    import torch
    from verl.utils import tensordict_utils as tu

    uids = [str(uuid.uuid4()) for _ in range(count)]
    prompts = tu.get_tensordict({"uid": np.array(uids, object), "dummy_tensor": torch.zeros(count, 1)})
    tu.assign_non_tensor_data(prompts, "global_steps", step)
    tags = [{"is_prompt": True, "status": "pending", "global_steps": step} for _ in uids]
    queue.kv_batch_put(keys=uids, partition_id="train", tags=tags)
    manager.generate_sequences(prompts)
    return uids


def advantages_of(config: Any, batch: Any) -> Any:
    """verl's own advantage step on a batch; returns its rows from TransferQueue."""
    import transfer_queue as tq
    from verl.trainer.ppo.v1.trainer_base import PPOTrainer

    PPOTrainer._compute_advantage(types.SimpleNamespace(config=config), batch, {})
    fields = ["uid", "advantages", "returns", "response_mask", "responses", "prompts", "extra_fields"]
    return tq.kv_batch_get(keys=batch.keys, partition_id="train", select_fields=fields)


def grpo(scores: np.ndarray) -> np.ndarray:
    return (scores - scores.mean()) / (scores.std(ddof=1) + 1e-6)


def rloo(scores: np.ndarray) -> np.ndarray:
    return scores - (scores.sum() - scores) / (len(scores) - 1)


FILTERED = ["algorithm.filter_groups.enable=True", "algorithm.filter_groups.metric=score"]


@pytest.mark.parametrize(
    ("setting", "overrides", "made_of"),
    [
        ("`bypass_mode=False`", [], lambda groups: groups),
        ("`adv_estimator=grpo`", ["algorithm.adv_estimator=grpo"], lambda groups: scored(groups, grpo)),
        ("`adv_estimator=rloo`", ["algorithm.adv_estimator=rloo"], lambda groups: scored(groups, rloo)),
        ("`filter_groups.metric=score`", FILTERED, lambda groups: without(groups, "equal scores")),
    ],
)
def test_verls_advantages_are_those_that_were_put(
    make_manager, make_buffer, make_producer, queue, setting, overrides, made_of
):
    """Of the step before the loss, with verl's own estimators and filter; test_loop.py has the loss."""
    groups, manager, refilled = loss_matrix(vocabulary=28, version=2), make_manager(*overrides), []
    wanted = made_of(groups)
    with make_producer(lane_bytes="1M") as producer:
        for group in groups:
            group.put(producer)
        uids = ask(queue, manager, 9, step=3)
        buffer = make_buffer(refilled.append, metric="score" if overrides == FILTERED else None)
        batch, _ = buffer.sample(3, "train", len(wanted) - 1)
        rows = advantages_of(manager.config, batch)
    assert refilled == [1] * (len(groups) - len(wanted))
    assert all(torch.equal(*each) for each in zip(rows["advantages"], rows["returns"], strict=True))
    of_groups = dict(zip(uids, without(groups, "evaluation"), strict=True))
    for key, tag in zip(batch.keys, batch.tags, strict=True):
        versions = (tag["min_global_steps"], tag["max_global_steps"])
        assert versions == of_groups[key.split("_")[0]].versions
    seen = []
    for row in range(len(batch.keys)):
        names = ("prompts", "responses", "response_mask", "advantages")
        prompt, response, *arrays = (rows[name][row].numpy() for name in names)
        before = np.zeros(len(prompt))
        seen.append(Seen(np.append(prompt, response), *(np.append(before, each) for each in arrays), None))
    assert_contract("verl, up to its loss", version("verl"), setting, wanted, seen)
    stats = manager.stats()
    assert (stats["rows_without_response_total"], stats["left_out_total{eval}"]) == (1, 1)
    manager.release_cleared()
    assert manager.stats().get("feed_groups_dropped_total{cleared}", 0) == len(refilled)


def test_records_are_released_after_their_step_only(make_manager, make_buffer, make_producer, queue, bridge):
    groups, manager = known_groups(vocabulary=28, version=2), make_manager()
    with make_producer(lane_bytes="1M") as producer:
        for group in groups[:3]:
            group.put(producer)
        ask(queue, manager, 3)
        batch, _ = make_buffer().sample(1, "train", 2)
        assert manager.release_cleared() == 0, "rows are there: in training"
        metrics = manager.step_ended(batch.keys, version=7)
        assert metrics["atropos/batch_groups"] == 2
        assert metrics["shmbridge/groups_held"] == 1
        manager.close()
        with shmbridge.Consumer(bridge) as consumer:
            assert consumer.policy_version == 7
            record = consumer.get(timeout_s=5)
            assert record.meta.redelivered
            with pytest.raises(shmbridge.ConsumerEmpty):
                consumer.get(timeout_s=0.0)
            record.release()


def test_what_verl_clears_is_released_at_its_next_call(make_manager, make_buffer, make_producer, queue):
    """As under verl's own trainer modes, which never call step_ended."""
    manager = make_manager()
    with make_producer(lane_bytes="1M") as producer:
        for group in known_groups(vocabulary=28, version=2)[:2]:
            group.put(producer)
        ask(queue, manager, 1, step=1)
        batch, _ = make_buffer().sample(1, "train", 1)
        queue.kv_clear(keys=batch.keys, partition_id="train")
        assert manager.stats()["groups_held"] == 1
        ask(queue, manager, 1, step=2)
        assert manager.stats()["feed_groups_dropped_total{cleared}"] == 1


def test_uneven_groups_are_counted_and_whole(make_manager, make_buffer, make_producer, queue):
    manager = make_manager()
    with make_producer(lane_bytes="1M") as producer:
        for rows in (4, 6):
            known_groups(rows, vocabulary=28, version=2, rows=rows)[0].put(producer)
        ask(queue, manager, 2)
        batch, _ = make_buffer().sample(1, "train", 2)
    assert len(batch.keys) == len(set(batch.keys)) == 10
    assert manager.stats()["groups_uneven_total"] == 1


def test_with_a_limit_whole_steps_are_taken_and_dealt_out(make_manager, make_buffer, make_producer, queue):
    """A bridge with an off-policy limit hands out a step's two groups at a time; verl asks for one."""
    manager = make_manager("trainer.atropos.max_off_policy_steps=1")
    with make_producer(lane_bytes="1M") as producer:
        for number in range(2):
            with producer.begin_group(timeout_s=60):
                producer.put(known_groups(vocabulary=28, version=2)[0].fragments[0], group_id=str(number))
        for _ in range(2):
            ask(queue, manager, 1)
            make_buffer().sample(1, "train", 1)
    assert manager.stats()["feed_groups_total"] == 2


LIMIT = ["trainer.atropos.max_off_policy_steps=2", "trainer.v1.shmbridge.num_warmup_batches=1"]


def test_batches_written_ahead_are_among_the_steps_of_the_limit(make_manager, make_producer):
    """Two steps of two groups: one step may be taken later, and its batch is trained one step after that."""
    make_manager(*LIMIT)
    with make_producer() as producer, contextlib.ExitStack() as begun:
        for _ in range(4):
            begun.enter_context(producer.begin_group(timeout_s=60))
        with pytest.raises(shmbridge.NotAdmitted):
            producer.begin_group(timeout_s=0.0)


def test_a_group_within_the_limit_is_not_discarded_for_what_is_written_ahead(
    make_manager, make_buffer, make_producer, queue
):
    manager = make_manager(*LIMIT)
    with make_producer(lane_bytes="1M") as producer:
        for number in range(2):
            producer.put(
                known_groups(vocabulary=28, version=2)[0].fragments[0], group_id=str(number), policy_version=0
            )
        ask(queue, manager, 2, step=3)
        make_buffer().sample(3, "train", 2)
    assert manager.stats()["feed_groups_total"] == 2


def test_a_limit_below_what_is_written_ahead_is_refused(make_manager):
    words = "max_off_policy_steps=0.*num_warmup_batches=2 .*num_warmup_batches=0, or .*max_off_policy_steps=2"
    with pytest.raises(ValueError, match=words):
        make_manager("trainer.atropos.max_off_policy_steps=0", "trainer.v1.shmbridge.num_warmup_batches=1.5")


def test_versions_of_a_resumed_run_are_mapped_onto_verls_steps(
    make_manager, make_buffer, make_producer, queue, bridge
):
    """The bridge is at version 9 when verl trains step 6, the weights of whose step 5 are that version."""
    from shmbridge.weights import WeightsWriter

    with make_producer(lane_bytes="1M") as producer, WeightsWriter(bridge) as writer:
        writer.publish(9, [("a", np.zeros(3, np.float32))])
        manager = make_manager("+trainer.atropos.start=from-bridge")
        producer.put(known_groups(vocabulary=28, version=2)[0].fragments[0], policy_version=(8, 9))
        ask(queue, manager, 1, step=6)
        batch, _ = make_buffer().sample(6, "train", 1)
        assert {(tag["min_global_steps"], tag["max_global_steps"]) for tag in batch.tags} == {(4, 5)}
        assert producer.policy_version == 9


def test_stale_groups_are_dropped_by_verls_own_rule(make_manager, make_buffer, make_producer, queue):
    """A prompt row's global_steps is one above the group's oldest version, as for verl's own rollouts."""
    manager = make_manager()
    refilled: list[int] = []
    with make_producer(lane_bytes="1M") as producer:
        for version in (1, 4):
            group = known_groups(version, vocabulary=28, version=2)[0]
            for fragment in group.fragments:
                producer.put(fragment, group_id=f"of-{version}", policy_version=version)
        uids = ask(queue, manager, 2, step=5)
        until(lambda: manager.stats()["groups_held"] == 2, 30, lambda: str(manager.stats()))
        batch, metrics = make_buffer(refilled.append, threshold=3).sample(5, "train", 1)
    assert {key.split("_")[0] for key in batch.keys} == {uids[1]}
    assert refilled == [1]
    assert metrics["training/off_policy/evicted_samples"] == 1
    assert metrics["training/off_policy/evicted_samples_staleness/max"] == 4  # steps 2 to 5


def test_a_group_without_any_response_is_a_failed_prompt_that_verl_replaces(
    make_manager, make_buffer, make_producer, queue
):
    manager = make_manager()
    with make_producer(lane_bytes="1M") as producer:
        producer.put({"tokens": [[1, 2, 3]] * 4, "prompt_length": [3] * 4, "score": [0.0] * 4})
        known_groups(vocabulary=28, version=2)[0].put(producer)
        ask(queue, manager, 1)
        refilled: list[int] = []

        def refill(count: int) -> None:
            refilled.append(count)
            ask(queue, manager, count)

        make_buffer(refill).sample(1, "train", 1)
    assert refilled == [1]
    assert manager.stats()["feed_groups_dropped_total{no_response}"] == 1


def test_columns_that_verl_has_no_place_for_are_counted_by_name(
    make_manager, make_buffer, make_producer, queue
):
    manager = make_manager()
    with make_producer(lane_bytes="1M") as producer:
        group = dict(known_groups(vocabulary=28, version=2)[0].fragments[0])
        rows = len(group["tokens"])
        group |= {"messages": ["[]"] * rows, "temperature": [0.5] * rows}
        producer.put(group)
        ask(queue, manager, 1)
        make_buffer().sample(1, "train", 1)
    stats = manager.stats()
    assert stats["columns_ignored{messages}_total"] == rows
    assert stats["rows_of_other_temperature_total"] == rows


def error_after(manager: Any, queue: Any, buffer: Any) -> BaseException:
    """What verl's sampling raises once the thread has ended."""

    def refill(count: int) -> None:
        ask(queue, manager, count)

    buffer.refill_fn = refill
    with pytest.raises(Exception) as caught:
        buffer.sample(1, "train", 1)
    return caught.value


@pytest.mark.parametrize(
    ("more", "column", "words"),
    [
        (("trainer.atropos.fallback_to_grpo=False",), "advantages", "without advantages"),
        (("actor_rollout_ref.rollout.calculate_log_probs=True",), "inference_logprobs", "no log-prob"),
        (("algorithm.adv_estimator=grpo",), "score", "has no score"),
    ],
)  # fmt: skip
def test_what_a_row_lacks_ends_training_with_its_name_and_releases_nothing(
    make_manager, make_buffer, make_producer, queue, bridge, more, column, words
):
    manager = make_manager(*more)
    group = {
        name: values
        for name, values in known_groups(vocabulary=28, version=2)[0].fragments[0].items()
        if name != column
    }
    with make_producer(lane_bytes="1M") as producer:
        producer.put(group, group_id="incomplete")
        ask(queue, manager, 1)
        assert words in str(error_after(manager, queue, make_buffer()))
        manager.close()
        with shmbridge.Consumer(bridge) as consumer, consumer.get(timeout_s=5) as record:
            assert (record.meta.group_id, record.meta.redelivered) == ("incomplete", True)


def rows_of_one_token(token: int, **more: Any) -> dict[str, Any]:
    columns = {"loss_mask": [[0, 1, 1]] * 2, "prompt_length": [1] * 2, "score": [0.0, 1.0]}
    return {"tokens": [[token, token, token]] * 2, "inference_logprobs": [[1, -1, -1]] * 2, **columns, **more}


@pytest.mark.parametrize("where", ["in the step", "in its rows"])
def test_a_group_at_which_every_resumed_run_fails_is_set_aside(
    make_manager, make_producer, clear, tmp_path, where
):
    from verl.trainer.ppo.v1.trainer_base import PPOTrainer

    from shmbridge.consumers.trajectories import NoLogprobs
    from shmbridge.consumers.verl.trainer import BridgePPOTrainer

    def add_batch(trainer: Any) -> None:
        ask(clear, trainer.agent_loop_manager, 4)

    class Trainer(BridgePPOTrainer):
        """verl's, whose workers end at one group."""

        _add_batch_to_generate = add_batch

        def _add_prompts_to_generate(self, count: int) -> None:
            ask(clear, self.agent_loop_manager, count)

        def _step_once(self, metrics: Any, timing: Any, size: int) -> Any:
            batch, _ = self.replay_buffer.sample(1, "train", size)
            rows = clear.kv_batch_get(keys=batch.keys, partition_id="train", select_fields=["prompts"])
            self.groups = {int(prompt[0]) for prompt in rows["prompts"]}
            if 2 in self.groups and where == "in the step":
                raise FloatingPointError("the loss is not finite")
            return batch

    assert issubclass(Trainer, PPOTrainer)
    trained: list[int] = []
    unknown = {"inference_logprobs": [[1, -1, float("nan")]] * 2} if where == "in its rows" else {}
    with make_producer(lane_bytes="1M") as producer:
        for token in range(20):
            producer.put(rows_of_one_token(token, **(unknown if token == 2 else {})), group_id=f"g{token}")
        for runs in range(12):
            manager = make_manager(
                "data.train_batch_size=4", "actor_rollout_ref.rollout.calculate_log_probs=True"
            )
            trainer = Trainer(manager.config)
            trainer.agent_loop_manager, trainer.global_steps = manager, 1
            trainer.replay_buffer.poll_interval = 0.05
            try:
                while len(trained) < 16:
                    batch = trainer.step({}, {})
                    trained += trainer.groups
                    manager.step_ended(batch.keys)
                    clear.kv_clear(keys=batch.keys, partition_id="train")
                break
            except (FloatingPointError, NoLogprobs):
                manager.close()
                if there := list((clear.kv_list("train") or {}).get("train", {})):
                    clear.kv_clear(keys=there, partition_id="train")
    assert len(trained) == len(set(trained)) == 16
    assert 2 not in trained
    assert runs >= 3
    assert [record.group_id for record in read_archive(tmp_path / "set_aside")] == ["g2"]


@pytest.mark.parametrize("unfit", ["refuse", "leave_out"])
def test_rows_longer_than_verls_dynamic_batches_are_named_or_left_out(
    make_manager, make_buffer, make_producer, queue, unfit
):
    most = "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=6"
    logprob = "actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu=8"
    dynamic = "actor_rollout_ref.actor.use_dynamic_bsz=True"
    manager = make_manager(dynamic, most, logprob, f"+trainer.atropos.unfit={unfit}")
    long = {"tokens": [[3] * 7, [3] * 3], "loss_mask": [[0] + [1] * 6, [0, 1, 1]]}
    logprobs = {"inference_logprobs": [[-1] * 7, [-1] * 3]}
    with make_producer(lane_bytes="1M") as producer:
        producer.put(rows_of_one_token(3, **long, **logprobs), group_id="long")
        (uid,) = ask(queue, manager, 1)
        if unfit == "refuse":
            error = error_after(manager, queue, make_buffer())
            assert "row 0 of group long of environment" in str(error)
            assert "has 7 tokens, and the trainer takes 6" in str(error)
            return
        batch, _ = make_buffer().sample(1, "train", 1)
    assert batch.keys == [f"{uid}_1_0"]
    assert manager.stats()["feed_rows_left_out_too_long_total"] == 1


def test_groups_are_held_until_verl_names_a_checkpoint_with_them(
    make_manager, make_buffer, make_producer, queue, tmp_path, monkeypatch
):
    """As where its ranks write on once its save has returned (`async_save`)."""
    from verl.trainer.ppo.v1.trainer_base import PPOTrainer

    from shmbridge.consumers.verl.trainer import BridgePPOTrainer

    monkeypatch.setattr(PPOTrainer, "_save_checkpoint", lambda self: None)
    manager = make_manager("trainer.save_freq=1")
    trainer = BridgePPOTrainer(manager.config)
    trainer.agent_loop_manager = manager
    with make_producer(lane_bytes="1M") as producer:
        for step in (1, 2):
            producer.put(rows_of_one_token(step))
            ask(queue, manager, 1, step=step)
            trainer.global_steps = step
            trainer._trained = make_buffer().sample(step, "train", 1)[0].keys
            trainer._save_checkpoint()
    assert manager.stats()["feed_steps_trained_held"] == 2
    for step, held in ((1, 1), (2, 0)):
        (tmp_path / "latest_checkpointed_iteration.txt").write_text(str(step))
        trainer._release_saved()
        assert manager.stats()["feed_steps_trained_held"] == held
    assert trainer._metrics["atropos/batch_groups"] == 1


def test_a_trained_bridge_is_refused_unless_verl_has_resumed(
    make_manager, make_buffer, make_producer, queue, bridge
):
    from shmbridge.consumers.verl.trainer import BridgePPOTrainer

    with make_producer(lane_bytes="1M") as producer:
        producer.put(rows_of_one_token(3))
        with shmbridge.Consumer(bridge) as before:
            before.publish_policy_version(3)
        manager = make_manager()
        trainer = types.SimpleNamespace(
            agent_loop_manager=manager,
            _resumed=None,
            _send_weights=lambda step: pytest.fail("weights are sent"),
        )
        with pytest.raises(BridgeAhead, match="trained up to version 3"):
            BridgePPOTrainer.on_train_begin(trainer)
        manager.close()
        sync = "trainer.v1.trainer_mode=sync"
        with pytest.raises(ValueError, match=r"does not load the bridge's weights -> .*mode=shmbridge"):
            make_manager(sync, "+trainer.atropos.start=from-bridge")
        manager = make_manager(sync)
        ask(queue, manager, 1)
        assert isinstance(error_after(manager, queue, make_buffer()), BridgeAhead)
        manager.close()
        manager = make_manager(sync)
        ask(queue, manager, 1, step=4)  # verl has loaded a checkpoint of step 3
        assert make_buffer().sample(4, "train", 1)[0].keys


def test_too_few_groups_within_the_recipes_limits_end_training(make_manager, make_buffer, queue):
    manager = make_manager("trainer.atropos.max_wait_time=0.5")
    ask(queue, manager, 1)
    error = error_after(manager, queue, make_buffer())
    assert isinstance(error, shmbridge.ConsumerEmpty)
    assert "0 groups are there for a step of 1 group" in str(error)
    assert "trainer.atropos.max_wait_time" in str(error)


def test_a_first_token_without_a_prompt_is_counted_and_not_trained(
    make_manager, make_buffer, make_producer, queue
):
    manager = make_manager()
    rows = {
        "tokens": [np.arange(1, 7, dtype=np.int32)] * 4,
        "prompt_length": [0, 0, 2, 2],
        "loss_mask": [
            np.array(mask, np.uint8) for mask in ([1] * 6, [0] + [1] * 5, *[[0, 0, 1, 1, 1, 1]] * 2)
        ],
        "advantages": [np.arange(1, 7, dtype=np.float32)] * 4,
        "score": [0.0, 1.0, 0.0, 1.0],
    }
    with make_producer(lane_bytes="1M") as producer:
        producer.put(rows)
        ask(queue, manager, 1)
        batch, _ = make_buffer().sample(1, "train", 1)
        found = advantages_of(manager.config, batch)
    assert manager.stats()["first_tokens_untrained_total"] == 1
    at = {key.split("_")[1]: place for place, key in enumerate(batch.keys)}
    assert [len(found["prompts"][at[session]]) for session in "0123"] == [1, 1, 2, 2]
    assert found["advantages"][at["0"]].tolist() == [2, 3, 4, 5, 6]


def test_prompts_of_validation_are_refused_with_what_to_set(make_manager):
    with pytest.raises(ValueError, match="val_before_train=False"):
        make_manager().generate_sequences({"validate": True, "uid": ["a"], "global_steps": 0})
