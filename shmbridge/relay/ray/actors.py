"""How the actors of relays are made: one of each name, on its node, restarted by Ray."""

from typing import Any

from shmbridge.relay.ray.directory import NAMESPACE


def get_or_make(kind: type, name: str, node_id: str, *arguments: Any, beside: str | None = None) -> Any:
    """Returns the actor of that name, made on that node if there is none; it outlives this process.

    `beside` names a group of calls (`.options(concurrency_group=...)`) that run beside all others.
    """
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    return (
        (ray.remote(kind) if beside is None else ray.remote(concurrency_groups={beside: 1})(kind))
        .options(
            name=name,
            namespace=NAMESPACE,
            lifetime="detached",
            get_if_exists=True,
            max_restarts=-1,
            max_task_retries=0,
            num_cpus=0,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node_id, soft=False),
        )
        .remote(*arguments)
    )


def find(name: str) -> Any:
    """Returns the actor of that name. Raises ValueError if there is none."""
    import ray

    return ray.get_actor(name, namespace=NAMESPACE)
