"""Groups of a bridge arrive in ROLL's queue as ROLL's own rows, and are released when they were trained."""

import json
import threading
from types import SimpleNamespace

import pytest
import torch

import shmbridge
from shmbridge.consumers.feed import BridgeAhead, Drained
from shmbridge.consumers.roll.env_manager import GROUP, WORD, Settings, roll_rows, workers_of
from shmbridge.consumers.trajectories import UnfitRow, trajectories
from shmbridge.testing.fixtures import loss_matrix
from tests.trainers.contract import assert_contract, fully_recorded, without
from tests.trainers.roll.conftest import Queue, rows_of

LENGTH = 48
pytestmark = pytest.mark.timeout(60)


def loop(manager, step: int = 4) -> None:
    """Runs a manager as an environment worker does, in its step."""
    from roll.distributed.scheduler.protocol import DataProto

    manager.update_step(step)
    manager.run_rollout_loop(DataProto(meta_info={"seed": 1}))


@pytest.mark.parametrize("logprobs", [False, True])
def test_groups_arrive_as_they_were_put(make_manager, make_producer, recorded, logprobs):
    """Up to ROLL's queue; test_pipeline.py has its loss."""
    groups = fully_recorded(loss_matrix()) if logprobs else loss_matrix()
    producer = make_producer(lane_bytes="1M")
    for group in groups:
        group.put(producer)
    trained = without(groups, "evaluation")
    queue = Queue(len(trained))
    loop(make_manager(queue, infer_logprobs=logprobs, max_staleness=2))
    for rollout, group in zip(queue.rollouts, trained, strict=True):
        prompts = rollout.batch["prompt_mask"].sum(-1).tolist()
        assert prompts == [row.prompt_length for row in group.rows]
        scores = [row.score for row in group.rows]
        assert rollout.batch["scores"].sum(-1).tolist() == pytest.approx(scores, abs=1e-6)
        objects = rollout.non_tensor_batch
        assert objects["episode_scores"].tolist() == scores
        assert (set(objects["shm_group"]), len(set(objects["traj_id"]))) == ({group.group_id}, 4)
        assert set(objects["shm_min_version"]) == set(objects["shm_step"]) == {group.versions[0]}
        assert len(set(objects["traj_group_id"])) == 1
        metrics = rollout.meta_info["metrics"]
        assert (metrics.get("shm/columns_ignored/token_versions@sum") == 4) == (group.name == "many versions")
        assert metrics["shm/rows_trimmed@sum"] == 0
        assert (rollout.batch["input_ids"][~rollout.batch["attention_mask"].bool()] == 63).all()
    columns = ("response_mask", "shm_advantages", "infer_logprobs")
    seen = [row for rollout in queue.rollouts for row in rows_of(rollout.batch, *columns)]
    setting, release = f"`infer_logprobs: {str(logprobs).lower()}`", recorded["commit"][:8]
    assert_contract("ROLL, up to its queue", f"interface of {release}", setting, groups, seen)


def test_rows_have_rolls_own_columns(known, make_manager, recorded):
    queue = Queue(1)
    loop(make_manager(queue))
    (rollout,) = queue.rollouts
    for name, (kind, shorter) in recorded["rows of a trajectory"].items():
        if shorter is None:
            assert name in rollout.non_tensor_batch.keys()  # noqa: SIM118
            assert rollout.non_tensor_batch[name].dtype == object
        else:
            assert rollout.batch[name].dtype == getattr(torch, kind), name
            assert rollout.batch[name].shape == (4, LENGTH + shorter), name


def test_a_group_without_logprobs_is_refused_by_name_and_comes_again(known, make_manager, bridge):
    groups, _ = known
    with pytest.raises(shmbridge.InvalidRecord, match=r"row 0 of group known-3-2.*infer_logprobs: false"):
        loop(make_manager(Queue(5), max_staleness=2))
    with shmbridge.Consumer(bridge) as again:
        found = [record.meta.group_id for record in again.poll()]
    assert found == [group.group_id for group in groups for _ in group.fragments], "none was released"


