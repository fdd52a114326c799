"""ROLL's own environment managers over upstream's gsm8k_server.py, unedited: 100 episodes in groups of 4.

Needs SHMBRIDGE_ROLL_CHECKOUT and SHMBRIDGE_ATROPOS_CHECKOUT. Ray and the policy are stand-ins: ROLL's
managers, one in a thread for each environment of a group, as its worker has them, are as they are.
"""

import os
import random
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
from omegaconf import OmegaConf

from shmbridge.producers.gem import register
from tests.environments.byte_tokenizer import byte_tokenizer
from tests.environments.gem.upstream import SCRIPTS, own_scores, write_data
from tests.trainers.roll.conftest import Queue

GROUP, EPISODES = 4, 25


def manager_of(number: int, environment: str, tokenizer, queue, lock):
    """ROLL's manager of one of the group's environments."""
    from roll.pipeline.agentic.env_manager import traj_env_manager

    config = OmegaConf.create(
        {
            "env_type": "atropos", "tag": "gsm8k", "env_id": number, "group_id": 0, "group_seed": 7,
            "max_steps": 1, "max_tokens_per_step": 4096,
            "config": {
                "environment": environment, "tokenizer": "tokenizer", "items": 200, "group_size": GROUP,
                "config": {"use_wandb": False, **SCRIPTS["gsm8k"].config}, "timeout_s": 200.0,
            },
        }
    )  # fmt: skip
    template = {"agent_system_template": "solve it", "agent_template": "{observation}"}
    pipeline = SimpleNamespace(
        custom_envs={"gsm8k": template}, sequence_length=16384, skip_mock_system_prompt=True
    )
    generating = SimpleNamespace(max_new_tokens=4096, to_dict=dict)
    worker = SimpleNamespace(
        llm_proxy=SimpleNamespace(proxy_type="random", proxy_config={}), generating_args=generating
    )
    return traj_env_manager.TrajEnvManager(worker, pipeline, config, tokenizer, None, queue, lock)


@pytest.mark.long
@pytest.mark.timeout(600)
def test_rolls_managers_play_upstreams_gsm8k(needs_checkout, tmp_path, monkeypatch):
    checkout = os.environ.get("SHMBRIDGE_ATROPOS_CHECKOUT")
    if not checkout:
        pytest.skip("not run: SHMBRIDGE_ATROPOS_CHECKOUT names no checkout of Atropos")
    from roll.distributed.scheduler.protocol import DataProto
    from roll.pipeline.agentic.env_manager import traj_env_manager
    from roll.pipeline.agentic.llm_proxy import RandomProxy

    scripts = Path(checkout).resolve() / "environments"
    register()
    write_data(tmp_path)
    tokenizer = byte_tokenizer()
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    monkeypatch.chdir(tmp_path)
    for name, value in {"HF_HUB_OFFLINE": "1", "WANDB_MODE": "disabled"}.items():
        monkeypatch.setenv(name, value)
    if "datasets" in sys.modules:
        monkeypatch.setattr(sys.modules["datasets"].config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(traj_env_manager.ray, "get", lambda value: value)
    chance = random.Random(11)

    def sampled(self, messages, lm_input, generation_config):
        """A policy that is right most of the time, and at length now and then."""
        text = (
            SCRIPTS["gsm8k"].right(messages[-1]["content"])
            if chance.random() < 0.5
            else SCRIPTS["gsm8k"].wrong
        )
        text = f"<think>{'hm ' * 700 * (chance.random() < 0.3)}</think>" + text.rpartition("</think>")[2]
        lm_input.batch["responses"] = tokenizer([text], return_tensors="pt", add_special_tokens=False)[
            "input_ids"
        ]
        return lm_input

    monkeypatch.setattr(RandomProxy, "generate", sampled)
    environment = str(scripts / SCRIPTS["gsm8k"].path)
    queues, managers, steps = [Queue(EPISODES) for _ in range(GROUP)], [], [[] for _ in range(GROUP)]
    for number in range(GROUP):
        manager = manager_of(number, environment, tokenizer, queues[number], threading.Lock())
        manager.update_step(0)
        watched(manager, steps[number], queues[number])
        managers.append(manager)
    failed = []

    def run(manager):
        try:
            manager.run_rollout_loop(DataProto(meta_info={"seed": 3}))
        except BaseException as error:
            failed.append(error)
            raise

    threads = [threading.Thread(target=run, args=(manager,)) for manager in managers]
    for each in threads:
        each.start()
    for each in threads:
        each.join(500)
    assert not failed
    rewards = [
        [float(rollout.non_tensor_batch["episode_scores"][0]) for rollout in queue.rollouts]
        for queue in queues
    ]
    assert [len(each) for each in rewards] == [EPISODES] * GROUP
    for episode in range(EPISODES):
        group = [steps[number][episode] for number in range(GROUP)]
        assert len({shown for shown, _, _ in group}) == 1, "siblings have one item"
        assert [rewards[number][episode] for number in range(GROUP)] == pytest.approx(
            own_scores(scripts, group), abs=1e-6
        )
    for manager in managers:
        manager.env.close()


def watched(manager, steps: list, queue) -> None:
    """Notes what its environment was given and gave; the loop ends with the queue's episodes."""
    env, shown = manager.env, []
    reset, step, original = env.reset, env.step, queue._next

    def noting_reset(seed=None):
        observation, info = reset(seed=seed)
        shown[:] = [info["new_messages"][-1]["content"]]
        return observation, info

    def noting_step(action):
        stepped = step(action)
        steps.append((shown[0], action.removesuffix("<|end|>"), stepped))
        return stepped

    def next_episode(group_id, env_id=None):
        episode = original(group_id, env_id)
        manager.running = episode is not None
        return episode

    env.reset, env.step = noting_reset, noting_step
    queue.get_episode_id.remote = next_episode
