"""Starts the same rollout over and over, each in a child of its own: `resumed_child.py BRIDGE FILE TASKS`.

For each line on stdin it forks a child and prints its pid, then, once it has ended, how. Python's imports are
done once. The line says where the child kills itself: "note 3" between the third note and its commit, "commit
3" between the third commit and the note of that; "" nowhere.
"""

import asyncio
import os
import random
import signal
import sys

from shmbridge.producers.rollout import Rollout, Sampled, Task
from shmbridge.producers.rollout.runner import Position
from tests.environments.byte_tokenizer import byte_tokenizer


class Server:
    async def sample(self, prompt, sampling, messages):
        await asyncio.sleep(random.uniform(0.002, 0.02))
        return Sampled([97], [-1.0], [-1], "stop")


async def answer(episode, data) -> None:
    await episode.sample()
    episode.score = 1.0


async def play(bridge: str, file: str, count: int) -> None:
    tasks = (Task([{"role": "user", "content": "?"}], None, str(number)) for number in range(count))
    options = {"group_size": 1, "concurrency": 4, "lane_bytes": "1M"}
    async with Rollout(bridge, Server(), byte_tokenizer(), resume=file, **options) as rollout:
        await rollout.run(tasks, answer)


def kill_at(step: str, times: int) -> None:
    """Kills this process in the middle of the `times`-th commit."""
    name = "committing" if step == "note" else "over"
    whole, calls = getattr(Position, name), 0

    def cut(self, *arguments) -> None:
        nonlocal calls
        calls += 1
        if calls == times and step == "commit":
            os.kill(os.getpid(), signal.SIGKILL)
        whole(self, *arguments)
        if calls == times:
            os.kill(os.getpid(), signal.SIGKILL)

    setattr(Position, name, cut)


def main(bridge: str, file: str, count: int) -> None:
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            signal.alarm(60)
            if line.strip():
                step, times = line.split()
                kill_at(step, int(times))
            asyncio.run(play(bridge, file, count))
            sys.stderr.flush()
            os._exit(0)
        print(pid, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
