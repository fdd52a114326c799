"""Two turns over the chat interface, tokenised afterwards with the chat template; every rollout by itself,
put together by BaseEnv.

With `tools`, what comes between the turns is a tool's answer. With `scripted`, there is no server: answers
are a function of the item.
"""

import itertools

from atroposlib.envs.base import APIServerConfig, BaseEnv, BaseEnvConfig, ScoredDataItem
from atroposlib.utils.tokenize_for_trainer import tokenize_for_trainer
from pydantic import Field


class MultiTurnConfig(BaseEnvConfig):
    tools: bool = Field(default=False, description="the second question is a tool's answer")
    scripted: bool = Field(default=False, description="no server")


class MultiTurnEnv(BaseEnv):
    name = "multi"
    env_config_cls = MultiTurnConfig

    @classmethod
    def config_init(cls):
        config = MultiTurnConfig(
            group_size=4,
            max_token_length=6,
            total_steps=100000,
            steps_per_eval=0,
            use_wandb=False,
            ensure_scores_are_not_same=False,
            include_messages=True,
        )
        return config, [
            APIServerConfig(
                model_name="policy", base_url="http://127.0.0.1:9/v1", api_key="x", health_check=False
            )
        ]

    async def setup(self):
        self.items, self.rollouts = itertools.count(), itertools.count()

    async def get_next_item(self):
        return next(self.items)

    async def answer(self, chat):
        if self.config.scripted:
            return f"{next(self.rollouts) % 10}{len(chat)}"
        completion = await self.server.chat_completion(messages=chat, n=1, max_tokens=6, temperature=1.0)
        return completion.choices[0].message.content or ""

    async def collect_trajectory(self, item):
        chat = [{"role": "user", "content": f">{item % 100:02}"}]
        chat.append({"role": "assistant", "content": await self.answer(chat)})
        if self.config.tools:
            chat[-1]["tool_calls"] = [
                {
                    "id": "call_1",
                    "type": "function",
                    "function": {"name": "larger", "arguments": '{"of": "07"}'},
                }
            ]
            chat.append({"role": "tool", "tool_call_id": "call_1", "name": "larger", "content": "7"})
        else:
            chat.append({"role": "user", "content": "?"})
        chat.append({"role": "assistant", "content": await self.answer(chat), "reward": 0.5})
        row = tokenize_for_trainer(
            self.tokenizer, chat, include_messages=True, train_on_all_assistant_turns=True
        )
        score = float(sum(token != -100 for token in row["masks"]))
        return ScoredDataItem(**row, scores=score, advantages=None, overrides={"weight": 1.5}), []

    async def evaluate(self, *args, **kwargs):
        pass


if __name__ == "__main__":
    MultiTurnEnv.cli()
