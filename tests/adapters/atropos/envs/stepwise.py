"""An episode is a list of groups, one per step, each with the rewards of the messages so far; no language
model.
"""

import itertools

from atroposlib.envs.base import APIServerConfig, BaseEnv, BaseEnvConfig

STEPS = 3


def episode(item, group_size):
    """A group per step; row r of step s has s + 1 turns of two tokens, each with a reward."""
    return [_group(item, step, group_size) for step in range(STEPS)]


def _group(item, step, rows):
    turns = step + 1
    tokens = [[item, step, row, *((7, 8, 9) * turns)] for row in range(rows)]
    return {
        "tokens": tokens,
        "masks": [[-100] * 3 + [-100, 8, 9] * turns for _ in range(rows)],
        "scores": [row + step / 10 for row in range(rows)],
        "messages": [
            [
                message
                for turn in range(turns)
                for message in (
                    {"role": "user", "content": f"step {turn}"},
                    {"role": "assistant", "content": f"{item}", "reward": turn + row / 4},
                )
            ]
            for row in range(rows)
        ],
        "seed": item,
        "group_overrides": {},
    }


class StepwiseEnv(BaseEnv):
    name = "stepwise"

    @classmethod
    def config_init(cls):
        config = BaseEnvConfig(group_size=4, total_steps=100000, steps_per_eval=0, use_wandb=False)
        return config, [
            APIServerConfig(
                model_name="none", base_url="http://127.0.0.1:9/v1", api_key="x", health_check=False
            )
        ]

    async def setup(self):
        self.items = itertools.count()

    async def get_next_item(self):
        return next(self.items)

    async def collect_trajectories(self, item):
        return episode(item % 1000, self.config.group_size), []

    async def evaluate(self, *args, **kwargs):
        pass


if __name__ == "__main__":
    StepwiseEnv.cli()
