"""An environment of SkyRL-Gym whose every turn is a tool's work, and which notes what it returned.

Registered as "counting" by importing this module; imported twice, it is registered once.
"""

import json
import os
import time
from pathlib import Path

from skyrl_gym.envs.base_text_env import BaseTextEnv, BaseTextEnvStepOutput
from skyrl_gym.envs.registration import register, registry
from skyrl_gym.tools.core import ToolGroup, tool


class Counting(ToolGroup):
    def __init__(self):
        super().__init__(name="Counting")

    @tool
    def digits(self, text):
        return sum(each.isdigit() for each in text)


class CountingEnv(BaseTextEnv):
    """A turn earns a tenth for each digit; the observation is their number.

    `extras["log"]` is a file that grows by a line per episode: what it was asked, and what it returned.
    """

    def __init__(self, env_config=None, extras=None):
        super().__init__()
        self.extras = extras
        self.max_turns = int(extras["max_turns"])
        self.bonus = env_config.bonus if env_config else 0.0
        self.init_tool_groups([Counting()])
        self.noted = {"pid": os.getpid(), "uid": extras["uid"], "actions": [], "rewards": [], "said": []}

    def init(self, prompt):
        time.sleep(self.extras.get("slow_init", 0.0))
        return [{"role": "system", "content": "c"}, *prompt], {}

    def step(self, action):
        self.turns += 1
        if self.extras.get("begun"):
            Path(self.extras["begun"]).touch()
        time.sleep(self.extras.get("slow", 0.0))
        digits = self._execute_tool("Counting", "digits", [action])
        if self.extras.get("breaks_at") == self.turns:
            raise ZeroDivisionError("as the task wants")
        reward = digits / 10 + self.bonus
        said = [{"role": "user", "content": f"{digits}?"}]
        self.noted["actions"].append(action)
        self.noted["rewards"].append(reward)
        self.noted["said"].append(said)
        done = self.turns >= self.max_turns
        return BaseTextEnvStepOutput(
            observations=said, reward=reward, done=done, metadata={("digits",): digits}
        )

    def get_metrics(self):
        if self.extras.get("odd_metrics"):
            return {("turns",): self.turns}
        return {"turns": self.turns, "digits": sum(self.noted["rewards"])}

    def close(self):
        if self.extras.get("log"):
            with Path(self.extras["log"]).open("a") as file:
                file.write(json.dumps(self.noted) + "\n")


if "counting" not in registry:
    register(id="counting", entry_point=CountingEnv)
