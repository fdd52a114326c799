"""Feeds ROLL's agentic pipeline from a bridge: a group of the bridge is a rollout of ROLL.

    env_manager_cls: shmbridge.consumers.roll.env_manager.ShmEnvManager      # in custom_envs
    worker_cls: shmbridge.consumers.roll.actor_worker.ShmActorWorker         # in actor_train

Hub: the process of the one environment worker whose `ShmEnvManager`s read the bridge; all of its threads
share one consumer (`bridge_reader.py`). A bridge named by two workers is refused when they are made.

Released: at the first `update_step` (the pipeline's next `get_batch`) after the last step that can train the
record: with `async_generation_ratio: 0` that is right after the optimizer step it was trained in and its
checkpoint; with a ratio r, r steps later, since ROLL tells no environment when it took a rollout.

Again after a kill of the worker or of everything: what was put to ROLL and not released, marked
`redelivered`. Groups that were in no optimizer step yet are always among them; with a ratio r, so are those
of the last r.

Imports of ROLL, Ray and torch are in `env_manager.py`, `actor_worker.py` and `pipeline.py` only.
"""
