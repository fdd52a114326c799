"""The recipes for containers and clusters, run as processes: their own commands, with a tiny model.

All are killed, and started again on a fresh disk: shared memory survives, as in a pod, the run's folder does
not. The learner refuses to begin anew, and with --from-bridge the reward goes on from where it was.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import re
import shlex
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

import shmbridge

pytest.importorskip("torch")
pytest.importorskip("atroposlib")
yaml = pytest.importorskip("yaml")

pytestmark = pytest.mark.timeout(900)

ROOT = Path(__file__).parents[2]
KILLED_AT, STEPS_AFTER = 100, 20
PATIENCE_S = 300.0
SMALL = {  # what a tiny model on a CPU needs besides the recipe's own words
    "train": "--groups 16 --lr 2e-3 --entropy 0.1 --max-token-len 128 --threads 1 --device cpu",
    "serve": "--device cpu --dtype float32 --threads 1",
    "env": "--env.group_size=8 --env.total_steps=5000 --env.steps_per_eval=0 --env.max_batches_offpolicy=2 "
    "--env.use_wandb=false",
}


@dataclass
class Recipe:
    """Its commands by program, the folders that its containers mount, and its probes."""

    commands: dict[str, list[str]]
    persistent: set[str] = field(default_factory=set)  # mount points that outlive a container
    probes: dict[str, list[str]] = field(default_factory=dict)  # by program
    unmounted: set[str] = field(default_factory=set)  # paths in commands that are in none of their mounts

    def add(self, words: list[str], mounts: set[str]) -> None:
        self.commands[program_of(words)] = words
        paths = [each for each in words if each.startswith("/")]
        self.unmounted |= {each for each in paths if not any(each.startswith(f"{at}/") for at in mounts)}


def program_of(words: list[str]) -> str:
    return words[1] if words[0] == "shmbridge" else ""


def of_containers(containers: list[dict[str, Any]], volumes: list[dict[str, Any]], recipe: Recipe) -> None:
    claims = {each["name"] for each in volumes if "persistentVolumeClaim" in each}
    for container in containers:
        words = [*container.get("command", []), *container.get("args", [])]
        if words and (program := program_of(words)) in SMALL:
            recipe.add(words, {each["mountPath"] for each in container["volumeMounts"]})
            mounts = {each["mountPath"] for each in container["volumeMounts"] if each["name"] in claims}
            recipe.persistent |= mounts if program == "train" else set()
            for kind in ("startupProbe", "readinessProbe", "livenessProbe"):
                if probe := container.get(kind):
                    recipe.probes[program] = probe["exec"]["command"]


def kubernetes() -> Recipe:
    page = (ROOT / "docs/how-to/kubernetes.md").read_text()
    spec = yaml.safe_load(re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)[0])["spec"]
    recipe = Recipe({})
    of_containers(spec["containers"], spec["volumes"], recipe)
    return recipe


def kuberay() -> Recipe:
    spec = yaml.safe_load((ROOT / "examples/kuberay/raycluster.yaml").read_text())["spec"]
    recipe = Recipe({})
    for group in (spec["headGroupSpec"], *spec["workerGroupSpecs"]):
        pod = group["template"]["spec"]
        of_containers(pod["containers"], pod["volumes"], recipe)
    return recipe


def compose() -> Recipe:
    document = yaml.safe_load((ROOT / "compose.yaml").read_text())
    recipe = Recipe({})
    for service in document["services"].values():
        words = shlex.split(service["command"])
        recipe.add(words, {each.split(":")[1] for each in service["volumes"]})
        if check := service.get("healthcheck"):
            recipe.probes[program_of(words)] = check["test"][1:]
    named = set(document["volumes"]) - {"shm"}
    volumes = document["services"]["learner"]["volumes"]
    recipe.persistent = {where for name, where in (each.split(":")[:2] for each in volumes) if name in named}
    return recipe


def slurm() -> Recipe:
    """The batch script for several nodes, all of them this one, without its relays."""
    text = (ROOT / "examples/slurm/several_nodes.sbatch").read_text().replace("\\\n", " ")
    names = {"BRIDGE": "run1", "MODEL": "/models/policy", "RUN_DIR": "/runs/run1", "ENVIRONMENT": "my_env.py"}
    names |= {"2": "run1", "3": "my_env.py", "4": "/models/policy"}  # of the inner shell
    commands = {}
    for program, rest in re.findall(r"\bshmbridge (train|serve|env) ([^>&\n]*)", text):
        filled = re.sub(r'"\$(\w+)"', lambda found: names[found[1]], rest)
        commands[program] = ["shmbridge", program, *shlex.split(filled)]
    return Recipe(commands, {"/runs"})


RECIPES: dict[str, Callable[[], Recipe]] = {
    "kubernetes": kubernetes,
    "compose": compose,
    "kuberay": kuberay,
    "slurm": slurm,
}


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_keeps_its_run_and_one_command_starts_it_and_starts_it_again(name):
    recipe = RECIPES[name]()
    assert recipe.commands.keys() == SMALL.keys(), "a learner, an inference server, an environment"
    train = recipe.commands["train"]
    assert "--resume" in train
    run_dir = train[train.index("--run-dir") + 1]
    assert any(run_dir.startswith(f"{mount}/") for mount in recipe.persistent), "a folder that outlives it"
    assert recipe.unmounted == set(), "a container has what its command names"
    assert recipe.probes.keys() == ({"train", "serve"} if name != "slurm" else set())


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Path:
    spec = importlib.util.spec_from_file_location("tiny_model", ROOT / "examples" / "tiny_model.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    folder = tmp_path_factory.mktemp("models")
    module.build(folder / "policy", seed=1)
    return folder


class Pod:
    """A recipe's processes on a disk; all are gone, by pid, when the test is."""

    def __init__(self, recipe: Recipe, bridge: str, folder: Path, models: Path) -> None:
        self._recipe, self._bridge, self.folder, self._models = recipe, bridge, folder, models
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self._port = str(free.getsockname()[1])
        self.disk = folder / "disk-1"

    def fresh_disk(self) -> None:
        self.disk = self.disk.with_name(f"disk-{int(self.disk.name[-1]) + 1}")

    def _here(self, words: list[str]) -> list[str]:
        """The words, for this machine: its bridge, folders and port."""
        places = {mount: str(self.disk / mount.strip("/")) for mount in self._recipe.persistent}
        environment = str(ROOT / "examples/larger_digit_env.py")
        places |= {"/models": str(self._models), "(/environments/)?my_env.py": environment}
        found = []
        for word in words:
            for name, place in places.items():
                word = re.sub(rf"^{name}(?=/|$)", lambda _, place=place: place, word)
            word = re.sub(r"\b9004\b", self._port, word).replace("http://policy:", "http://127.0.0.1:")
            found.append({"run1": self._bridge, "python": sys.executable}.get(word, word))
        return [sys.executable, "-u", "-m", *found] if found[0] == "shmbridge" else found

    def command(self, program: str, *more: str) -> list[str]:
        return [*self._here(self._recipe.commands[program]), *SMALL[program].split(), *more]

    def start(self, program: str, *more: str) -> subprocess.Popen[bytes]:
        environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)}
        with self.log(program).open("ab") as log:
            self._running[program] = subprocess.Popen(
                self.command(program, *more), stdout=log, stderr=log, env=environment, cwd=self.folder
            )
        return self._running[program]

    def log(self, program: str) -> Path:
        return self.folder / f"{program}.log"

    def is_ready(self, program: str) -> bool:
        """Asks as the recipe's own probe does."""
        words = self._here(self._recipe.probes.get(program, ["shmbridge", "inspect", "run1", "--ready"]))
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        return (
            subprocess.run(words, capture_output=True, timeout=60, env=environment, check=False).returncode
            == 0
        )

    def kill_all(self) -> None:
        for process in self._running.values():
            process.kill()
        for process in self._running.values():
            process.wait()
        self._running.clear()

    def rewards(self) -> list[float]:
        (path, *others) = [*self.disk.rglob("metrics.jsonl"), None]
        assert len(others) < 2
        lines = path.read_text().splitlines() if path is not None else []
        return [json.loads(line)["reward_mean"] for line in lines]

    def until(self, condition: Callable[[], object]) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not condition():
            ended = {name: each.poll() for name, each in self._running.items()}
            assert set(ended.values()) == {None}, (ended, self.said())
            assert time.monotonic() < deadline, self.said()
            time.sleep(0.1)

    def said(self) -> str:
        return "\n".join(each.read_text()[-2000:] for each in self.folder.glob("*.log"))


