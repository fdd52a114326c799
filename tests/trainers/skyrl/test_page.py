"""docs/how-to/skyrl.md: its Python runs, its command is accepted, its settings exist; the example trains."""

import os
import re
import shlex
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs/how-to/skyrl.md"


def test_its_python_runs(example):
    example.without_cuda()
    (block,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    scope = {}
    exec(compile(block, str(PAGE), "exec"), scope)
    assert [base.__name__ for base in scope["MyTrainer"].__mro__[:3]] == [
        "MyTrainer", "BridgeSteps", "RayPPOTrainer",
    ]  # fmt: skip


def test_its_command_is_accepted():
    from shmbridge.consumers.skyrl.config import BridgeConfig, ShmTrainConfig, check, compares_with_sampler

    (command,) = re.findall(r"    (python -m skyrl\.train.*?)\n\n", PAGE.read_text(), re.DOTALL)
    words = shlex.split(command.replace("\\\n", " "))[3:]
    assert words.pop(0) == "trainer.override_entrypoint=shmbridge.consumers.skyrl.entrypoint"
    cfg = ShmTrainConfig.from_cli_overrides(words)
    check(cfg)
    assert compares_with_sampler(cfg)
    assert isinstance(cfg.bridge, BridgeConfig)
    table = PAGE.read_text().split("| `bridge.` |")[1].split("\n\n")[0]
    named = {word for line in table.splitlines()[2:] for word in re.findall(r"`(\w+)`", line.split("|")[1])}
    assert named == {field.name for field in fields(BridgeConfig)}


def test_its_links_lead_somewhere():
    for target in re.findall(r"\]\(([^)#:]+)\)", PAGE.read_text()):
        assert (PAGE.parent / target).exists(), target
    assert "](skyrl.md)" in (ROOT / "docs/how-to/skyrl-gym.md").read_text()


def test_the_example_trains():
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples/skyrl_train.py"), "--steps", "4"],
        capture_output=True, text=True, timeout=110, env=os.environ | {"PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    before, after = map(float, re.findall(r"rewarded token: (-[\d.]+) -> (-[\d.]+)", done.stdout)[0])
    assert after > before + 1.0
    assert "policy version 4" in done.stdout