@pytest.mark.parametrize("lag", [0, 2])
def test_without_the_pipeline_a_group_is_released_after_its_last_possible_step(
    known, make_manager, bridge, lag
):
    _, producer = known
    manager = make_manager(Queue(2), size=5, lag=lag, max_staleness=2)
    reader = manager._join()  # it stays open behind the manager
    loop(manager)
    for step in range(4, 6 + lag):
        reader.begin_step(step)
        assert reader.feed.stats()["released_total"] == (2 if step == 5 + lag else 0), step
        assert producer.policy_version == step
    reader.leave(orderly=True)
    with shmbridge.Consumer(bridge) as again:
        assert [record.meta.group_id[-1] for record in again.poll()] == ["2", "3", "3", "4"]


def test_a_group_older_than_its_episode_is_refused_by_roll_and_counted(known, make_manager):
    queue = Queue(4, began=3)  # the last group began at version 2
    loop(make_manager(queue, infer_logprobs=False, max_staleness=2))
    assert len(queue.rollouts) == 4
    stale = Queue(1, began=3)
    manager = make_manager(stale, infer_logprobs=False, max_staleness=3, start="from-scratch")
    manager.update_step(4)
    done = threading.Thread(target=loop, args=(manager,), daemon=True)
    done.start()
    deadline = threading.Event()
    while not stale.refused and not deadline.wait(0.02):
        pass
    assert not stale.rollouts
    newer = {"tokens": [[1, 2]], "loss_mask": [[0, 1]], "advantages": [[0, 1]], "score": [1.0]}
    known[1].put(newer, group_id="newer", policy_version=4)
    done.join(20)
    assert not done.is_alive(), "the episode takes the next group"
    (rollout,) = stale.rollouts
    assert set(rollout.non_tensor_batch["shm_group"]) == {"newer"}
    assert rollout.meta_info["metrics"]["shm/groups_dropped/refused_stale@max"] == 1
    assert stale.refused == 1


@pytest.mark.parametrize(("logprobs", "step", "warned"), [(False, 5, 1), (False, 4, 0), (True, 5, 0)])
def test_stale_rows_that_count_as_fresh_are_named_once(known, make_manager, caplog, logprobs, step, warned):
    """The first two known groups are of version 4."""
    loop(make_manager(Queue(2), infer_logprobs=logprobs, max_staleness=3), step=step)
    said = [each.message for each in caplog.records if "as if fresh" in each.message]
    assert len(said) == warned
    assert all("4 rows of a step" in each and "-> env_config.infer_logprobs: true" in each for each in said)


def test_trimmed_rows_are_counted(known, make_manager):
    groups, _ = known
    queue = Queue(1)
    loop(make_manager(queue, length=10))
    over = [len(row.tokens) - 10 for row in groups[0].rows if len(row.tokens) > 10]
    metrics = queue.rollouts[0].meta_info["metrics"]
    assert metrics["shm/rows_trimmed@sum"] == len(over) > 0
    assert metrics["shm/tokens_trimmed@sum"] == sum(over)
    scores = [row.score for row in groups[0].rows]
    assert queue.rollouts[0].batch["scores"].sum(-1).tolist() == pytest.approx(scores)


