"""What the adapter builds on is what ROLL has: interface.json, and the checkout where there is one."""

import inspect

from shmbridge.consumers.roll.actor_worker import ShmActorWorker
from shmbridge.consumers.roll.env_manager import ShmEnvManager
from shmbridge.consumers.roll.pipeline import ShmAgenticPipeline
from tests.trainers.roll.conftest import CHECKOUT

MANAGER = "roll.pipeline.agentic.env_manager.base_env_manager:BaseEnvManager"
OURS = {
    "roll.pipeline.agentic.env_manager.traj_env_manager:TrajEnvManager.__init__": ShmEnvManager.__init__,
    f"{MANAGER}.run_rollout_loop": ShmEnvManager.run_rollout_loop,
    f"{MANAGER}.update_step": ShmEnvManager.update_step,
    "roll.pipeline.agentic.agentic_actor_worker:ActorWorker.loss_func": ShmActorWorker.loss_func,
    "roll.pipeline.agentic.agentic_actor_worker:ActorWorker.get_old_log_probs_with_cache": (
        ShmActorWorker.get_old_log_probs_with_cache
    ),
    **{
        f"roll.pipeline.agentic.agentic_pipeline:AgenticPipeline.{name}": getattr(ShmAgenticPipeline, name)
        for name in ("__init__", "adjust_batch", "do_checkpoint", "run")
    },
}


def parameters(function) -> list[str]:
    return list(inspect.signature(function).parameters)


def test_what_is_overridden_takes_what_roll_gives(recorded):
    for path, function in OURS.items():
        assert parameters(function) == recorded["signatures"][path], path


def test_the_calls_of_rolls_queue_fit(recorded):
    queue = "roll.distributed.scheduler.rollout_scheduler:GroupQueueManager"
    assert recorded["signatures"][f"{queue}.put"][1:] == [
        "group_id", "episode_id", "start_step", "rollout", "env_id"
    ]  # fmt: skip
    worker = "roll.pipeline.agentic.environment_worker:EnvironmentWorker.update_step"
    assert recorded["signatures"][worker] == ["self", "global_step", "trace_meta"]
    assert "kv" in recorded["signatures"]["roll.utils.worker_state:WorkerState.__init__"]
    assert recorded["signatures"][f"{queue}.get_episode_id"][1:] == ["group_id", "env_id"]


def test_the_recorded_interface_is_that_of_what_runs_here(recorded):
    """The checkout, whole; without one the stand-ins, as far as they go."""
    from tests.trainers.roll import record_interface

    if CHECKOUT:
        found = record_interface.interface()
        assert found == {name: recorded[name] for name in found}
        return
    for path in (
        "roll.distributed.scheduler.protocol:DataProto.from_dict",
        "roll.pipeline.agentic.agentic_actor_worker:ActorWorker.loss_func",
        "roll.pipeline.agentic.agentic_actor_worker:ActorWorker.get_old_log_probs_with_cache",
        "roll.pipeline.agentic.agentic_pipeline:agentic_compute_advantage",
        "roll.third_party.fsdp2.model_update:gather_fsdp2_weights",
        *(f"{MANAGER}.{name}" for name in ("formulate_rollouts", "run_rollout_loop", "stop", "update_step")),
    ):
        found = parameters(record_interface.named(path))
        assert [each for each in found if each != "cls"] == recorded["signatures"][path], path
