"""An environment of two players of the policy and a judge that does not train; some of it fails.

What fails is said by the task: "harness", "reward", "hang", "finalize", or "" for nothing. It hits two
episodes of four, or the second player of each where the task says "player".
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator

import verifiers.v1 as vf
from larger_digit import AskingHarness

_episodes = itertools.count()  # each test plays four


class PairData(vf.TaskData):
    fails: str


class PairTask(vf.Task[PairData]):
    @vf.reward
    async def one(self, task: PairData, trace: vf.Trace) -> float:
        if task.fails == "reward" and trace.info.get("unlucky"):
            raise ValueError("no reward")
        return 1.0


class PairConfig(vf.TasksetConfig):
    fails: tuple[str, ...] = ("",)


class PairTaskset(vf.Taskset[PairTask, PairConfig]):
    def load(self) -> Iterator[PairTask]:
        for number, fails in enumerate(self.config.fails):
            data = PairData(name=f"pair#{number}", prompt=f">{number}", fails=fails)
            yield PairTask(data, self.config.task)


class PairHarness(AskingHarness):
    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data):
        fails, player = trace.task.data.fails, trace.agent.name
        unlucky = trace.info["unlucky"] = player == "second" and next(_episodes) % 2 == 0
        if fails == "player" and player == "second":
            return vf.ProgramResult(1, "", "the second player broke")
        if fails == "harness" and unlucky:
            return vf.ProgramResult(1, "", "the program broke")
        if fails == "hang" and unlucky:
            await asyncio.Event().wait()
        return await super().launch(ctx, trace, runtime, endpoint, secret, mcp_urls, data)


class PairEnvConfig(vf.EnvConfig):
    first: vf.AgentConfig = vf.AgentConfig()
    second: vf.AgentConfig = vf.AgentConfig()
    judge: vf.AgentConfig = vf.AgentConfig()


class PairEnv(vf.Env[PairEnvConfig]):
    async def setup(self, agents: vf.Agents) -> None:
        agents.judge.trainable = False

    async def run(self, task: vf.Task, agents: vf.Agents) -> None:
        for agent in (agents.first, agents.second, agents.judge):
            await agent.run(task)

    async def finalize(self, task: vf.Task, episode: vf.Episode) -> None:
        if task.data.fails == "finalize" and any(each.info.get("unlucky") for each in episode.traces):
            raise ValueError("no judgement")
        for trace in episode.traces:
            trace.record_reward("together", 2.0)


__all__ = ["PairEnv", "PairHarness", "PairTaskset"]
