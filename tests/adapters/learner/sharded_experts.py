"""Run once per rank: a model of experts that are modules, each rank's tokens going to some of them, gets the
gradient of one rank.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor, nn

from shmbridge.consumers.learner.model.sharding import parallel_of, whole
from shmbridge.consumers.learner.world import World, joined

CPU = torch.device("cpu")


class Block(nn.Module):
    """Sends each token to the expert of its number, and says so beside its output."""

    def __init__(self, tupled: bool) -> None:
        super().__init__()
        self.tupled = tupled
        self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

    def forward(self, hidden: Tensor, tokens: Tensor) -> Any:
        out = torch.zeros_like(hidden)
        for number in tokens.unique().tolist():
            chosen = tokens == number
            out[chosen] = self.experts[number](hidden[chosen])
        return (out, tokens) if self.tupled else out


class Model(nn.Module):
    _no_split_modules = ("Block",)

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.first, self.second = Block(tupled=True), Block(tupled=False)
        self.embedding = nn.Embedding(4, 4)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embedding(tokens)
        out: Tensor = self.second(hidden + self.first(hidden, tokens)[0], tokens)
        return out.square()


def gradients(how: str, world: World) -> None:
    # rank 0 uses as many experts as rank 1, and others
    tokens = [torch.tensor([0, 1, 1]), torch.tensor([2, 0])]
    alone = Model()
    sum(alone(each).sum() for each in tokens).backward()
    own = Model()
    parallel = parallel_of(own, how, world, CPU)
    for _ in range(2):  # the second finds the first one ended
        own.zero_grad()
        for micro in parallel.rounds([tokens[world.rank]]):
            parallel.backward(parallel(lambda model, each: model(each).sum(), micro))
    for (name, expected), found in zip(alone.named_parameters(), own.parameters(), strict=True):
        wanted = torch.zeros_like(expected) if expected.grad is None else expected.grad
        torch.testing.assert_close(
            whole(found.grad), wanted, msg=lambda text, name=name: f"{how} {name}: {text}"
        )


if __name__ == "__main__":
    with joined("cpu", 30.0) as world:
        for how in sys.argv[1:]:
            gradients(how, world)
            print("equal:", how, flush=True)
