"""A real agent that others wrote, mini-swe-agent, repairs a program in a folder, behind OpenEnv's capture."""

import asyncio
import sys

import pytest

from shmbridge.producers.openenv import AgentRollout
from shmbridge.producers.rollout import Task
from tests.environments.openenv.engine import Engine, serving

SUBMIT = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
COMMANDS = ["cat add.py", "sed -i 's/a - b/a + b/' add.py", f"{sys.executable} -c 'import add' ; {SUBMIT}"]


def repairing(messages) -> tuple[str, dict | None]:
    """What a model would say that repairs it; it stands for one that cannot be had here."""
    turn = sum(message["role"] == "tool" for message in messages)
    return f"step {turn}", {"command": COMMANDS[turn]}


@pytest.fixture
def mini(monkeypatch, tmp_path):
    """Its agent, its shell and its client of an API, from the package, with a folder for its settings."""
    monkeypatch.setenv("MSWEA_SILENT_STARTUP", "1")
    monkeypatch.setenv("MSWEA_GLOBAL_CONFIG_DIR", str(tmp_path / "config"))
    from minisweagent.agents.default import DefaultAgent
    from minisweagent.environments.local import LocalEnvironment
    from minisweagent.models.openrouter_model import OpenRouterModel

    def agent(episode, folder):
        model = OpenRouterModel(model_name="mine", cost_tracking="ignore_errors")
        model._api_url, model._api_key = f"{episode.url}/v1/chat/completions", episode.key
        templates = {"system_template": "You repair programs.", "instance_template": "{{ task }}"}
        return DefaultAgent(model, LocalEnvironment(cwd=str(folder)), **templates)

    return agent


async def test_mini_swe_agent_repairs_a_program(bridge, make_consumer, mini, tmp_path):
    consumer = make_consumer()

    async def play(episode, data):
        folder = tmp_path / str(episode.repetition_id)
        folder.mkdir()
        (folder / "add.py").write_text("def add(a, b):\n    return a - b\n")
        ended = await asyncio.to_thread(mini(episode, folder).run, "add.py subtracts")
        assert ended["exit_status"] == "Submitted"
        episode.score = float("a + b" in (folder / "add.py").read_text())

    async with (
        serving(Engine(repairing, lambda tokens: [4] * tokens)) as engine,
        AgentRollout(bridge, engine.url, group_size=2) as rollout,
    ):
        assert await rollout.run([Task([], None, instance_id="add")], play) == 1
        assert rollout.losses.episodes == {}
    with consumer.get(timeout_s=5) as record:
        assert record["score"].tolist() == [1.0, 1.0]
        assert (record.meta.min_policy_version, record.meta.max_policy_version) == (4, 4)
        for row in range(2):
            tokens = record["tokens"][row].tolist()
            messages = record.json("messages")[row]
            assert "return a - b" in messages[3]["content"]  # what its shell said
            assert tokens == engine.rendered(messages, engine.bodies[-1]["tools"], ask=False)
            assert len(record["turn_ends"][row]) == len(COMMANDS)
