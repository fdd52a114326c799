"""`shmbridge env --check`: what it says of scripts, against what happens with them."""

import json
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from shmbridge.producers.atropos.check import Checked, checked, look_at
from shmbridge.producers.gem import AtroposGemEnv, EnvFailed, NotSuspendable
from shmbridge.testing import wait_until

ENVS = Path(__file__).parent / "envs"
ROOT = Path(__file__).parents[3]

HEAD = """
import asyncio
from atroposlib.envs.base import APIServerConfig, BaseEnv, BaseEnvConfig, ScoredDataGroup

class Env(BaseEnv):
    @classmethod
    def config_init(cls):
        return BaseEnvConfig(group_size=8, use_wandb=False), [APIServerConfig(model_name="policy")]

    async def setup(self):
        pass

    async def get_next_item(self):
        return {"number": 1}

    async def asked(self, n):
        chat = [{"role": "user", "content": "say"}]
        return await self.server.chat_completion(messages=chat, n=n, max_tokens=9)

    def group(self, completion):
        tokens = [self.tokenizer.encode(each.message.content) for each in completion.choices]
        return ScoredDataGroup(tokens=tokens, masks=tokens, scores=[float(len(each)) for each in tokens])
"""
CLI = '\n\nif __name__ == "__main__":\n    Env.cli()\n'
PLAIN = """
    async def collect_trajectories(self, item):
        return self.group(await self.asked(self.config.group_size)), []

    async def evaluate(self, *args, **kwargs):
        await self.asked(1)
"""
HOLDS = "import time; time.sleep(3333)"
ENDED = "importing it ended the process, exit status -9: "
# Script -> what is said of attaching, stepping, evaluating; of one that cannot be imported, why.
SCRIPTS = {
    "plain": (HEAD + PLAIN + CLI, "yes", "yes", "yes"),
    "silent": (
        HEAD + "\n    async def collect_trajectories(self, item):\n        return None, []\n"
        "\n    async def evaluate(self):\n        await self.asked(1)\n" + CLI,
        "no: it collects no trajectories; its evaluate is run with: python SCRIPT evaluate",
        "no: it asks for no completion where it collects a trajectory",
        "yes",
    ),
    "four": (
        HEAD.replace("n=n", "n=4") + PLAIN + CLI,
        "yes",
        "yes: if it comes to asked: it asks for n=4 completions of one prompt: replay=True",
        "yes",
    ),
    "no_cli": (HEAD + PLAIN, "no: it begins nothing: end it with Env.cli()", "yes", "yes"),
    "no_evaluate": (
        HEAD + PLAIN.partition("    async def evaluate")[0] + CLI,
        "no: Env has no evaluate",
        "no: Env has no evaluate",
        "no: Env has no evaluate",
    ),
    "missing": ("import not_there_at_all\n", "it needs not_there_at_all, which is not installed"),
    "exits": ("import sys\nsys.exit(3)\n", "importing it raises SystemExit: 3"),
    "killed": ("import os\nos.kill(os.getpid(), 9)\n", ENDED),
    "none": ("x = 1\n", "it has no subclass of BaseEnv that collects trajectories"),
    "broken": ("def (:\n", "it cannot be read: invalid syntax (<unknown>, line 1)"),
}  # fmt: skip
APART = ("exits", "killed", "missing", "none")  # what matters of these is their process


def command(*words: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "shmbridge.producers.atropos", *map(str, words)],
        capture_output=True, text=True, cwd=ROOT, timeout=100,
    )  # fmt: skip


@pytest.fixture
def look(monkeypatch: pytest.MonkeyPatch) -> Callable[[Path], Checked]:
    """What is said of a script, which is imported here, where Atropos is imported already."""

    def look(script: Path) -> Checked:
        monkeypatch.setattr(sys, "path", [*sys.path])
        try:
            return look_at(script)
        finally:
            sys.modules.pop(script.stem, None)

    return look


def written(folder: Path, name: str) -> Path:
    script = folder / f"{name}.py"
    script.write_text(SCRIPTS[name][0])
    return script


