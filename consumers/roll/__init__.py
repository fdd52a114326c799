"""Feeds ROLL's agentic pipeline from a bridge: a group of the bridge is a rollout of ROLL.

    env_manager_cls: shmbridge.consumers.roll.env_manager.ShmEnvManager      # in custom_envs
    worker_cls: shmbridge.consumers.roll.actor_worker.ShmActorWorker         # in actor_train

Hub: the process of the one environment worker whose `ShmEnvManager`s read the bridge; all of its threads
share one feed (`BridgeReader`). A bridge named by two workers is refused when they are made.

Released: with `ShmAgenticPipeline`, which knows what a step trained, once a checkpoint with it is durable, or
after the step. Without it at the first `update_step` after the last step that can train the record: with
`async_generation_ratio: 0` right after its optimizer step, with a ratio r, r steps later.

Again after a kill of the worker or of everything: what was put to ROLL and not released, marked
`redelivered`. What the checkpoint contains is then released and counted, and not trained again.

Imports of ROLL, Ray and torch are in `env_manager.py`, `actor_worker.py` and `pipeline.py` only.
"""