@pytest.fixture
def pod(request, bridge, tmp_path, models) -> Iterator[Pod]:
    running = Pod(RECIPES[request.param](), bridge, tmp_path, models)
    try:
        yield running
    finally:
        running.kill_all()
        shmbridge.clean(bridge, dry_run=False)


def assert_went_on(before: float, after: list[float]) -> None:
    """Within the steps after the restart the reward is what it was; at none is it an untrained model's."""
    assert len(after) == STEPS_AFTER
    assert max(statistics.mean(after[first : first + 5]) for first in range(STEPS_AFTER - 4)) >= before - 0.05
    assert min(after) > before / 2


ONE_ALWAYS = [
    name if name == "kubernetes" else pytest.param(name, marks=pytest.mark.long) for name in RECIPES
]


@pytest.mark.parametrize("pod", ONE_ALWAYS, indirect=True)
def test_a_run_killed_at_step_100_is_not_thrown_back_on_a_fresh_disk(pod, bridge, record_property):
    assert not pod.is_ready("train")
    for program in ("train", "serve"):
        pod.start(program)
    pod.until(lambda: pod.is_ready("serve"))
    pod.start("env")
    pod.until(lambda: len(pod.rewards()) >= KILLED_AT)
    assert pod.is_ready("train")
    pod.kill_all()
    before = statistics.mean(pod.rewards()[-10:])
    assert before > 0.6, "it has not learned enough to be thrown back"

    pod.fresh_disk()
    pod.log("train").unlink()
    refused = pod.start("train")
    assert refused.wait(PATIENCE_S) == 1
    (line,) = (each for each in pod.log("train").read_text().splitlines() if "[SB518]" in each)
    trained = re.search(rf"bridge {bridge} has been trained up to version (\d+), and the run directory", line)
    assert trained is not None, line
    assert int(trained[1]) >= KILLED_AT
    assert f"--from-bridge takes the weights of version {trained[1]}" in line
    assert not pod.disk.exists()

    pod.start("serve")
    pod.until(lambda: pod._running.pop("train", None) or pod.is_ready("serve"))
    pod.start("env")
    learner = pod.start("train", "--from-bridge", "--steps", str(STEPS_AFTER))
    with contextlib.suppress(subprocess.TimeoutExpired):
        learner.wait(PATIENCE_S)
    assert learner.returncode == 0, pod.said()
    after = pod.rewards()
    record_property("rewards", [before, line, after])
    print(f"reward before the kill {before:.3f}\n{line}\nafter it {after}")
    assert_went_on(before, after)


