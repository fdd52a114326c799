"""The example environments, run as programs against a policy server; Atropos is used as it is installed."""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import requests
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from shmbridge.testing import json_lines

pytest.importorskip("atroposlib")

ROOT = Path(__file__).parents[3]
PYTHONPATH = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
EXAMPLES = ROOT / "examples"
SCRIPTS = ["larger_digit_env.py", "echo_letters_env.py"]
ANSWERS: dict[str, Callable[[str], str]] = {
    "larger_digit_env.py": lambda question: max(question[1:]),
    "echo_letters_env.py": lambda question: question[1:],
}
QUIET = {"WANDB_MODE": "disabled", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}


def run(*command: str, **kwargs: Any) -> subprocess.CompletedProcess:
    finished = subprocess.run(
        [sys.executable, *command],
        capture_output=True,
        text=True,
        timeout=100,
        env=os.environ | QUIET,
        **kwargs,
    )
    assert finished.returncode == 0, finished.stdout[-2000:] + finished.stderr[-4000:]
    return finished


class Program:
    """A child of this test, with its output in a file."""

    def __init__(self, log: Path, *command: str) -> None:
        self.log = log
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                [sys.executable, *command],
                stdout=output,
                stderr=output,
                env=os.environ | QUIET | {"PYTHONPATH": PYTHONPATH},
            )

    def wait_for(self, condition: Callable[[], Any], timeout_s: float = 60) -> Any:
        deadline = time.monotonic() + timeout_s
        while not (value := condition()):
            assert self._process.poll() is None, self.log.read_text()[-4000:]
            assert time.monotonic() < deadline, self.log.read_text()[-4000:]
            time.sleep(0.05)
        return value

    def end(self) -> None:
        self._process.kill()
        self._process.wait(30)


def flags(model: Path, policy_url: str, **env: Any) -> list[str]:
    fields = {"tokenizer_name": model, "use_wandb": "false"} | env
    chosen = [word for name, value in fields.items() for word in (f"--env.{name}", str(value))]
    return [*chosen, "--openai.base_url", policy_url, "--openai.tokenizer_name", str(model)]


def test_the_tiny_model_is_the_one_described_and_its_seed_repeats(model, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(model)
    weights = AutoModelForCausalLM.from_pretrained(model)
    assert sum(parameter.numel() for parameter in weights.parameters()) == 86_208
    assert len(tokenizer) == weights.config.vocab_size == 28
    assert (tokenizer.padding_side, tokenizer.eos_token) == ("left", "<|end|>")
    message = [{"role": "user", "content": ":abc"}]
    prompt = tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True)
    assert prompt == "<|user|>:abc<|end|><|assistant|>"
    assert len(tokenizer.encode(prompt)) == 7
    assert tokenizer.decode(tokenizer.encode(prompt)) == prompt

    run(str(EXAMPLES / "tiny_model.py"), str(tmp_path / "again"), "--seed", "1")
    again, first = tmp_path / "again" / "model.safetensors", model / "model.safetensors"
    assert again.read_bytes() == first.read_bytes()


