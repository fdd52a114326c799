"""What verl loads in each of its processes, through the entry point group `verl.plugins`.

Loading this module registers, under verl's own registries: the advantage estimators `shmbridge` and
`grpo_atropos`, the checkpoint engine, the rollout name and the trainer mode `shmbridge`; and TransferQueue's
backend `shmbridge`. It opens no bridge and starts nothing. verl logs a plugin's failure at debug level only,
so the failure is logged here as well.
"""

from __future__ import annotations

import logging
from typing import Any, NoReturn

from shmbridge.consumers.feed import warn_if_untested

log = logging.getLogger(__name__)


def register() -> None:
    """Registers everything; idempotent. Never blocks.

    Raises ValueError if another package has taken one of the estimators' names.
    """
    warn_if_untested("verl", "0.9.1", "0.10")  # first: another release may fail at the imports
    from verl.trainer.ppo.core_algos import register_adv_est
    from verl.workers.rollout.replica import RolloutReplicaRegistry

    from shmbridge.consumers import transfer_queue
    from shmbridge.consumers.verl import settings, trainer, weights  # noqa: F401  # their imports register

    for name in settings.NAMES:
        register_adv_est(name)(settings.passed_through)
    RolloutReplicaRegistry.register("shmbridge", lambda: _no_replica)
    transfer_queue.register()


def _no_replica(*_: Any, **__: Any) -> NoReturn:
    """Stands where verl would start an engine of the rollout name `shmbridge`, and refuses."""
    raise ValueError(
        "actor_rollout_ref.rollout.name=shmbridge has no engines to start -> set "
        "trainer.v1.trainer_mode=shmbridge, or name the engine that verl is to start"
    )


try:
    register()
except Exception:
    log.exception("the verl plugin of shmbridge is not loaded")
    raise
