"""As upstream's with math_verify: sets an alarm for each answer, and drops groups of equal scores."""

import asyncio
import os
import signal
import threading
import time
from concurrent.futures import ProcessPoolExecutor

from atroposlib.envs.base import APIServerConfig, BaseEnv, BaseEnvConfig, ScoredDataGroup


class AlarmEnv(BaseEnv):
    """Right is the item's number; it says where it ran."""

    name = "alarm"

    @classmethod
    def config_init(cls):
        server = APIServerConfig(model_name="policy", base_url="http://127.0.0.1:9/v1", api_key="x")
        return BaseEnvConfig(group_size=8, use_wandb=False), [server]

    async def setup(self):
        self.number = 0

    async def get_next_item(self):
        self.number += 1
        return {"number": self.number}

    async def evaluate(self, *args, **kwargs):
        pass

    async def collect_trajectories(self, item):
        async with self.server.managed_server(tokenizer=self.tokenizer) as managed:
            completion = await managed.chat_completion(
                messages=[{"role": "user", "content": f"say {item['number']}"}],
                n=self.config.group_size,
                max_tokens=9,
            )
            nodes = managed.get_state()["nodes"]
        group = ScoredDataGroup(tokens=[], masks=[], scores=[], inference_logprobs=[])
        for choice, node in zip(completion.choices, nodes, strict=True):
            group["tokens"].append(node.tokens)
            group["masks"].append(node.masked_tokens)
            group["inference_logprobs"].append(node.logprobs)
            group["scores"].append(timed(lambda said=choice.message.content: compare(said, item["number"])))
        if len(set(group["scores"])) == 1:
            return None, []
        return group, []


def compare(said, number):
    if said == "block":
        time.sleep(60)
    if said == "raise":
        raise KeyError("the environment broke")
    return 1.0 if said == str(number) else -1.0


def timed(call):
    assert threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGALRM, lambda *_: None)
    signal.alarm(5)
    try:
        return call()
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


class PoolEnv(AlarmEnv):
    """Scores in a pool of processes, as upstream's math_server does, and never shuts it down."""

    name = "pool"

    async def setup(self):
        await super().setup()
        self.pool = ProcessPoolExecutor(2)

    async def get_next_item(self):
        loop = asyncio.get_running_loop()
        pids = await asyncio.gather(*(loop.run_in_executor(self.pool, os.getpid) for _ in range(4)))
        item = await super().get_next_item()
        return {"number": f"{','.join(map(str, sorted(set(pids))))} {item['number']}"}
