"""What users get wrong is said in a sentence: as early as it can be known, and with nothing released."""

import threading

import pytest

import shmbridge
from shmbridge.consumers.trajectories import UnfitRow
from shmbridge.consumers.trl import ShmGRPOTrainer, ShmRolloutWorker, Unsupported, shm_rollout_func
from shmbridge.testing import wait_until
from shmbridge.watch import diagnosis
from tests.trainers.trl.target_groups import group


@pytest.mark.parametrize("made", [shm_rollout_func, ShmRolloutWorker])
def test_a_misspelt_option_is_refused_before_a_model_is_loaded(made, bridge):
    with pytest.raises(TypeError, match="max_stale"):
        made(bridge, max_stale=2)


@pytest.mark.parametrize("made", [shm_rollout_func, ShmRolloutWorker])
def test_so_is_a_word_in_place_of_a_credit(made, bridge):
    with pytest.raises(TypeError, match=r"credit='rloo' -> Credit\("):
        made(bridge, credit="rloo")


def test_so_is_an_address_in_place_of_a_weight_sync(bridge, tiny, settings):
    rollouts = shm_rollout_func(bridge)
    with pytest.raises(Unsupported, match=r"weights='http.*' -> WeightSync\("):
        ShmGRPOTrainer(tiny, args=settings(), rollout_func=rollouts, weights="http://127.0.0.1:8000")


@pytest.mark.parametrize("made", [shm_rollout_func, ShmRolloutWorker])
@pytest.mark.parametrize("name", ["", "run 1", "x" * 60])
def test_so_is_a_name_that_no_bridge_can_have(made, name):
    with pytest.raises(ValueError, match="bridge"):
        made(name)


def test_rollouts_that_are_closed_open_no_bridge(bridge, tiny, settings):
    with shm_rollout_func(bridge) as rollouts:
        pass
    with pytest.raises(Unsupported, match="closed -> "):
        ShmGRPOTrainer(tiny, args=settings(), rollout_func=rollouts)
    assert bridge not in [each.name for each in shmbridge.list_bridges()]


def test_a_token_that_the_model_does_not_know_is_named(bridge, tiny, settings, make_producer):
    producer = make_producer(env_name="gsm8k", lane_bytes="1M")
    made = group(0)
    made["tokens"][2][5] = 64
    producer.put(made, group_id="odd")
    with shm_rollout_func(bridge, timeout_s=30) as rollouts:
        trainer = ShmGRPOTrainer(tiny, args=settings(), rollout_func=rollouts)
        words = r"row 2 of group odd of environment 'gsm8k' has token 64, and the model knows 64"
        with pytest.raises(UnfitRow, match=words):
            trainer.train()
        assert rollouts.stats()["released_total"] == 0


def test_a_wait_without_an_end_is_said(bridge, tiny, settings, make_producer, caplog, monkeypatch):
    monkeypatch.setattr(diagnosis, "LONG_S", 0.2)
    producer = make_producer(lane_bytes="1M")
    with shm_rollout_func(bridge) as rollouts:
        trainer = ShmGRPOTrainer(tiny, args=settings(), rollout_func=rollouts)
        later = threading.Thread(
            target=lambda: (
                wait_until(lambda: "the learner waits for" in caplog.text, 20),
                producer.put(group(0)),
            )
        )
        later.start()
        trainer.train()
        later.join()
    assert f"bridge {bridge!r}: the learner waits for environments" in caplog.text


def test_a_second_trainer_is_told_which_process_has_the_bridge(bridge, tiny, settings):
    with shm_rollout_func(bridge) as first:
        ShmGRPOTrainer(tiny, args=settings(), rollout_func=first)
        with shm_rollout_func(bridge) as second, pytest.raises(shmbridge.ConsumerTaken, match="pid"):
            ShmGRPOTrainer(tiny, args=settings(), rollout_func=second)
