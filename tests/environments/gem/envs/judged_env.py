"""Asks a judge in `score`, through its own server, as upstream's humor_env does."""

from atroposlib.envs.base import APIServerConfig, BaseEnv, BaseEnvConfig, ScoredDataGroup


class AskingJudgeEnv(BaseEnv):
    """One joke, and its mark."""

    name = "asking_judge"

    @classmethod
    def config_init(cls):
        return BaseEnvConfig(group_size=8, use_wandb=False), [APIServerConfig(model_name="policy")]

    async def setup(self):
        pass

    async def get_next_item(self):
        return {"topic": "tests"}

    async def collect_trajectories(self, item):
        chat = [{"role": "user", "content": item["topic"]}]
        completion = await self.server.chat_completion(messages=chat, n=self.config.group_size, max_tokens=9)
        return await self.score([choice.message.content for choice in completion.choices]), []

    async def score(self, jokes):
        group = ScoredDataGroup(tokens=[], masks=[], scores=[])
        for joke in jokes:
            asked = [{"role": "user", "content": f"From 0 to 9? {joke}"}]
            judged = await self.server.chat_completion(messages=asked, n=1, max_tokens=2)
            tokens = self.tokenizer.encode(joke)
            group["tokens"].append(tokens)
            group["masks"].append(tokens)
            group["scores"].append(float(judged.choices[0].message.content))
        return group

    async def evaluate(self):
        pass
