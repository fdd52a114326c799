"""One question, one answer, token-exact through the ManagedServer: tokens, masks and logprobs are the
server's own.

Its server config stands alone, not in a list, as in many of Atropos' own environments.
"""

import itertools

from atroposlib.envs.base import APIServerConfig, BaseEnv, BaseEnvConfig, ScoredDataGroup


class SingleTurnEnv(BaseEnv):
    name = "single"

    @classmethod
    def config_init(cls):
        config = BaseEnvConfig(
            group_size=4,
            max_token_length=6,
            total_steps=100000,
            steps_per_eval=0,
            use_wandb=False,
            ensure_scores_are_not_same=False,
        )
        return config, APIServerConfig(
            model_name="policy", base_url="http://127.0.0.1:9/v1", api_key="x", server_type="vllm"
        )

    async def setup(self):
        self.questions = itertools.count()

    async def get_next_item(self):
        return f">{next(self.questions) % 100:02}"

    async def collect_trajectories(self, item):
        async with self.server.managed_server(tokenizer=self.tokenizer) as managed:
            completion = await managed.chat_completion(
                messages=[{"role": "user", "content": item}],
                n=self.config.group_size,
                max_tokens=6,
                temperature=1.0,
            )
            nodes = managed.get_state()["nodes"]
        group = ScoredDataGroup(
            tokens=[node.tokens for node in nodes],
            masks=[node.masked_tokens for node in nodes],
            inference_logprobs=[node.logprobs for node in nodes],
            scores=[float(len(choice.message.content or "")) for choice in completion.choices],
            generation_params={"temperature": 1.0},
        )
        return group, []

    async def evaluate(self, *args, **kwargs):
        completion = await self.server.chat_completion(
            messages=[{"role": "user", "content": ">07"}], n=1, max_tokens=6, temperature=0.0, split="eval"
        )
        await self.evaluate_log({"eval/length": len(completion.choices[0].message.content or "")})


if __name__ == "__main__":
    SingleTurnEnv.cli()
