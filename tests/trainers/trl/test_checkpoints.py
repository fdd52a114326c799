"""Groups are held until a checkpoint has them; a step that fails is noted; a trained bridge is refused."""

import json

import pytest

from shmbridge.archive.folder import read_archive
from shmbridge.consumers.feed import BridgeAhead
from shmbridge.consumers.trajectories import UnfitRow
from shmbridge.consumers.trl import ShmGRPOTrainer, Unsupported, shm_rollout_func
from tests.trainers.trl.target_groups import group


class Failing(ShmGRPOTrainer):
    """Fails in the loss of the groups that are named."""

    poison: tuple[str, ...] = ()
    trained: tuple[str, ...] = ()

    def _compute_loss(self, model, inputs):
        names = {meta.group_id for _, _, batch in self.rollouts._held for meta in batch.meta}
        if names & {*self.poison}:
            raise FloatingPointError("nan loss")
        self.trained += tuple(sorted(names - {*self.trained}))
        return super()._compute_loss(model, inputs)


@pytest.fixture
def start(bridge, tiny, settings):
    """Makes a trainer on the bridge: start(changes of GRPOConfig, **options of shm_rollout_func)."""
    made = []

    def make(changed, **options):
        for rollouts in made:
            rollouts.close()
        made.append(shm_rollout_func(bridge, **{"timeout_s": 10, **options}))
        return Failing(tiny, args=settings(**changed), rollout_func=made[-1])

    yield make
    for rollouts in made:
        rollouts.close()


def put(producer, numbers) -> None:
    for number in numbers:
        producer.put(group(number), group_id=f"group-{number}")


@pytest.mark.parametrize(
    ("changed", "options", "held"),
    [
        ({"save_strategy": "no"}, {}, [0, 0, 0]),
        ({"save_strategy": "steps", "save_steps": 2}, {}, [1, 2, 1]),  # as its last step is saved, too
        ({"save_strategy": "steps", "save_steps": 2}, {"release_at": "step"}, [0, 0, 0]),
        ({"save_strategy": "no"}, {"release_at": "checkpoint"}, [1, 2, 3]),
    ],
)
def test_groups_are_held_until_a_checkpoint_where_the_trainer_saves(
    start, make_producer, changed, options, held
):
    trainer, seen = start({"max_steps": 3, **changed}, **options), []
    put(make_producer(lane_bytes="1M"), range(3))
    end_step = trainer.end_step
    trainer.end_step = lambda step: (
        end_step(step),
        seen.append(trainer.rollouts.stats()["feed_steps_trained_held"]),
    )
    trainer.train()
    assert seen == held
    stats = trainer.rollouts.stats()
    assert stats["released_total"] == (0 if options == {"release_at": "checkpoint"} else 3)


def test_a_run_goes_on_from_its_checkpoint_also_in_the_same_process(start, make_producer, tmp_path):
    trainer = start({"max_steps": 3, "save_strategy": "steps", "save_steps": 2, "save_total_limit": 1})
    producer = make_producer(lane_bytes="1M")
    put(producer, range(5))
    trainer.poison = ("group-3",)
    trainer.args.max_steps = 5
    for _ in range(2):  # the step after the third fails, which no checkpoint has
        with pytest.raises(FloatingPointError):
            trainer.train(resume_from_checkpoint=bool(trainer.trained))
    (saved,) = (tmp_path / "out").glob("checkpoint-*")
    assert saved.name == "checkpoint-2"
    assert trainer.trained == ("group-0", "group-1", "group-2")
    assert producer.policy_version >= 3
    fresh = start({"max_steps": 4, "save_strategy": "steps", "save_steps": 2})
    with pytest.raises(BridgeAhead, match="no checkpoint was loaded"):
        fresh.train()
    fresh.train(resume_from_checkpoint=True)  # the third step again, and group-3 is set aside
    assert fresh.trained == ("group-2", "group-4")
    assert [record.group_id for record in read_archive(tmp_path / "out/set_aside")] == ["group-3"]
    assert fresh.rollouts.stats()["held"] == 0


def test_a_poisonous_group_is_found_by_resumed_runs(start, make_producer, tmp_path):
    put(make_producer(lane_bytes="1M"), range(20))
    more = {"max_steps": 1, "per_device_train_batch_size": 16}
    ends, trained = [], []
    while not ends or ends[-1] != "set aside":
        trainer = start(more, start="from-scratch")
        trainer.poison = ("group-2",)
        try:
            trainer.train()
            ends.append("trained")
        except FloatingPointError:
            aside = trainer.rollouts.stats().get("feed_groups_set_aside_total", 0)
            ends.append("set aside" if aside else "failed")
        trained += trainer.trained
        assert len(ends) < 10
    assert ends.count("failed") == 4
    assert [record.group_id for record in read_archive(tmp_path / "out/set_aside")] == ["group-2"]
    assert len(trained) == len({*trained} - {"group-2"}) == 4 * ends.count("trained")


@pytest.mark.parametrize("unfit", ["unknown token", "too long"])
def test_rows_that_cannot_be_trained_are_left_out_if_asked(start, make_producer, unfit):
    made = group(0)
    made["tokens"][2] = made["tokens"][2].copy()
    if unfit == "unknown token":
        made["tokens"][2][5] = 64
    options = {"longest_row": 6} if unfit == "too long" else {}
    make_producer(lane_bytes="1M").put(made, group_id="odd")
    with pytest.raises(UnfitRow, match=r"of group odd of environment .* has .*leave_out"):
        start({}, **options).train()
    trainer = start({}, unfit="leave_out", start="from-scratch", **options)
    trainer.train()
    stats = trainer.rollouts.stats()
    assert stats["trl_rows_left_out_total"] == (4 if unfit == "too long" else 1)
    assert stats["released_total"] == 1


def test_only_whole_checkpoints_are_gone_on_from(start, make_producer, tmp_path):
    put(make_producer(lane_bytes="1M"), range(4))
    start({"max_steps": 3, "save_strategy": "steps", "save_steps": 1}).train()
    last = tmp_path / "out/checkpoint-3"
    listed = json.loads((last / "shmbridge.json").read_text())
    assert [*listed["held"].values()] == [[2]]
    (last / "trainer_state.json").write_text("{")
    fresh = start({"max_steps": 3, "save_strategy": "steps", "save_steps": 1})
    with pytest.raises(Unsupported, match="was not saved to its end -> resume_from_checkpoint=True"):
        fresh.train(resume_from_checkpoint=str(last))
    fresh.train(resume_from_checkpoint=True)
    assert fresh.trained == ("group-3",)
    for folder in (tmp_path / "out").glob("checkpoint-*"):
        (folder / "trainer_state.json").unlink()
    with pytest.raises(Unsupported, match="was saved to its end"):
        fresh.train(resume_from_checkpoint=True)
