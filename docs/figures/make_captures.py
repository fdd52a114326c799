"""Makes the terminal captures of the docs: doctor, inspect, top and tail of a small run with real processes.

    python docs/figures/make_captures.py

Three environments of one kind and one of another put made-up answers; a learner takes them. One environment
is stopped by a signal, so that inspect and top have something to say. Writes SVG files beside this one.
"""

import asyncio
import io
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

from rich.console import Console
from rich.text import Text

from shmbridge.watch.snapshot import look
from shmbridge.watch.top import Top

HERE = Path(__file__).parent
TEXT = """Q: a train goes 60 km an hour for 3 hours. How far? A: Per hour it goes 60 km.
In 3 hours 3 * 60 = 180 km. So it goes 180 km. 63"""
WORDS = TEXT.split()
STOPPED_S = 6.0  # longer than what inspect calls a trouble
ENVIRONMENT = """
import random, sys, time, numpy as np, shmbridge
bridge, name = sys.argv[1:3]
pace_s, seed, words = map(float, sys.argv[3:])
chance = random.Random(seed)
prompt, steps = 14, (6, 9, 5)
with shmbridge.Producer(bridge, env_name=name, lane_bytes="1M") as producer:
    while True:
        rows = range(4)
        right = [chance.random() < 0.6 for _ in rows]
        tokens = [np.arange(prompt + sum(steps), dtype=np.int32) for _ in rows]
        for row, ok in zip(tokens, right):
            if not ok:
                row[-2] = words - 1
        mean = sum(right) / len(right)
        spread = (mean * (1 - mean)) ** 0.5 + 1e-4
        mask = np.repeat(np.array([0, 1], np.uint8), [prompt, sum(steps)])
        rewards = [np.array([0.9, 0.95, 0.99] if ok else [0.9, 0.6, 0.1], np.float32) for ok in right]
        weight = [np.repeat(each, steps).astype(np.float32) for each in rewards]
        advantages = [
            np.concatenate([np.zeros(prompt, np.float32), (ok - mean) / spread * each]).astype(np.float32)
            for ok, each in zip(right, weight)
        ]
        producer.put(
            {
                "tokens": tokens, "loss_mask": [mask] * 4, "advantages": advantages,
                "scores": [float(each) for each in right], "step_rewards": rewards,
                "step_ends": [np.cumsum(steps).astype(np.int32) + prompt] * 4,
            },
            group_size=4,
        )
        time.sleep(pace_s * chance.uniform(0.7, 1.3))
"""
LEARNER = """
import sys, time, shmbridge
with shmbridge.Consumer(sys.argv[1], run=shmbridge.Run(batch_size=32)) as consumer:
    for step, batch in enumerate(consumer.batches(groups=8)):
        time.sleep(0.8)
        batch.release()
        consumer.publish_policy_version(step + 1)
"""


def main() -> None:
    """Starts the run, captures it healthy and with a stopped environment, ends it."""
    bridge = "run1"
    started = [start(LEARNER, bridge)]
    paces = [("gsm8k", 0.35), ("gsm8k", 0.4), ("gsm8k", 0.45), ("code", 0.8)]
    started += [
        start(ENVIRONMENT, bridge, name, pace, seed, len(WORDS)) for seed, (name, pace) in enumerate(paces)
    ]
    try:
        wait_for_records(bridge, len(paces))
        save("doctor", command("doctor"), 118)
        save("tail", command("tail", bridge, "-n", "6"), 150)
        save("inspect", command("inspect", bridge, "--seconds", "2"), 110)
        top("top", bridge, record=False)
        top("top-record", bridge, record=True)
        os.kill(started[2].pid, signal.SIGSTOP)
        time.sleep(STOPPED_S)
        save("inspect-stopped", command("inspect", bridge, "--seconds", "2"), 150)
        top("top-stopped", bridge, record=False)
    finally:
        for each in started:
            each.kill()
            each.wait()
        command("clean", bridge, "--yes")


def start(code: str, *arguments: object) -> subprocess.Popen[bytes]:
    """A Python process that ends with this one's `finally`."""
    return subprocess.Popen([sys.executable, "-c", code, *map(str, arguments)], stderr=subprocess.DEVNULL)


def wait_for_records(bridge: str, lanes: int) -> None:
    """Waits until every environment has put some, and the learner has published."""
    deadline_s = time.monotonic() + 60
    while time.monotonic() < deadline_s:
        now = look(bridge)
        if (
            now is not None
            and len(now.lanes) >= lanes
            and all(lane.records > 3 for lane in now.lanes)
            and now.policy_version
        ):
            return
        time.sleep(0.2)
    raise TimeoutError(f"no records in all {lanes} lanes of {bridge} within 60 s")


def command(*words: str) -> str:
    """What a command of shmbridge prints."""
    return subprocess.run(
        [sys.executable, "-m", "shmbridge.cli", *words], capture_output=True, text=True, check=False
    ).stdout


def save(name: str, said: str, columns: int) -> None:
    """Draws text as a terminal of so many columns."""
    console = Console(record=True, width=columns, file=io.StringIO())
    console.print(Text(said.rstrip()))
    write(name, console.export_svg(title=f"shmbridge {name.partition('-')[0]} run1"))


def top(name: str, bridge: str, *, record: bool) -> None:
    """Draws the live view after some looks, or its record pane."""

    async def drawn() -> str:
        view = Top(bridge, interval_s=0.5, pieces=lambda ids: [f"{WORDS[each]} " for each in ids])
        async with view.run_test(size=(110, 24)) as pilot:
            await pilot.pause(4.0)
            if record:
                await pilot.press("enter")
                await pilot.pause(1.5)
            return view.export_screenshot(title=f"shmbridge top {bridge}")

    write(name, asyncio.run(drawn()))


def write(name: str, svg: str) -> None:
    """Writes the figure without the fonts that it would load from the net."""
    (HERE / f"{name}.svg").write_text(re.sub(r"@font-face \{.*?\}\s*", "", svg, flags=re.DOTALL))
    print(HERE / f"{name}.svg")


if __name__ == "__main__":
    main()
