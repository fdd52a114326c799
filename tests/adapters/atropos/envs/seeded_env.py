"""An environment without a language model: every group is a pure function of its item's number.

Between them the items carry every field of a ScoredDataGroup, present, null, [] and {}, a list of groups, a
group of another size, masks that are more than a mask, rows of unequal lengths and unknown keys.

    python seeded_env.py serve --env.items 20
"""

import asyncio
import random
from pathlib import Path

from atroposlib.envs.base import APIServerConfig, BaseEnv, BaseEnvConfig
from pydantic import Field

GROUP_SIZE = 4
PER_TOKEN = ("advantages", "ref_logprobs", "inference_logprobs")


class SeededConfig(BaseEnvConfig):
    items: int = Field(default=-1, description="how many groups to make, -1: no end")
    collect_s: float = Field(default=0.0, description="how long a rollout takes")
    tokens: int = Field(default=12, description="longest row")
    evaluated: str = Field(default="", description="file that grows by a line per evaluation")
    cancelled: str = Field(
        default="", description="file that grows by a line per worker cancelled as it sends"
    )


def groups_of(item: int, longest: int = 12) -> dict | list[dict]:
    """Returns the groups that the environment sends for one item."""
    kind = item % 10
    if kind == 3:
        return [_group(item, part, longest) for part in range(2)]
    return _group(item, 0, longest)


def _group(item: int, part: int, longest: int) -> dict:
    rng = random.Random(item * 10 + part)
    kind = item % 10
    rows = 2 * GROUP_SIZE if kind == 4 else GROUP_SIZE
    tokens = [[item, part, *_ints(rng, rng.randint(6, longest - 2))] for _ in range(rows)]
    group = {
        "tokens": tokens,
        "masks": [[-100 if at < 3 else token for at, token in enumerate(row)] for row in tokens],
        "scores": [rng.gauss(0, 1) for _ in range(rows)],
    }
    for name in PER_TOKEN:
        group[name] = {1: None, 2: []}.get(kind) if kind in (1, 2) else _floats(rng, tokens)
    if kind == 0:
        group |= {
            "messages": [[{"role": "user", "content": f"question {item} é"}] for _ in tokens],
            "generation_params": {"temperature": 0.7, "stop": None},
            "overrides": [{"set_advantage_to_zero": bool(at)} for at in range(rows)],
            "group_overrides": {},
            "images": [None, ["a", "b"], "c", None],
        }
    if kind == 2:
        group |= {
            "messages": [],
            "overrides": [],
            "images": [],
            "group_overrides": {},
            "generation_params": {},
        }
    if kind == 4:
        group["group_overrides"] = {"group_size": rows, "note": "twice the size"}
    if kind == 5:
        group["masks"] = [[-100 if token % 3 else token + 1 for token in row] for row in tokens]
    if kind == 6:
        group["advantages"] = [row[:-2] for row in group["advantages"]]
        group["inference_logprobs"] = group["inference_logprobs"][:-1]
    if kind == 7:
        group |= {"seed": item, "parsed_actions": [["up", "down"]] * rows}
    if kind == 8:
        group["distill_token_ids"] = [[_ints(rng, 3) for _ in row] for row in tokens]
        group["distill_logprobs"] = [[[rng.gauss(-1, 1) for _ in range(3)] for _ in row] for row in tokens]
    return group


def _ints(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(1000) for _ in range(count)]


def _floats(rng: random.Random, tokens: list[list[int]]) -> list[list[float]]:
    return [[-abs(rng.gauss(-1, 1)) for _ in row] for row in tokens]


class SeededEnv(BaseEnv):
    name = "seeded"
    env_config_cls = SeededConfig

    @classmethod
    def config_init(cls):
        server = APIServerConfig(
            model_name="none", base_url="http://127.0.0.1:9/v1", api_key="x", health_check=False
        )
        return SeededConfig(group_size=GROUP_SIZE, use_wandb=False, steps_per_eval=0, total_steps=100000), [
            server
        ]

    async def setup(self):
        self.next_item = 0

    async def get_next_item(self):
        if self.next_item == self.config.items:
            return None
        self.next_item += 1
        return self.next_item - 1

    async def collect_trajectories(self, item):
        await asyncio.sleep(self.config.collect_s)
        return groups_of(item, self.config.tokens), []

    async def handle_send_to_api(self, *args, **kwargs):
        try:
            await super().handle_send_to_api(*args, **kwargs)
        except asyncio.CancelledError:
            _note(self.config.cancelled, "cancelled while sending")
            raise

    async def evaluate(self, *args, **kwargs):
        _note(self.config.evaluated, f"at step {self.curr_step}")


def _note(path: str, line: str) -> None:
    if path:
        with Path(path).open("a") as file:
            file.write(f"{line}\n")


if __name__ == "__main__":
    SeededEnv.cli()