@pytest.mark.long
def test_a_requeued_batch_job_is_not_thrown_back_on_another_disk(bridge, tmp_path, models):
    """The page's own script, with `launch`: everything of the job dies in an instant."""
    page = (ROOT / "docs/how-to/slurm.md").read_text()
    (script,) = re.findall(r"```\n(#!/bin/bash\n.*?)```", page, re.DOTALL)
    job = bridge.removeprefix("t-")
    bin_folder = tmp_path / "bin"
    bin_folder.mkdir()
    (bin_folder / "shmbridge").write_text(f'#!/bin/sh\nexec "{sys.executable}" -m shmbridge "$@"\n')
    (bin_folder / "shmbridge").chmod(0o755)
    environment = os.environ | {
        "PATH": f"{bin_folder}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "SLURM_JOB_ID": job,
    }

    def submit(disk: Path, **changed: object) -> subprocess.Popen[bytes]:
        document = yaml.safe_load(
            (ROOT / "examples/launch.yaml").read_text().replace("runs/tiny", f"{models}/policy")
        )
        document |= {"run_dir": "runs/mine"}
        document["learner"] |= {"steps": changed.pop("steps", 400)}
        document["learner"]["options"] |= changed
        document["environments"] = document["environments"][:1]
        for each in document["environments"]:
            each["script"] = str(ROOT / each["script"])
        (disk / ".venv/bin").mkdir(parents=True, exist_ok=True)
        (disk / ".venv/bin/activate").touch()
        (disk / "run.yaml").write_text(yaml.safe_dump(document, sort_keys=False))
        with (disk / "job.log").open("ab") as log:
            return subprocess.Popen(["bash", "-c", script], cwd=disk, env=environment, stdout=log, stderr=log)

    def rewards(disk: Path) -> list[float]:
        path = disk / "runs/mine/metrics.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return [json.loads(line)["reward_mean"] for line in lines]

    def members() -> list[int]:
        found = []
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError, ValueError):
                if str(tmp_path) in os.readlink(entry / "cwd") and int(entry.name) != os.getpid():
                    found.append(int(entry.name))
        return found

    first = tmp_path / "disk-1"
    running = submit(first)
    try:
        deadline = time.monotonic() + PATIENCE_S
        while len(rewards(first)) < KILLED_AT:
            assert running.poll() is None, (first / "job.log").read_text()
            assert time.monotonic() < deadline, (first / "job.log").read_text()
            time.sleep(0.2)
        while pids := members():
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.1)
        running.wait()
        before = statistics.mean(rewards(first)[-10:])
        assert before > 0.6, "it has not learned enough to be thrown back"

        second = tmp_path / "disk-2"
        for _ in range(2):  # the launch that is refused ends its server in order: the weights stay
            running = submit(second)
            assert running.wait(PATIENCE_S) == 1
            (line,) = set(re.findall(r"ERROR learner: (\[SB518\].*)", (second / "job.log").read_text()))
            assert f"bridge run-{job} has been trained up to version" in line
        running = submit(second, steps=STEPS_AFTER, from_bridge=True)
        assert running.wait(PATIENCE_S) == 0, (second / "job.log").read_text()
        print(f"reward before the kill {before:.3f}\n{line}\nafter it {rewards(second)}")
        assert_went_on(before, rewards(second))
        assert not [each for each in shmbridge.list_bridges() if each.name == f"run-{job}"]
    finally:
        for pid in members():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        shmbridge.clean(f"run-{job}", dry_run=False)
