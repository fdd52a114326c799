"""Rollouts of Harbor, by OpenEnv's own `run_rollout`, become groups.

Harbor itself needs Python 3.12 and sandboxes. A stand-in for its trial runs an agent that asks the proxy with
the key and address that OpenEnv gives to mini-swe-agent, and says a verifier's rewards.
"""

import sys
from types import ModuleType, SimpleNamespace

import pytest

from shmbridge.producers.openenv import AgentRollout, harbor_play
from shmbridge.producers.rollout import Task
from tests.environments.openenv.engine import Engine, serving
from tests.environments.openenv.test_sessions import Updates, chat_agent, counting


@pytest.fixture
def harbor(monkeypatch):
    """The modules of Harbor that OpenEnv imports; `rewards` are those of the trials to come."""
    rewards: list[dict | None] = []

    class Trial:
        @classmethod
        async def create(cls, config):
            trial = cls()
            trial.config = config
            return trial

        async def run(self):
            said = rewards.pop(0)
            env = self.config.agent.env
            url = env["OPENAI_BASE_URL"].removesuffix("/v1")
            task = [{"role": "user", "content": self.config.task.path.name}]
            episode = SimpleNamespace(url=url, key=env["OPENAI_API_KEY"], messages=task)
            if said is None:
                raise RuntimeError("the sandbox is gone")
            await chat_agent(episode, stream=False)
            return SimpleNamespace(verifier_result=SimpleNamespace(rewards=said))

    def module(name: str, **names):
        made = ModuleType(name)
        vars(made).update(names)
        monkeypatch.setitem(sys.modules, name, made)

    for name in ("harbor", "harbor.models", "harbor.models.trial", "harbor.trial"):
        module(name)
    kinds = ("AgentConfig", "EnvironmentConfig", "TaskConfig", "TrialConfig", "VerifierConfig")
    module("harbor.models.trial.config", **{kind: type(kind, (SimpleNamespace,), {}) for kind in kinds})
    module("harbor.trial.trial", Trial=Trial)
    return rewards


async def test_harbors_rollouts_become_a_group_with_its_rewards(bridge, make_consumer, harbor, tmp_path):
    consumer = make_consumer()
    harbor += [{"reward": 0.5, "style": 1.0}, None, {"reward": 0.0, "style": 0.0}]
    (tmp_path / "task").mkdir()
    async with (
        serving(Engine(counting, Updates(at_answer=3))) as engine,
        AgentRollout(bridge, engine.url, group_size=3) as rollout,
    ):
        play = harbor_play(rollout, "mini-swe-agent", "docker", tmp_path / "trials")
        tasks = [Task([], tmp_path / "task", instance_id="task")]
        assert await rollout.run(tasks, play) == 1
        assert rollout.losses.episodes == {"SessionUnusable": 1}
        assert not rollout.capture.registry.list_ids()
    with consumer.get(timeout_s=5) as record:
        assert sorted(record["score"].tolist()) == [0.0, 0.5]
        assert {row["reward"]: row["style"] for row in record["reward_components"]} == {0.5: 1.0, 0.0: 0.0}
        assert (record.meta.min_policy_version, record.meta.max_policy_version) == (5, 6)
        for row in range(2):
            tokens, versions = record["tokens"][row].tolist(), record["token_versions"][row].tolist()
            mine = [each for each in engine.answers if tokens[: len(each[0] + each[1])] == each[0] + each[1]]
            ends = record["turn_ends"][row].tolist()
            assert len(ends) == 20
            assert {versions[end - 1] for end in ends} <= {5, 6}
            assert record["loss_mask"][row].sum() == sum(
                len(said) for prompt, said in {(tuple(each[0]), tuple(each[1])) for each in mine}
            )
