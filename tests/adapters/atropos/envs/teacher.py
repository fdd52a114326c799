"""On-policy distillation: a teacher's log-probabilities of every token are added on the way out, as Atropos'
TeacherDistillationEnv does it. The teacher is a function of the token, so that a test knows its values.
"""

import itertools

from atroposlib.envs.base import APIServerConfig, BaseEnv, BaseEnvConfig

TOP = 3


class TeacherEnv(BaseEnv):
    name = "teacher"

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
        tokens = [[item % 1000, row, 5, 6][: 2 + row % 3] for row in range(self.config.group_size)]
        return {
            "tokens": tokens,
            "masks": [[-100, *row[1:]] for row in tokens],
            "scores": [float(row) for row in range(len(tokens))],
        }, []

    async def handle_send_to_api(
        self, scored_data, item=None, do_send_to_api=True, abort_on_any_max_length_exceeded=True
    ):
        for group in scored_data if isinstance(scored_data, list) else [scored_data]:
            group["distill_token_ids"] = [
                [[token + rank for rank in range(TOP)] for token in row] for row in group["tokens"]
            ]
            group["distill_logprobs"] = [
                [[-0.1 * (rank + 1) for rank in range(TOP)] for _ in row] for row in group["tokens"]
            ]
        await super().handle_send_to_api(scored_data, item, do_send_to_api, abort_on_any_max_length_exceeded)

    async def evaluate(self, *args, **kwargs):
        pass


if __name__ == "__main__":
    TeacherEnv.cli()
