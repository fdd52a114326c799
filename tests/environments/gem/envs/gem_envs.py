"""gem environments of tests, registered on import."""

import random
import time

import gem


class Echo(gem.Env):
    """Says a seeded number; rewards each answer with its length; ends after `turns`."""

    closed = 0

    def __init__(self, turns=2, breaks=False, ignores_seed=False, fails_in="", sleeps=0.0, **_):
        self.turns, self.breaks, self.ignores_seed = turns, breaks, ignores_seed
        self.sleeps = sleeps
        self.fails_in, self.failure = fails_in, None  # what to raise if it is an exception, else to return

    def reset(self, seed=None):
        super().reset(seed)
        if self.fails_in == "reset":
            return self.failed()
        self.turn = 0
        self.number = random.SystemRandom().random() if self.ignores_seed else random.random()
        return f"number {self.number}", {"suffix": "Go."}

    def step(self, action):
        if self.breaks:
            raise KeyError("the environment broke")
        if self.fails_in == "step":
            return self.failed()
        self.turn += 1
        if self.sleeps:
            print("asleep", flush=True)
            time.sleep(self.sleeps)
        return f"again {self.turn}", len(action) / 8, self.turn == self.turns, False, {"suffix": "Go."}

    def failed(self):
        if isinstance(self.failure, BaseException):
            raise self.failure
        return self.failure

    def close(self):
        type(self).closed += 1


class Spawned(Echo):
    """Has a secret that no seed tells; copies have it."""

    def reset(self, seed=None):
        observation, info = super().reset(seed)
        self.secret = random.SystemRandom().random()
        return observation, info

    def spawn(self, same_state=False, **kwargs):
        child = type(self)(self.turns)
        child.turn, child.number, child.secret = self.turn, self.number, self.secret
        return child


gem.register("test:Echo", Echo)
gem.register("test:Spawned", Spawned)
