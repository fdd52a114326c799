"""`shmbridge demo`: a tiny model learns two skills from random weights, on two CPU cores, in minutes.

It is a launch of the file `demo.yaml` beside this module: two Atropos environments, unedited; a GRPO learner;
a policy server, or vLLM, that samples with the newest weights. The supervisor of the launch runs in this
module's process; after its end the bridge is removed and the figures in the logs are added up.

It ends with a summary, a plot of the reward, and status 0 if the reward rose by 0.3 and nothing was dropped
or leaked; 1, and why, if not; 128 + signal if it was stopped.
"""

import argparse
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shmbridge import clean
from shmbridge.cli.base import Parser, refuse
from shmbridge.config import read_yaml
from shmbridge.errors import LaunchFailed
from shmbridge.launch import config, guardian, supervisor
from shmbridge.launch.plan import Plan, plan_of

Line = dict[str, Any]

WINDOW = 100  # groups of the moving average
_WANTED_GAIN = 0.3
_MAX_RESTARTS = 20  # of one process; more is a crash loop, not a user with `kill -9`
_GONE_S = 5.0  # for processes that the kernel is still taking down
_OWN_SCRIPTS = [
    Path(__file__).with_name("environments") / name for name in ("larger_digit_env.py", "echo_letters_env.py")
]
_ROOT = Path(__file__).parents[2]  # holds the package
_VLLM_VARIABLES = {
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB; on a GPU these three have no effect
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
}
# The learner recomputes the distribution that a token was drawn from.
_VLLM_ARGS = ["--served-model-name", "policy", "--logprobs-mode", "processed_logprobs", "--enforce-eager"]
_VLLM_ARGS += ["--disable-uvicorn-access-log"]
_TINY = ["--dtype", "float32", "--max-model-len", "128"]
_GIVEN = ["--gpu-memory-utilization", "0.4"]  # the learner is on the same GPU
_NEXT_STEPS = """\
It learned. What next:
  shmbridge demo --seed 2     and, from another terminal, kill -9 the learner half-way
  shmbridge top               while it runs: who is alive, what the lanes hold
  examples/README.md          the same processes by hand, and your own environment
"""


# --- the start: the user's process, which becomes the guardian ----------------------------------------------


def run(options: argparse.Namespace, gateway_parser: Parser) -> int:
    """Makes the model and the plan; then this process becomes the guardian of the run, and does not return.

    Returns an exit status if it is refused, or stopped before that. Blocks for seconds.

    Args:
        options: of `shmbridge demo`.
        gateway_parser: the parser of `shmbridge gateway`.
    """
    bridge = f"demo-{os.getpid()}"
    folder: Path = options.run_dir or Path("runs") / time.strftime("demo-%Y%m%d-%H%M%S")
    try:
        folder.mkdir(parents=True, exist_ok=False)
        print(f"bridge {bridge}, logs in {folder}/logs; Ctrl-C ends it", file=sys.stderr, flush=True)
        if not options.model:
            _build_model(folder / "model", options)
        wanted = config.parse(_document(options, bridge, folder))
        plan = _changed(plan_of(wanted, gateway_parser), options)
    except FileExistsError as error:
        refuse("shmbridge demo", f"{error.filename} is there already", "choose another --run-dir")
        return 1
    except KeyboardInterrupt:
        print("stopped by SIGINT; segments left: 0", file=sys.stderr)
        return 128 + signal.SIGINT
    return supervisor.become_guardian(
        wanted, plan, label="shmbridge demo", as_json=options.json, module="shmbridge.launch.demo"
    )


def _build_model(folder: Path, options: argparse.Namespace) -> None:
    heads = 2 if options.engine == "vllm" else 4  # vLLM takes heads of 32 numbers at least on a CPU
    words = [str(folder), "--seed", str(options.seed), "--heads", str(heads)]
    maker = [sys.executable, "-m", "shmbridge.launch.tiny_model", *words]
    # Under a guardian: it ends with this process, however that ends.
    guarded = guardian.command(os.getpid(), signal.SIGKILL, os.getcwd(), "model", maker)
    done = subprocess.run(guarded, capture_output=True, text=True, check=False)
    if done.returncode:
        raise LaunchFailed("the tiny model was not made", hint=f"fix what it reports:\n{done.stderr}")


def _document(options: argparse.Namespace, bridge: str, folder: Path) -> Line:
    """Returns the file with the values of the options."""
    document: Line = read_yaml(Path(__file__).with_name("demo.yaml").read_text(encoding="utf-8"))
    model = str(options.model or folder / "model")
    document |= {"bridge": bridge, "run_dir": str(folder)}
    server, learner, (template, *_) = (document[key] for key in ("policy_server", "learner", "environments"))
    learner |= {"model": model, "steps": options.steps}
    learner["options"] |= {"seed": str(options.seed)}
    if options.engine == "vllm":
        del document["policy_server"]
        document["vllm"] = _vllm(options, model)
    else:
        server["model"] = model
    document["environments"] = [
        template | {"script": str(script), "name": _name(script), "args": template["args"] | args}
        for script, args in _scripts(options)
    ]
    for section in (document.get("policy_server"), learner, *document["environments"]):
        if section and options.model:  # which may have to be downloaded
            section["env"] = {name: each for name, each in section["env"].items() if name != "HF_HUB_OFFLINE"}
    return document