def test_a_row_of_each_step(bridge, make_manager, make_producer, recorded):
    make_producer().put(
        {
            "tokens": [[1, 2, 3, 4, 5, 6, 7], [1, 2, 3, 4]],
            "loss_mask": [[0, 0, 1, 1, 0, 1, 1], [0, 0, 1, 1]],
            "score": [2.0, 1.0],
            "advantages": [[0, 0, 0.5, 0.25, 0, -1, -2], [0, 0, 3, 4]],
            "inference_logprobs": [[0, 0, -1, -2, 0, -3, -4], [0, 0, -5, -6]],
            "step_rewards": [[0.5, 1.5], [1.0]],
            "step_ends": [[4, 7], [4]],
        },
        policy_version=0,
    )
    queue = Queue(1)
    loop(make_manager(queue, length=8, rows="step"), step=0)
    (rollout,) = queue.rollouts
    objects = rollout.non_tensor_batch
    assert set(recorded["rows of a step"]) <= set(rollout.batch.keys()) | set(objects.keys())
    assert rollout.batch["response_mask"].int().tolist() == [
        [0, 0, 1, 1, 0, 0, 0, 0], [0, 0, 0, 0, 0, 1, 1, 0], [0, 0, 1, 1, 0, 0, 0, 0]
    ]  # fmt: skip
    assert rollout.batch["shm_advantages"].tolist() == [
        [0, 0.5, 0.25, 0, 0, 0, 0], [0, 0, 0, 0, -1, -2, 0], [0, 3, 4, 0, 0, 0, 0]
    ]  # fmt: skip
    assert rollout.batch["attention_mask"].sum(-1).tolist() == [4, 7, 4]
    assert [list(objects[name]) for name in ("step_scores", "step", "episode_scores")] == [
        [0.5, 1.5, 1.0], [0, 1, 0], [2.0, 2.0, 1.0]
    ]  # fmt: skip
    assert [each[-2:] for each in objects["traj_id"]] == ["_0", "_0", "_1"]
    assert objects["state_hash"][0] == objects["state_hash"][2] != objects["state_hash"][1]


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"group_size": 4}, "group_size is 4"),
        ({"rows": "turn"}, "rows='turn' is no"),
        ({"bridges": "x"}, "env_config has bridges"),
        ({"credit": {"estimators": 1}}, "env_config.credit"),
        ({"credit": {"estimator": "gpro"}}, "estimator='gpro' -> one of grpo"),
        ({"max_staleness": -1}, "max_staleness=-1 is no"),
        ({"max_staleness": "2"}, "max_staleness='2' is no"),
        ({"infer_logprobs": "false"}, "infer_logprobs='false' is no"),
        ({"unfit": "drop"}, "unfit='drop' is no"),
        ({"set_aside_after": True}, "set_aside_after=True is no"),
        ({"release_at": "save"}, "release_at='save' is no"),
        ({"start": "from-bridge"}, "start='from-bridge' is none of from-scratch"),
    ],
)
def test_what_is_wrong_in_the_configuration_is_said_before_anything_opens(make_manager, wrong, says):
    with pytest.raises(shmbridge.BadArgument, match=says):
        make_manager(Queue(1), **wrong)


def test_a_name_that_no_bridge_can_have_is_refused():
    with pytest.raises(shmbridge.BadBridgeName, match="run 1"):
        Settings.of({"bridge": "run 1"})


def test_trained_tokens_after_the_last_step_are_counted(bridge):
    group = {"tokens": [[1, 2, 3, 4, 5]], "loss_mask": [[0, 1, 1, 1, 1]], "score": [1.0]}
    with shmbridge.Consumer(bridge) as consumer, shmbridge.Producer(bridge, lane_bytes="64K") as producer:
        producer.put(group | {"step_rewards": [[1.0]], "step_ends": [[3]]})
        with next(consumer.batches(groups=1, timeout_s=10)) as batch:
            made = roll_rows(trajectories(batch)[0], 8, pad=0, logprobs=False, by="step")
    assert made.counts["tokens_after_last_step"] == 2


def test_two_workers_of_one_bridge_are_refused(bridge):
    config = {"config": {"bridge": bridge}}
    worker = SimpleNamespace(env_configs={0: {0: config, 1: config}, 1: {2: config}, 2: {3: {}}})
    found = [workers_of(worker, bridge), workers_of(worker), workers_of(worker, "other")]
    assert found == [[0, 1], [0, 1], []]


def test_a_pipeline_that_begins_again_goes_on_from_the_bridges_version(bridge, producer, make_manager):
    earlier = make_manager(Queue(0))._join()
    earlier.begin_step(0)
    earlier.begin_step(7)
    earlier.leave(orderly=False)
    with pytest.raises(BridgeAhead, match="trained up to version 7"):
        loop(make_manager(Queue(0)), step=0)
    for resumed in ({"start": "from-scratch"}, {"pipeline": {"resume_from_checkpoint": "a folder"}}):
        reader = make_manager(Queue(0), **resumed)._join()
        version = producer.policy_version
        for step in (0, 1):
            reader.begin_step(step)
            assert producer.policy_version == version + step
        reader.leave(orderly=True)