def expected(name: str) -> list[str]:
    verdicts = SCRIPTS[name][1:]
    return list(verdicts) if len(verdicts) == 3 else [f"no: {verdicts[0]}"] * 3


def verdicts(said: Checked) -> list[str]:
    return [str(each) for each in (said.attached, said.stepped, said.evaluated)]


@pytest.mark.parametrize("name", [name for name in SCRIPTS if name not in APART])
def test_check_says_what_a_script_can(tmp_path, look, name):
    assert verdicts(look(written(tmp_path, name))) == expected(name)


def test_a_script_may_end_its_process_and_need_no_atropos(tmp_path):
    with ThreadPoolExecutor(2) as threads:
        said = list(threads.map(checked, [written(tmp_path, name) for name in APART]))
    assert [verdicts(each) for each in said] == [expected(name) for name in APART]


def test_what_a_script_begins_is_waited_for_by_nobody_and_ended(tmp_path):
    """Where all is well, as the command line says it, and where importing it never ends."""
    scripts = [tmp_path / "leaves.py", tmp_path / "holds.py"]
    for script, rest in zip(scripts, (SCRIPTS["plain"][0], HOLDS), strict=True):
        begins = f"import subprocess, sys\nchild = subprocess.Popen([sys.executable, '-c', {HOLDS!r}])\n"
        note = f"open({str(script.with_suffix('.pid'))!r}, 'w').write(str(child.pid))\n"
        script.write_text(begins + note + rest)
    with ThreadPoolExecutor(1) as thread:
        held = thread.submit(checked, scripts[1], timeout_s=10.0)
        done = command("--check", scripts[0])
        assert done.returncode == 0
        assert done.stdout == f"{scripts[0]}, Env\n  attached:  yes\n  stepped:   yes\n  evaluated: yes\n"
        assert str(held.result().attached) == "no: importing it took more than 10 s"
    for script in scripts:
        pid = int(script.with_suffix(".pid").read_text())
        wait_until(lambda pid=pid: not alive(pid), 20)


def alive(pid: int) -> bool:
    """Whether a process runs; one that nobody has waited for yet does not."""
    try:
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_check_of_the_command_line(tmp_path):
    script = written(tmp_path, "missing")
    done = command(script, "--check", "--json")
    assert done.returncode == 1, "it cannot be attached"
    said = json.loads(done.stdout)
    assert (said["script"], said["environment"], said["attached"]["can"]) == (str(script), "", False)
    assert command("--check", tmp_path / "nowhere.py").returncode == 2
    done = command(script)
    assert done.returncode == 2
    assert "missing: --bridge" in done.stderr


@pytest.mark.parametrize("name", ["plain", "four", "silent"])
def test_what_check_says_is_what_happens(tmp_path, policy_tokenizer, look, name):
    script = written(tmp_path, name)
    stepped = look(script).stepped
    replay = any("replay=True" in why for why in stepped.why)
    try:
        arguments = {"tokenizer": policy_tokenizer, "timeout_s": 20.0}
        with AtroposGemEnv(f"{script}:Env", replay=replay, reward_of=lambda _: 1.0, **arguments) as env:
            env.reset()
            while not (played := env.step("hello"))[2]:
                pass
        assert stepped.can
        assert played[1] == 1.0
    except (NotSuspendable, EnvFailed):
        assert not stepped.can
    if replay:
        with (
            AtroposGemEnv(f"{script}:Env", **arguments) as env,
            pytest.raises(NotSuspendable, match="4 completions"),
        ):
            env.reset()


def test_check_names_judges_and_processes(look):
    alarm = look(ENVS / "alarm_env.py")
    assert str(alarm.stepped) == "yes: in a process of its own: alarm_env.py calls signal in line 62"
    assert "begins nothing" in str(alarm.attached)
    judged = str(look(ENVS / "judged_env.py").stepped)
    assert judged == "yes: it asks a judge in score: judge={...}"
