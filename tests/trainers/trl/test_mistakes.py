"""What users get wrong is said in a sentence: as early as it can be known, and with nothing released."""

import pytest

import shmbridge
from shmbridge.consumers.trl import ShmGRPOTrainer, ShmRolloutWorker, Unsupported, shm_rollout_func


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