def _scripts(options: argparse.Namespace) -> list[tuple[Path, dict[str, str]]]:
    """Returns the environments, each with further flags."""
    return [
        (
            script,
            {"env.wandb_name": _name(script)}
            | (
                {
                    "env.reward_log": f"{{run_dir}}/rewards-{_name(script)}.jsonl",
                    "env.seed": str(options.seed + index),
                }
                if _measures(script)
                else {}
            ),
        )
        for index, script in enumerate(options.env or _OWN_SCRIPTS)
    ]


def _name(script: Path) -> str:
    return script.stem.removesuffix("_env")


def _measures(script: Path) -> bool:
    """Returns whether an environment records its rewards, and has seeded questions: its config says so."""
    ours = script.resolve() in [each.resolve() for each in _OWN_SCRIPTS]
    return ours or re.search(r"^\s+reward_log\s*:", script.read_text(), re.MULTILINE) is not None


def _vllm(options: argparse.Namespace, model: str) -> Line:
    variables = {name: os.environ.get(name, value) for name, value in _VLLM_VARIABLES.items()}
    if (_ROOT / "pyproject.toml").exists():  # a clone: that environment has no shmbridge of its own
        variables["PYTHONPATH"] = os.pathsep.join(filter(None, [str(_ROOT), os.environ.get("PYTHONPATH")]))
    return {
        "model": model,
        "python": options.engine_python,
        "port": 0,
        "args": [*_VLLM_ARGS, *(_GIVEN if options.model else _TINY)],
        "env": variables,
    }


def _changed(plan: Plan, options: argparse.Namespace) -> Plan:
    """Returns the plan with what a launch file has no keys for: servers that start again, raw flags."""
    server, learner, environments = plan.stages
    plan.stages = [server + learner, environments]  # both import torch: at the same time
    server[0].command += shlex.split(options.engine_flags)
    learner[0].command += options.learner_flags  # a repeated flag's last value counts
    # vLLM ends with a status of its own if one of its processes is killed.
    server[0].restart = config.Restart(when="always" if options.engine == "vllm" else "failure")
    for service in plan.services:
        if service.restart:
            service.restart.max_restarts = _MAX_RESTARTS
    for service in environments if options.step_rewards else ():
        service.command.insert(3, "--step-rewards")  # behind `python -m MODULE`
    return plan


# --- the end: the supervisor's process, below the guardian --------------------------------------------------


@dataclass(frozen=True)
class Tenths:
    """Mean reward of the first and of the last tenth of the groups."""

    first: float
    last: float

    @property
    def gain(self) -> float:
        """How much the last is above the first."""
        return self.last - self.first


