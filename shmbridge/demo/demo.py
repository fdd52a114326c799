"""A language model learns two skills from random weights, on two CPU cores, in minutes: shmbridge at work.

    shmbridge demo             watch it; kill -9 whomever you like; Ctrl-C ends it without a trace
    shmbridge demo --engine vllm --engine-python .venvs/vllm/bin/python

What runs: two Atropos environments, unedited, each writing groups of rollouts into its lane; a GRPO learner
that takes them in place and writes new weights into the bridge; a policy server that samples with the newest
weights. This program starts them, restarts any that is killed, and adds up the figures in their logs.

It ends with a summary, a plot of the reward, and status 0 if the reward rose by 0.3 and nothing was dropped
or leaked; 1, and why, if not; 130 or 143 if it was stopped.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path

from shmbridge import list_bridges
from shmbridge.cli.base import refuse
from shmbridge.demo import engine, report
from shmbridge.demo.children import Child, adopt_orphans, end_orphans, stop
from shmbridge.demo.sweeper import Swept, sweep
from shmbridge.demo.terminal import Screen, Stopping

OWN_ENVS = [
    Path(__file__).with_name("environments") / name for name in ("larger_digit_env.py", "echo_letters_env.py")
]

WANTED_GAIN = 0.3
MAX_RESTARTS = 20  # of one child; more is a crash loop, not a user with `kill -9`

# One thread each: five processes share two cores. No logging services; no downloads unless a model is named.
SURROUNDINGS = {"OMP_NUM_THREADS": "1", "WANDB_MODE": "disabled", "PYTHONUNBUFFERED": "1"}


class Failed(Exception):
    """The demo cannot go on; the text says why."""


class Demo:
    """One run: its folder, its bridge and its children."""

    def __init__(self, options: argparse.Namespace, stopping: Stopping) -> None:
        self.options = options
        self.scripts: list[Path] = options.env or OWN_ENVS
        self.stopping = stopping
        self.bridge = f"demo-{os.getpid()}"
        self.folder: Path = options.run_dir or Path("runs") / time.strftime("demo-%Y%m%d-%H%M%S")
        self.folder.mkdir(parents=True, exist_ok=False)
        self.model: Path | str = options.model or self.folder / "model"
        self.learner: Child | None = None
        self.envs: list[Child] = []
        self.others: list[Child] = []
        self.progress = report.Progress(report.JsonLines(self.folder / "metrics.jsonl"))
        self.sweeper_pid = 0
        self.patience_s = engine.NEEDS_S[options.engine]
        self.began = time.monotonic()

    # --- what runs ------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Builds a model if none is given, starts all children. Blocks until the inference server answers."""
        if not self.options.model:
            self._build_model()
        if self.stopping.asked:
            return
        port = _free_port()
        server = engine.server(self.options, self.bridge, self.model, port, self.folder)
        self.learner = self._module("learner", "consumers.grpo", *self._learner_flags())
        self.others = [self.learner, server]
        self.envs = [self._env(script, port, index) for index, script in enumerate(self.scripts)]
        for child in self.others:
            child.start()
        # it starts slowly, and environments would spend that time on requests that fail
        if self.options.engine == "vllm":
            self._wait(lambda: _answers(port))
        for child in self.envs:
            child.start()
        self._wait(lambda: _answers(port))

    def _build_model(self) -> None:
        words = [str(self.model), "--seed", str(self.options.seed)]
        words += ["--heads", str(engine.TINY_HEADS[self.options.engine])]
        maker = Child("model", [sys.executable, "-m", "shmbridge.demo.tiny_model", *words], self.folder)
        self.others = [maker]
        maker.start()
        self._wait(lambda: maker.status == 0)

    def _module(self, name: str, module: str, *flags: object) -> Child:
        command = [sys.executable, "-m", f"shmbridge.{module}", "--bridge", self.bridge, *map(str, flags)]
        return Child(name, command, self.folder)

    def _learner_flags(self) -> list[object]:
        recipe = {
            "model": self.model,
            "run-dir": self.folder,
            "steps": self.options.steps,
            "seed": self.options.seed,
            "groups": 16,
            "group-size": 8,
            "lr": 2e-3,
            "warmup": 10,
            "entropy": 0.1,
            "max-token-len": 128,
            "save-every": 10,  # a killed learner repeats ten steps at most
            "threads": 1,
        }
        flags = [word for name, value in recipe.items() for word in (f"--{name}", value)]
        return [*flags, *self.options.learner_flags]  # a repeated flag's last value counts

    def _env(self, script: Path, port: int, index: int) -> Child:
        name = script.stem.removesuffix("_env")
        fields: dict[str, object] = {
            "tokenizer_name": self.model,
            "group_size": 8,
            "total_steps": self.options.steps + 1000,  # this program ends it
            "steps_per_eval": 0,
            "max_batches_offpolicy": 2,
            "use_wandb": "false",
            "wandb_name": name,
        }
        if _measures(script):
            log = report.JsonLines(self.folder / f"rewards-{name}.jsonl")
            self.progress.rewards[name] = log
            fields |= {"reward_log": log.path, "seed": self.options.seed + index}
        openai = {
            "base_url": f"http://127.0.0.1:{port}/v1",
            "model_name": "policy",
            "tokenizer_name": self.model,
            "server_type": "vllm",
            "api_key": "x",
        }
        flags = [f"--env.{field}={value}" for field, value in fields.items()]
        flags += [f"--openai.{field}={value}" for field, value in openai.items()]
        steps = ["--step-rewards"] if self.options.step_rewards else []
        child = self._module(name, "producers.atropos", *steps, script, "serve", *flags)
        child.stop_signal = signal.SIGINT
        return child

    def _children(self) -> list[Child]:
        return [*self.envs, *self.others]

    # --- while it runs --------------------------------------------------------------------------------------

    def watch(self, screen: Screen) -> None:
        """Watches until the learner has done all its steps; raises `Failed`."""
        newest, moved = -1, time.monotonic()
        while not self.stopping.asked and self.learner is not None and self.learner.status != 0:
            self._revive(screen)
            self.progress.read()
            if self.progress.step != newest:
                newest, moved = self.progress.step, time.monotonic()
            elif time.monotonic() - moved > self.patience_s:
                raise Failed(f"no step for {self.patience_s:.0f} s; the logs are in {self.folder}")
            screen.show(f"{report.progress_text(self.progress, self.options.steps)}  {self._lanes()}")
            time.sleep(0.25)

    def _revive(self, screen: Screen) -> None:
        """Restarts killed children; an orderly exit with an error is a fault, and raises `Failed`."""
        for child in self._children():
            status = child.status
            if status is None or (child is self.learner and status == 0):
                continue
            killed_by = child.killed_by
            if (killed_by is None and not child.guarded) or child.restarts >= MAX_RESTARTS:
                raise Failed(f"{child.name} ended with status {status}:\n{child.last_words()}")
            how = (
                f"was killed by {killed_by.name}"
                if killed_by
                else "has ended, since one of its processes was killed"
            )
            screen.say(f"{child.name} {how}; starting it again")
            if child.guarded:
                self._end_orphans()
            # before its first checkpoint it goes on with the weights that it had published
            child.restart(*(["--resume", "--from-bridge"] if child is self.learner else []))

    def _end_orphans(self) -> None:
        """Ends the orphans of a server that was killed together with its guardian, as by `pkill -9 -f`."""
        end_orphans({self.sweeper_pid, *(child.pid for child in self._children())})

    def _lanes(self) -> str:
        lanes = [lane for info in list_bridges() if info.name == self.bridge for lane in info.lanes]
        return f"{len(lanes)} lanes, {sum(lane.held for lane in lanes)} groups in them"

    def _wait(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + self.patience_s
        while not condition() and not self.stopping.asked:
            for child in self._children():
                if child.status not in (None, 0):
                    raise Failed(f"{child.name} ended with status {child.status}:\n{child.last_words()}")
            if time.monotonic() > deadline:
                raise Failed(f"nothing came up within {self.patience_s:.0f} s; the logs are in {self.folder}")
            time.sleep(0.05)

    # --- the end --------------------------------------------------------------------------------------------

    def end(self, screen: Screen) -> Swept:
        """Ends all children and removes the bridge."""
        # Environments first: they send a goodbye to the learner.
        for name in stop([self.envs, self.others], lambda: self.stopping.hurry):
            screen.say(f"{name} did not end by itself and was killed")
        self._end_orphans()
        return sweep(self.bridge, patience_s=5.0)

    def results(self, swept: Swept) -> tuple[dict[str, str], list[str]]:
        """Draws the plot; returns the summary, and the reasons why the demo has failed."""
        self.progress.read()
        rows = report.summary(self.progress)
        rows |= {
            "time": f"{time.monotonic() - self.began:.0f} s",
            "restarted": ", ".join(f"{c.name} {c.restarts}x" for c in self._children() if c.restarts)
            or "nobody",
            "undelivered": f"{swept.undelivered} groups, made after the last step",
            "leaked": ", ".join(swept.left) or "0",
        }
        lines = self.progress.measured()
        reasons = [f"{self.progress.dropped} groups were dropped"] if self.progress.dropped else []
        reasons += [f"segments are left: {', '.join(swept.left)}"] if swept.left else []
        if not lines:
            return rows, [*reasons, "no reward was measured"]
        report.draw(self.progress, self.folder / "rewards.png")
        if not (gain := report.tenths(lines).gain) >= WANTED_GAIN:
            reasons.append(f"the mean reward rose by {gain:.2f}, which is less than {WANTED_GAIN}")
        return rows, reasons


def run(options: argparse.Namespace) -> int:
    """Runs the demo and returns its exit status. Blocks for minutes.

    Args:
        options: of `shmbridge demo`.
    """
    stopping = Stopping()
    os.environ.update(SURROUNDINGS if options.model else SURROUNDINGS | {"HF_HUB_OFFLINE": "1"})
    screen = Screen(sys.stderr if options.json else sys.stdout)
    try:
        demo = Demo(options, stopping)
    except FileExistsError as error:
        refuse("shmbridge demo", f"{error.filename} is there already", "choose another --run-dir")
        return 1
    reasons: list[str] = []
    adopt_orphans()
    with _sweeper(demo.bridge) as sweeper:
        demo.sweeper_pid = sweeper.pid
        screen.say(f"bridge {demo.bridge}, logs in {demo.folder}; Ctrl-C ends it")
        try:
            demo.start()
            demo.watch(screen)
        except Failed as failure:
            reasons = [str(failure)]
        finally:
            swept = demo.end(screen)
    if stopping.asked:
        screen.say(f"stopped by {signal.Signals(stopping.signum).name}; segments left: {len(swept.left)}")
        return 128 + stopping.signum
    rows, more = demo.results(swept)
    reasons += more
    if options.json:
        said = {"ok": not reasons, "reasons": reasons, "run_dir": str(demo.folder)}
        print(json.dumps(said | {"summary": {name.strip(): text for name, text in rows.items()}}))
    else:
        print(f"\n{report.table(rows)}\n\n  logs, and the plot if a reward was measured: {demo.folder}\n")
        print("\n".join(f"FAILED: {reason}" for reason in reasons) or NEXT_STEPS)
    return 1 if reasons else 0


NEXT_STEPS = """\
It learned. What next:
  shmbridge demo --seed 2     and, from another terminal, kill -9 the learner half-way
  shmbridge top               while it runs: who is alive, what the lanes hold
  examples/README.md          the same processes by hand, and your own environment
"""


def _measures(script: Path) -> bool:
    """Returns whether an environment records its rewards, and has seeded questions: its config says so."""
    ours = script.resolve() in [each.resolve() for each in OWN_ENVS]
    return ours or re.search(r"^\s+reward_log\s*:", script.read_text(), re.MULTILINE) is not None


def _sweeper(bridge: str) -> subprocess.Popen[bytes]:
    """Starts the process that cleans up if this one is killed; it ends when its stdin does."""
    command = [sys.executable, "-m", "shmbridge.demo.sweeper", bridge]
    return subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _answers(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=1.0) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False