def test_one_bridge_is_read_with_the_same_settings(make_manager):
    reader = make_manager(Queue(0))._join()
    assert make_manager(Queue(0))._join() is reader
    with pytest.raises(shmbridge.BadArgument, match=r"'lag': 0, .* asked for with \{'lag': 1, "):
        make_manager(Queue(0), lag=1)._join()
    reader.leave(orderly=True)
    reader.leave(orderly=True)
    make_manager(Queue(0), lag=1)._join().leave(orderly=True)


def test_a_drained_bridge_ends_the_wait(make_manager):
    manager = make_manager(Queue(1))
    reader = manager._join()
    reader.feed.drain()
    with pytest.raises(Drained, match="0 groups are there"):
        loop(manager)
    reader.leave(orderly=True)


@pytest.mark.parametrize("unfit", ["cut", "refuse", "leave_out"])
def test_rows_longer_than_rolls_are_cut_named_or_left_out(bridge, make_manager, unfit):
    queue, rows = Queue(1), {"loss_mask": [[1] * 9, [0, 1]], "score": [1.0, 0.0]}
    with shmbridge.Producer(bridge, lane_bytes="64K") as producer:
        producer.put({"tokens": [[1] * 9] * 2, "loss_mask": [[1] * 9] * 2}, group_id="longer")
        producer.put({"tokens": [[1] * 9, [1, 2]], **rows}, group_id="long")
        manager = make_manager(queue, length=8, infer_logprobs=False, unfit=unfit, set_aside_after=1)
        if unfit == "refuse":
            with pytest.raises(UnfitRow, match=r"row 0 of group longer .* has 9 tokens"):
                loop(manager)
            return
        loop(manager)
    (rollout,) = queue.rollouts
    metrics = rollout.meta_info["metrics"]
    counts = {name: value for name, value in metrics.items() if value and "rows_" in name}
    if unfit == "cut":
        assert counts == {"shm/rows_trimmed@sum": 2, "shm/rows_unscored@sum": 2}
    else:
        assert counts == {"shm/rows_left_out_too_long@max": 3}
        assert metrics["shm/groups_dropped/unfit@max"] == 1
        assert rollout.batch["attention_mask"].sum(-1).tolist() == [2]


def test_without_the_pipeline_no_checkpoint_releases(make_manager):
    with pytest.raises(shmbridge.BadArgument, match=r"nothing tells an environment .*ShmAgenticPipeline"):
        make_manager(Queue(0), release_at="checkpoint")._join()


def test_the_pipeline_tells_what_became_of_groups(known, make_manager, bridge):
    """Of four groups two are trained, one is dropped by ROLL, and one is at fault."""
    _, producer = known
    queue = Queue(4)
    manager = make_manager(queue, size=2, lag=1, infer_logprobs=False, max_staleness=9)
    manager.update_step(-1, {WORD: {"states": {}}})
    reader = manager._join()
    loop(manager)
    manager._reader = reader
    first, second, _, fourth = (rollout.non_tensor_batch[GROUP][0] for rollout in queue.rollouts)
    for _ in range(2):  # as each of a worker's environment managers passes it on
        manager.update_step(4, {WORD: {"groups": [first, second]}})
    assert producer.policy_version == 4, "the engines have no other weights yet"
    reader.begin_step(5)
    assert producer.policy_version == 5
    assert reader.feed.stats()["feed_steps_trained_held"] == 2
    manager.update_step(4, {WORD: {"groups": [fourth], "failed": "ValueError: nan"}})
    state = json.loads(first)
    manager.update_step(4, {WORD: {"saved": {bridge: state}}})
    assert reader.feed.stats()["released_total"] == 1
    manager.update_step(6)
    assert reader.feed.stats()["feed_groups_dropped_total{by_roll}"] == 1
    manager._reader = None
    reader.leave(orderly=True)
    with shmbridge.Consumer(bridge) as again:
        left = [(record.meta.group_id[-1], record.meta.redelivered) for record in again.poll()]
    assert left == [("1", True), ("3", True), ("3", True), ("4", False)]
