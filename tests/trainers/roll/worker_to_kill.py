"""An environment worker that is killed: step 0 trained two groups, step 1 was given two more.

Says PUT with the groups of each step, then waits to be killed.
"""

import sys
import threading
import time

from tests.trainers.roll import conftest
from tests.trainers.roll.conftest import Queue, manager_of


class Slow(Queue):
    """Gives an episode for each release of a semaphore, and none before; says when a rollout was put."""

    def __init__(self) -> None:
        super().__init__(9)
        self.allowed, self.arrived = threading.Semaphore(0), threading.Semaphore(0)
        self.get_episode_id.remote, self.put.remote = self._allowed, self._arrived

    def _allowed(self, group_id, env_id=None):
        self.allowed.acquire()
        return self._next(group_id, env_id)

    def _arrived(self, *given):
        self._put(*given)
        self.arrived.release()


def main(bridge: str) -> None:
    """Plays the two steps."""
    from roll.distributed.scheduler.protocol import DataProto

    from shmbridge.consumers.roll import env_manager

    env_manager.ray.get = lambda value: value
    queue = Slow()
    manager = manager_of(bridge, queue, size=2, infer_logprobs=False, max_staleness=9)
    manager.update_step(4)
    loop = threading.Thread(
        target=manager.run_rollout_loop, args=(DataProto(meta_info={"seed": 1}),), daemon=True
    )
    loop.start()
    for step in (4, 5):
        manager.update_step(step)
        for _ in range(2):
            queue.allowed.release()
            queue.arrived.acquire()
        names = [rollout.non_tensor_batch["shm_group"][0] for rollout in queue.rollouts[-2:]]
        print("PUT", step, *names, flush=True)
    while True:
        time.sleep(60)


if __name__ == "__main__":
    assert conftest
    main(sys.argv[1])
