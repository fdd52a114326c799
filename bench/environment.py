"""The environment's process of an end-to-end run: hands groups over, as upstream's BaseEnv or by `put`, until
its stdin ends.

    python -m shmbridge.bench.environment '{"how": "put", "form": "lists", "length": 2048, "bridge": "run1"}'

A line on stdin clears the loop's stalls so far; at the end of stdin it prints them and ends. Started by
shmbridge.bench.flow; knows of the trainer only the credits that come back, one byte a group, if a run limits
the groups under way.
"""

import asyncio
import contextlib
import json
import os
import select
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

import shmbridge
from shmbridge.bench.atropos_http import group_of
from shmbridge.bench.groups import ROWS, SOURCES, Form

TICK_S = 0.001
_POLL_S = 0.25


@dataclass(slots=True)
class Order:
    """The task of this process; the JSON of its command line."""

    how: Literal["put", "put_async", "base_env"]  # the last is upstream's environment, which has lists
    length: int
    form: Form = "lists"
    bridge: str = ""  # of base_env: attached to it, else over HTTP
    url: str = ""
    tokenizer: str = ""
    lane_bytes: int = 64 << 20
    window: int = 0  # groups handed over and not yet taken, 0: as many as there is room for
    credits_fd: int = -1
    workers: int = 3
    gaps: list[float] = field(default_factory=list)
    ending: threading.Event = field(default_factory=threading.Event)


def sources(form: Form, length: int) -> Iterator[dict[str, Any]]:
    """Groups in turn without end; the first score is when the group was handed over, on the monotonic
    clock.
    """
    groups = [group_of(length, form, number) for number in range(SOURCES)]
    while True:
        for group in groups:
            yield {**group, "scores": [time.monotonic(), *group["scores"][1:]]}


def obey(order: Order) -> None:
    """Obeys stdin, in a thread."""
    for _ in sys.stdin:
        order.gaps.clear()
    order.ending.set()


def stalls(order: Order) -> dict[str, float]:
    gaps = np.array(order.gaps or [0.0]) * 1e3
    return {
        "longest_stall_ms": float(gaps.max()),
        "p99_tick_ms": float(np.percentile(gaps, 99)),
        "ticks": len(order.gaps),
    }


async def tick(order: Order) -> None:
    """Wakes every millisecond and notes how late: the wait of every other rollout in this loop."""
    before = time.monotonic()
    while True:
        await asyncio.sleep(TICK_S)
        now = time.monotonic()
        order.gaps.append(now - before)
        before = now


# -- put
# ------------------------------------------------------------------------------------------------------------


def put(order: Order) -> None:
    """A program of its own around `put`."""
    left = order.window
    groups = sources(order.form, order.length)
    with shmbridge.Producer(order.bridge, env_name=order.form, lane_bytes=order.lane_bytes) as producer:
        while not order.ending.is_set():
            if order.window:
                if left == 0 and select.select([order.credits_fd], [], [], _POLL_S)[0]:
                    left = len(os.read(order.credits_fd, 4096))
                if left == 0:
                    continue
                left -= 1
            group = next(groups)
            while not order.ending.is_set():
                with contextlib.suppress(shmbridge.errors.LaneFull):
                    producer.put(group, timeout_s=_POLL_S)
                    break


async def put_async(order: Order) -> None:
    """The same in an event loop that has other things to do: one group a turn."""
    ticking = asyncio.create_task(tick(order))
    groups = sources(order.form, order.length)
    with shmbridge.Producer(order.bridge, env_name=order.form, lane_bytes=order.lane_bytes) as producer:
        while not order.ending.is_set():
            with contextlib.suppress(shmbridge.errors.LaneFull):
                await producer.put_async(next(groups), timeout_s=_POLL_S)
            await asyncio.sleep(0)
        ticking.cancel()


# -- upstream's environment
# ---------------------------------------------------------------------------------------------------------


def base_env(order: Order) -> Any:
    """An Atropos environment whose rollouts cost nothing: its workers are BaseEnv's own, from
    collect_trajectories to the send.
    """
    from atroposlib.envs.base import APIServerConfig, BaseEnv, BaseEnvConfig

    groups = sources("lists", order.length)
    credits = asyncio.Semaphore(order.window or 1 << 30)

    class Instant(BaseEnv):  # type: ignore[misc]  # atroposlib has no types
        name = "instant"

        async def setup(self) -> None:
            if order.window:
                asyncio.get_running_loop().add_reader(order.credits_fd, give_back)

        async def get_next_item(self) -> int:
            return 0

        async def collect_trajectories(self, item: int) -> tuple[dict[str, Any], list[Any]]:
            await asyncio.sleep(0)
            return next(groups), []

        async def evaluate(self, *args: Any, **kwargs: Any) -> None: ...

        async def env_manager(self) -> None:
            """BaseEnv's start and its workers, without its pace: no five seconds, no look round every tenth
            of one.
            """
            await self.setup()
            await self.register_env()
            await self.get_server_info()
            tasks = [asyncio.create_task(work(self, number)) for number in range(order.workers)]
            tasks.append(asyncio.create_task(tick(order)))
            while not order.ending.is_set():
                await asyncio.sleep(0.05)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def give_back() -> None:
        for _ in os.read(order.credits_fd, 4096):
            credits.release()

    async def work(env: Instant, number: int) -> None:
        while not order.ending.is_set():
            await credits.acquire()
            uuid = str(number)
            env.running_items[uuid] = {"item": number, "worker": None, "start_time": time.time()}
            await env.handle_env(uuid)

    config = BaseEnvConfig(
        group_size=ROWS,
        tokenizer_name=order.tokenizer,
        use_wandb=False,
        rollout_server_url=order.url,
        wandb_name="instant",
        total_steps=1 << 30,
        steps_per_eval=0,
        max_token_length=order.length,
    )
    if order.bridge:
        from shmbridge.producers import atropos

        atropos.attach(Instant, bridge=order.bridge, lane_bytes=order.lane_bytes)
    server = APIServerConfig(
        model_name="none", base_url="http://127.0.0.1:9/v1", api_key="x", health_check=False
    )
    return Instant(config, [server])


def main() -> None:
    order = Order(**json.loads(sys.argv[1]))
    threading.Thread(target=obey, args=(order,), daemon=True).start()
    if order.how == "put":
        put(order)
    elif order.how == "put_async":
        asyncio.run(put_async(order))
    else:
        asyncio.run(base_env(order).env_manager())
    print(json.dumps(stalls(order)), flush=True)
    os._exit(0)  # the thread on stdin


if __name__ == "__main__":
    main()