@pytest.mark.parametrize("script", SCRIPTS)
def test_an_environment_knows_nothing_of_shmbridge(script):
    tree = ast.parse((EXAMPLES / script).read_text())
    imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    imported |= {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert not {name for name in imported if name.split(".")[0] == "shmbridge"}


@pytest.mark.parametrize(
    ("said", "answer", "expected"),
    [
        ("7", "7", 1.0),
        ("77", "7", 0.5),
        ("", "7", 0.0),
        (None, "7", 0.0),
        ("axc", "abc", 2 / 3),
        ("ab", "abc", 2 / 3),
    ],
)
@pytest.mark.parametrize("script", SCRIPTS)
def test_the_reward_is_graded(script, said, answer, expected, monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES)
    spec = importlib.util.spec_from_file_location(script.removesuffix(".py"), EXAMPLES / script)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.reward(said, answer) == pytest.approx(expected)


@pytest.mark.parametrize("script", SCRIPTS)
def test_groups_are_token_exact_and_rewards_are_logged_as_measured(script, model, policy_url, tmp_path):
    groups_file, reward_log = tmp_path / "groups.jsonl", tmp_path / "rewards.jsonl"
    wanted = flags(
        model, policy_url, total_steps=4, data_path_to_save_groups=groups_file, reward_log=reward_log, seed=5
    )
    run(str(EXAMPLES / script), "process", *wanted, cwd=tmp_path)
    groups, rewards = json_lines(groups_file), json_lines(reward_log)
    tokenizer, policy = AutoTokenizer.from_pretrained(model), AutoModelForCausalLM.from_pretrained(model)

    assert len(groups) == 4
    assert [entry["n"] for entry in rewards] == [8] * 4
    for group, entry in zip(groups, rewards, strict=True):
        assert entry["mean"] == pytest.approx(np.mean(group["scores"]))
        assert len(group["tokens"]) == len(group["scores"]) == 8
        for row, score in enumerate(group["scores"]):
            check_row(group, row, score, script, tokenizer, policy)


def check_row(
    group: dict[str, Any], row: int, score: float, script: str, tokenizer: Any, policy: Any
) -> None:
    tokens, masks, logprobs = (group[column][row] for column in ("tokens", "masks", "inference_logprobs"))
    start = sum(mask == -100 for mask in masks)
    assert len(tokens) == len(masks) == len(logprobs)
    assert (masks[:start], masks[start:]) == ([-100] * start, tokens[start:])
    assert logprobs[:start] == [1.0] * start
    with torch.no_grad():
        expected = policy(torch.tensor([tokens])).logits[0, start - 1 : -1].log_softmax(-1)
    sampled = expected.gather(-1, torch.tensor(tokens[start:])[:, None])[:, 0].numpy()
    np.testing.assert_allclose(logprobs[start:], sampled, atol=1e-4)

    question = tokenizer.decode(tokens[1 : start - 2])
    answer = ANSWERS[script](question)
    said = tokenizer.decode(tokens[start:], skip_special_tokens=True)
    matches = sum(a == b for a, b in zip(said, answer, strict=False))
    assert score == pytest.approx(matches / max(len(said), len(answer)))


@pytest.mark.parametrize("script", SCRIPTS)
def test_evaluation_goes_over_chat_and_writes_its_result(script, model, policy_url, tmp_path):
    run(
        str(EXAMPLES / script),
        "evaluate",
        *flags(model, policy_url, data_dir_to_save_evals=tmp_path),
        cwd=tmp_path,
    )
    report = json.loads((tmp_path / "metrics.json").read_text())
    assert 0.0 <= report["results"]["all"]["eval/reward"] <= 1.0


def test_an_environment_serves_the_original_rollout_server(model, policy_url, tmp_path):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    application = f"import uvicorn; uvicorn.run('atroposlib.api.server:app', port={port}, log_level='error')"
    registration = dict.fromkeys(("wandb_group", "wandb_project", "checkpoint_dir"), "") | {
        "batch_size": 16,
        "max_token_len": 64,
        "save_checkpoint_interval": -1,
        "starting_step": 0,
        "num_steps": 100,
    }
    api = Program(tmp_path / "api.log", "-c", application)
    env = None
    try:
        api.wait_for(lambda: answers(f"{url}/info"))
        requests.post(f"{url}/register", json=registration, timeout=10).raise_for_status()
        requests.get(f"{url}/batch", timeout=10).raise_for_status()  # the first one lets environments in
        wanted = flags(model, policy_url, rollout_server_url=url)
        env = Program(tmp_path / "env.log", str(EXAMPLES / SCRIPTS[0]), "serve", *wanted)
        batch = env.wait_for(lambda: requests.get(f"{url}/batch", timeout=10).json()["batch"])
    finally:
        for program in (env, api):
            if program is not None:
                program.end()
    assert sum(len(group["tokens"]) for group in batch) == 16
    assert all(group["inference_logprobs"] is not None for group in batch)


def answers(url: str) -> bool:
    try:
        return requests.get(url, timeout=5).ok
    except requests.ConnectionError:
        return False
