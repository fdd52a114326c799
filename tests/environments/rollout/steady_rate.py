"""The rate of a rollout of whose episodes one in five hangs, beside one where these fail at the deadline.

    python -m tests.environments.rollout.steady_rate --deadline-s 5 --window-s 60 --windows 10

Both run at once in this process, so that what else the machine does slows down both. Prints a line of JSON
per window, and last what is left: memory, tickets, tasks of the event loop.
"""

import argparse
import asyncio
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import shmbridge
from shmbridge.producers.rollout import Episode, Limits, Rollout, Sampled, Task
from tests.environments.byte_tokenizer import byte_tokenizer

GROUP, CONCURRENCY = 5, 8
ADMISSION: dict[str, Any] = {"max_off_policy_steps": 2, "groups_per_step": 8, "policy": "oldest"}


class Server:
    """Answers at once."""

    async def sample(self, prompt: Any, sampling: Any, messages: Any) -> Sampled:
        return Sampled([97, 98], [-1.0, -1.0], [-1, -1], "stop")


class Side:
    """One rollout with its consumer, and the rows that came."""

    def __init__(self, bridge: str, hangs: bool, deadline_s: float) -> None:
        self.hangs, self.deadline_s, self.rows = hangs, deadline_s, 0
        self.consumer = shmbridge.Consumer(bridge, **ADMISSION)
        self.consumer.publish_policy_version(0)
        limits = Limits(episode_s=deadline_s if hangs else None, group_s=None)
        options: dict[str, Any] = {"group_size": GROUP, "concurrency": CONCURRENCY, "tickets": True}
        options["lane_bytes"] = "1M"  # all of it is in use soon: it is no growth
        self.rollout = Rollout(bridge, Server(), byte_tokenizer(), limits=limits, **options)
        self.tickets: list[float] = []

    async def play(self, episode: Episode, number: int) -> None:
        """One of five hangs, or fails after as long as the deadline."""
        if episode.repetition_id == number % GROUP:
            if number < CONCURRENCY:  # begin out of step, so that groups come evenly
                await asyncio.sleep(self.deadline_s * number / CONCURRENCY)
                raise RuntimeError("sick")
            await asyncio.sleep(1e6 if self.hangs else self.deadline_s)
            raise RuntimeError("sick")
        await episode.sample()
        episode.score = 1.0

    async def read(self) -> None:
        """Trains: a step for every eight groups."""
        steps = groups = 0
        async for record in self.consumer:
            with record:
                self.rows += len(record)
            groups += 1
            if groups // 8 > steps:
                steps = groups // 8
                self.consumer.publish_policy_version(steps)
            self.tickets.append(self.consumer.stats()["groups_running"])

    async def run(self) -> None:
        """Plays without end."""
        await self.rollout.run(_tasks(), self.play)


def _tasks() -> Iterator[Task[int]]:
    number = 0
    while True:
        yield Task([{"role": "user", "content": "?"}], number)
        number += 1


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


async def measured(bridge: str, deadline_s: float, window_s: float, windows: int) -> list[dict[str, float]]:
    """Returns what each window had: rows of both sides, memory, tickets, tasks of the event loop."""
    sides = [Side(f"{bridge}-{'hung' if hangs else 'control'}", hangs, deadline_s) for hangs in (True, False)]
    running = [asyncio.create_task(each) for side in sides for each in (side.run(), side.read())]
    seen: list[dict[str, float]] = []
    try:
        await asyncio.sleep(2 * deadline_s)
        for _ in range(windows):
            before = [side.rows for side in sides]
            sides[0].tickets.clear()
            done, _ = await asyncio.wait(running, timeout=window_s, return_when=asyncio.FIRST_COMPLETED)
            for each in done:
                each.result()
            hung, control = (side.rows - rows for side, rows in zip(sides, before, strict=True))
            seen.append(
                {
                    "rows": hung,
                    "control": control,
                    "ratio": hung / control,
                    "resident_bytes": _resident_bytes(),
                    "tickets": max(sides[0].tickets),
                    "tasks": len(asyncio.all_tasks()),
                }
            )
            print(json.dumps(seen[-1]), flush=True)
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        for side in sides:
            await side.rollout.close()
            side.consumer.close()
            shmbridge.clean(side.rollout.producer.bridge, dry_run=False)
    return seen


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--deadline-s", type=float, default=5.0)
    parser.add_argument("--window-s", type=float, default=60.0)
    parser.add_argument("--windows", type=int, default=10)
    options = parser.parse_args()
    asyncio.run(measured(f"steady{os.getpid()}", options.deadline_s, options.window_s, options.windows))


if __name__ == "__main__":
    main()
