"""An environment whose answers are long enough for weights to change under them; nothing in it speaks of
versions.
"""

import itertools

from atroposlib.envs.base import APIServerConfig, BaseEnv, BaseEnvConfig


class LongAnswersEnv(BaseEnv):
    name = "long"

    @classmethod
    def config_init(cls):
        return BaseEnvConfig(), [
            APIServerConfig(
                model_name="policy", base_url="http://127.0.0.1:9/v1", api_key="x", server_type="vllm"
            )
        ]

    async def setup(self):
        self.items = itertools.count()

    async def get_next_item(self):
        return next(self.items)

    async def collect_trajectories(self, item):
        async with self.server.managed_server(tokenizer=self.tokenizer) as managed:
            await managed.completion(
                prompt=f">{item % 10}", n=self.config.group_size, max_tokens=400, ignore_eos=True
            )
            nodes = managed.get_state()["nodes"]
        return {
            "tokens": [node.tokens for node in nodes],
            "masks": [node.masked_tokens for node in nodes],
            "inference_logprobs": [node.logprobs for node in nodes],
            "scores": [float(row) for row in range(len(nodes))],
        }, []

    async def evaluate(self, *args, **kwargs):
        pass


if __name__ == "__main__":
    LongAnswersEnv.cli()