@dataclass(frozen=True)
class Figures:
    """What the logs of a run hold: the learner's metrics by step; rewards by the environment's name."""

    metrics: list[Line]
    rewards: dict[str, list[Line]]

    @classmethod
    def read(cls, folder: Path) -> "Figures":
        """Returns the figures of a run's folder."""
        logs = sorted(folder.glob("rewards-*.jsonl"))
        rewards = {log.stem.removeprefix("rewards-"): _json_lines(log) for log in logs}
        return cls(_json_lines(folder / "metrics.jsonl"), rewards)

    def measured(self, env: str | None = None) -> list[Line]:
        """Returns groups in the order of their time, of one environment or of all.

        Without any environment that measures, the learner's mean reward per step stands in.
        """
        lines = [line for name, log in self.rewards.items() if env in (None, name) for line in log]
        if not self.rewards:
            lines = [
                {"t": line["time"], "mean": line["reward_mean"]}
                for line in self.metrics
                if line["reward_mean"] is not None
            ]
        return sorted(lines, key=lambda line: line["t"])

    def tenths(self, env: str | None = None) -> Tenths:
        """Returns the mean reward of the first and the last tenth; NaN without any."""
        lines = self.measured(env)
        size = max(1, len(lines) // 10)
        return Tenths(_mean(lines[:size]), _mean(lines[-size:]))

    def most(self, name: str) -> int:
        """Returns the highest value of a metric over all steps; 0 without any."""
        return max((line[name] for line in self.metrics), default=0)

    def total(self, name: str) -> str:
        """Returns the sum of a metric over all steps."""
        return f"{sum(line[name] for line in self.metrics):,}"


def _json_lines(path: Path) -> list[Line]:
    """Returns the lines of a file; a line that a kill has torn is skipped."""
    found = []
    for line in path.read_bytes().splitlines() if path.exists() else ():
        try:
            found.append(json.loads(line))
        except ValueError:
            continue
    return found


def _mean(lines: list[Line]) -> float:
    return float(sum(line["mean"] for line in lines)) / len(lines) if lines else float("nan")


def main(argv: list[str]) -> int:
    """Runs a saved plan, removes its bridge, prints the results; returns the exit status."""
    path, lock, form = argv
    status, plan, _ = supervisor.supervise(Path(path), int(lock), as_json=False)
    left, undelivered = _removed(plan.bridge)
    if status > 128:
        name = signal.Signals(status - 128).name
        print(f"stopped by {name}; segments left: {len(left)}", file=sys.stderr)
        return status
    folder = Path(plan.run_dir)
    figures, events = Figures.read(folder), _json_lines(folder / "events.jsonl")
    rows = _summary(figures) | _of_the_run(events, left, undelivered)
    reasons = _reasons(figures, events, left)
    if figures.measured():
        _draw(figures, folder / "rewards.png")
    if form == "json":
        summary = {name.strip(): text for name, text in rows.items()}
        print(json.dumps({"ok": not reasons, "reasons": reasons, "run_dir": str(folder), "summary": summary}))
    else:
        width = max(map(len, rows))
        table = "\n".join(f"  {label:<{width}}  {text}" for label, text in rows.items())
        print(f"\n{table}\n\n  logs, and the plot if a reward was measured: {folder}\n")
        print("\n".join(f"FAILED: {reason}" for reason in reasons) or _NEXT_STEPS)
    return 1 if reasons else 0


def _removed(bridge: str) -> tuple[list[str], int]:
    """Removes all segments of a bridge; returns those that are left, and how many groups the others held."""
    deadline, undelivered = time.monotonic() + _GONE_S, 0
    while True:
        report = clean(bridge, dry_run=False)
        undelivered += sum(held for name, held in report.undelivered.items() if name in report.removed)
        if not report.kept or time.monotonic() > deadline:
            return list(report.kept), undelivered
        time.sleep(0.05)


def _summary(figures: Figures) -> dict[str, str]:
    """Returns the summary of the logs: label -> text."""
    total, metrics = figures.tenths(), figures.metrics
    stale = sum(line["staleness_mean"] for line in metrics) / max(len(metrics), 1)
    rows = {"mean reward": f"{total.first:.2f} in the first tenth, {total.last:.2f} in the last"}
    for name in figures.rewards:
        own = figures.tenths(name)
        rows[f"  {name}"] = f"{own.first:.2f}, {own.last:.2f}"
    return rows | {
        "optimizer steps": f"{figures.most('step'):,}",
        "trajectories": figures.total("trajectories"),
        "  delivered again": figures.total("trajectories_redelivered"),
        "tokens": figures.total("tokens"),
        "staleness": f"{stale:.1f} policy versions on average, {figures.most('staleness_max')} at most",
        "dropped": f"{figures.most('dropped_total')}",
    }


def _of_the_run(events: list[Line], left: list[str], undelivered: int) -> dict[str, str]:
    starts: dict[str, int] = {}
    for event in events:
        if event["event"] == "start":
            starts[event["service"]] = event["starts"]
    again = [f"{name} {count - 1}x" for name, count in starts.items() if count > 1]
    return {
        "time": f"{events[-1]['time'] - events[0]['time']:.0f} s",
        "restarted": ", ".join(again) or "none",
        "undelivered": f"{undelivered} groups, made after the last step",
        "leaked": ", ".join(left) or "0",
    }


def _reasons(figures: Figures, events: list[Line], left: list[str]) -> list[str]:
    """Returns why the demo has failed."""
    reasons = [event["text"] for event in events if event["event"] == "failed"]
    dropped = figures.most("dropped_total")
    reasons += [f"{dropped} groups were dropped"] if dropped else []
    reasons += [f"segments are left: {', '.join(left)}"] if left else []
    if not figures.measured():
        return [*reasons, "no reward was measured"]
    if not (gain := figures.tenths().gain) >= _WANTED_GAIN:
        reasons.append(f"the mean reward rose by {gain:.2f}, which is less than {_WANTED_GAIN}")
    return reasons


def _draw(figures: Figures, path: Path) -> None:
    """Draws the moving mean of the reward over time, per environment and in total. Blocks for a second."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    began = figures.measured()[0]["t"]
    drawing, axes = pyplot.subplots(figsize=(8, 4.5), layout="constrained")
    for name in [*figures.rewards, None]:
        lines = figures.measured(name)
        seconds = [line["t"] - began for line in lines]
        style = {"alpha": 0.7, "linewidth": 1.2} if name else {"color": "black", "linewidth": 2.0}
        means = [_mean(lines[max(0, end - WINDOW) : end]) for end in range(1, len(lines) + 1)]
        axes.plot(seconds, means, label=name or "all", **style)
    axes.set(
        xlabel="seconds since the first group",
        ylabel=f"reward, mean of {WINDOW} groups",
        ylim=(0, 1),
        title="Reward, as the environments measured it" if figures.rewards else "Reward per step",
    )
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")
    drawing.savefig(path, dpi=120)
    pyplot.close(drawing)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
