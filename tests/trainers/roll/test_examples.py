"""An Atropos environment in ROLL's own environment manager, and the example's configuration."""

import importlib.util
import os
import re
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from omegaconf import OmegaConf

from shmbridge.consumers.roll.env_manager import Settings
from shmbridge.producers.gem import register
from tests.environments.byte_tokenizer import byte_tokenizer
from tests.trainers.roll.conftest import Queue

ROOT = Path(__file__).parents[3]
EXAMPLES = ROOT / "examples/roll"
CHAT = f"{ROOT / 'tests/environments/gem/envs/atropos_envs.py'}:ChatEnv"
# What ROLL's trainer reports of such a run, by the names of its step metrics.
METRICS = (
    "tokens/response_length/mean", "actor/total_loss@sum", "critic/advantages/mean", "critic/entropy/mean"
)  # fmt: skip


def example(name: str) -> dict:
    return yaml.safe_load((EXAMPLES / f"{name}.yaml").read_text())


def leaves(tree, above: str = "") -> dict[str, object]:
    """Path -> value of every leaf of a document."""
    if not isinstance(tree, dict):
        return {above: tree}
    return {
        path: value for key, each in tree.items() for path, value in leaves(each, f"{above}/{key}").items()
    }


@pytest.mark.timeout(120)
def test_rolls_manager_plays_an_atropos_environment_with_the_examples_reward_config(
    needs_checkout, tmp_path, monkeypatch
):
    from roll.distributed.scheduler.protocol import DataProto
    from roll.pipeline.agentic.env_manager import traj_env_manager
    from roll.pipeline.agentic.llm_proxy import RandomProxy

    register()
    monkeypatch.setattr(traj_env_manager.ray, "get", lambda value: value)
    monkeypatch.setattr(RandomProxy, "generate", thinks)
    tokenizer = byte_tokenizer()
    tokenizer.save_pretrained(tmp_path)
    rewards = example("atropos_gsm8k_grpo")["custom_envs"]["AtroposGSM8KTrain"]["env_config"]["reward_config"]
    config = OmegaConf.create(
        {
            "env_type": "atropos", "tag": "chat", "env_id": 0, "group_id": 0, "group_seed": 0, "max_steps": 2,
            "max_tokens_per_step": 64,
            "config": {
                "environment": CHAT, "tokenizer": str(tmp_path), "items": 4,
                "config": {"turns": 2, "score": -1.0}, "reward_config": rewards,
            },
        }
    )  # fmt: skip
    template = {"agent_system_template": "count", "agent_template": "{observation}"}
    pipeline = SimpleNamespace(
        custom_envs={"chat": template}, sequence_length=512, skip_mock_system_prompt=True
    )
    generating = SimpleNamespace(max_new_tokens=64, to_dict=dict)
    proxy = SimpleNamespace(proxy_type="random", proxy_config={})
    worker = SimpleNamespace(llm_proxy=proxy, generating_args=generating)
    queue = Queue(1)
    manager = traj_env_manager.TrajEnvManager(
        worker, pipeline, config, tokenizer, None, queue, threading.Lock()
    )
    manager.update_step(0)
    manager.env_config["max_steps"] = 2
    original = queue._next

    def one_episode(group_id, env_id=None):
        episode = original(group_id, env_id)
        manager.running = episode is not None
        return episode

    queue.get_episode_id.remote = one_episode
    manager.run_rollout_loop(DataProto(meta_info={"seed": 3}))
    (rollout,) = queue.rollouts
    assert rollout.non_tensor_batch["step_scores"][0][0] == 0.0
    episode = rollout.non_tensor_batch["episode_scores"][0]
    bounty = 0.001 * len("<think> 5<|end|>") * 2
    assert episode == pytest.approx(-1.0 + 0.2 + bounty, abs=0.02), "-1 stays, and the markers are counted"
    assert rollout.batch["scores"].sum() == pytest.approx(episode)
    assert rollout.batch["response_mask"].sum() == 2 * len("<think> 5")
    manager.env.close()


