"""Steps whose version is not published count all the same, in staleness and in the versions that follow."""

import pytest

import shmbridge
from shmbridge.consumers.trl import ShmGRPOTrainer, shm_rollout_func
from tests.trainers.trl.target_groups import group


@pytest.fixture
def trainer(bridge, tiny, settings):
    """Three steps, a version published after every second one."""
    with shm_rollout_func(bridge, timeout_s=30) as rollouts:
        yield ShmGRPOTrainer(tiny, args=settings(max_steps=3), rollout_func=rollouts, publish_every=2)


def test_staleness_counts_versions_that_are_not_published(trainer, make_producer):
    producer = make_producer(lane_bytes="1M")
    for number in range(3):
        producer.put(group(number), policy_version=0)
    trainer.train()
    lags = [each["bridge/staleness_max"] for each in trainer.state.log_history[:-1]]
    assert lags == [0, 1, 2]  # 1: the first step's version is not published


def test_a_version_that_was_not_published_is_not_given_to_other_weights(trainer, make_producer):
    producer = make_producer(lane_bytes="1M")
    for number in range(6):
        producer.put(group(number))
    trainer.train()
    assert producer.policy_version == 2
    trainer.train()
    assert producer.policy_version == 6  # 3 was the last step's; the second run begins at 4
    assert trainer.rollouts.policy_version == 7


def test_training_goes_on_after_a_wait_that_was_too_long(trainer, make_producer):
    trainer.rollouts._timeout_s = 0.1
    with pytest.raises(shmbridge.ConsumerEmpty):
        trainer.train()
    producer = make_producer(lane_bytes="1M")
    for number in range(3):
        producer.put(group(number))
    trainer.rollouts._timeout_s = 30
    trainer.train()
    assert trainer.state.global_step == 3