def thinks(self, messages, lm_input, generation_config):
    """Answers as a policy that thinks."""
    lm_input.batch["responses"] = self.tokenizer(["<think> 5"], return_tensors="pt")["input_ids"]
    return lm_input


def test_the_example_has_the_keys_of_rolls_own(needs_checkout):
    upstream = Path(needs_checkout) / "examples/agentic_demo/atropos_gsm8k_grpo_qwen25_0.5b.yaml"
    theirs, ours = leaves(yaml.safe_load(upstream.read_text())), leaves(example("atropos_gsm8k_grpo"))
    changed = {
        path
        for path, value in theirs.items()
        if not path.startswith("/defaults") and ours.get(path, ...) != value
    }
    env = "/custom_envs/AtroposGSM8KTrain"
    assert changed == {
        "/exp_name", "/world_size", "/env_manager_cls", f"{env}/env_type", f"{env}/agent_system_template",
        "/tracker_kwargs/api_key", "/actor_infer/strategy_args/strategy_config/VLLM_USE_V1",
        *(f"{env}/env_config/{key}" for key in (
            "atropos_env_path", "max_steps", "debug", "env_config/group_size", "env_config/max_token_length",
            "reward_config/format_markers",
        )),
    }  # fmt: skip


@pytest.mark.parametrize("name", ["atropos_gsm8k_grpo", "shm_grpo"])
def test_roll_reads_the_examples(needs_checkout, name, monkeypatch, tmp_path):
    from roll.configs import base_config

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(
        "ROLL_LOG_DIR", str(tmp_path)
    )  # ROLL sets a relative one, and later tests start processes
    monkeypatch.setattr(
        type(base_config.current_platform), "device_count", staticmethod(lambda: 2), raising=False
    )
    spec = importlib.util.spec_from_file_location("train", EXAMPLES / "train.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    config, pipeline = module.configuration(name, ["max_steps=3"])
    assert config.max_steps == 3
    # init_kl_coef above 0 makes ROLL enable the reference; the KL loss of ROLL's own example wants it
    assert config.enable_reference == (name == "atropos_gsm8k_grpo")
    (worker,) = {cfg["env_manager_cls"] for cfg in config.train_env_manager.env_configs[0].values()}
    assert worker.endswith("ShmEnvManager" if name == "shm_grpo" else "TrajEnvManager")
    assert pipeline.__name__ == ("ShmAgenticPipeline" if name == "shm_grpo" else "AgenticPipeline")


@pytest.mark.parametrize(
    ("name", "says"),
    [("shm_grpo", "-> PYTHONPATH=../ROLL, a checkout"), ("shm", "'atropos_gsm8k_grpo', 'shm_grpo'")],
)
def test_the_example_says_what_is_missing(name, says, tmp_path):
    """No ROLL, or no such file."""
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / "train.py"), name],
        capture_output=True, text=True, cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode != 0
    assert says in done.stderr
    assert "Traceback" not in done.stderr


def test_the_settings_of_the_bridges_example_are_known():
    given = example("shm_grpo")["custom_envs"]["shm"]["env_config"]
    assert Settings.of(given) == Settings(bridge="run1")


def test_metrics_of_the_page_are_those_that_roll_computes(needs_checkout):
    folder = Path(needs_checkout) / "roll/pipeline/agentic"
    source = (folder / "agentic_pipeline.py").read_text() + (folder / "agentic_actor_worker.py").read_text()
    page = (ROOT / "docs/how-to/roll.md").read_text()
    for name in METRICS:
        assert f'"{name}"' in source, name
        assert f"`{name}`" in page, name


def test_the_page_shows_what_the_example_says(recorded):
    page = (ROOT / "docs/how-to/roll.md").read_text()
    block, _launch_file = re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)
    shown, whole = leaves(yaml.safe_load(block)), leaves(example("shm_grpo"))
    assert {path: whole.get(path) for path in shown} == shown
    assert recorded["commit"][:8] in page
