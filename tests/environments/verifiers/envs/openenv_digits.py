"""An OpenEnv server: each step wants a digit that is larger than the one shown; it ends after two.

python -m openenv_digits      prints its address, on a free port of this host
"""

from __future__ import annotations

import socket
from typing import Any

import uvicorn
from openenv.core.env_server import Action, Environment, Observation, State, create_app


class Said(Action):
    text: str | int | float  # verifiers makes a number of an answer that is one


class Digit(Observation):
    digit: int


class Digits(Environment[Said, Digit, State]):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self._state, self._digit = State(episode_id="", step_count=0), 0

    def reset(self, seed: int | None = None, episode_id: str | None = None, **more: Any) -> Digit:
        self._state, self._digit = State(episode_id=episode_id or "", step_count=0), (seed or 0) % 9
        return Digit(digit=self._digit, done=False, reward=0.0)

    def step(self, action: Said, timeout_s: float | None = None, **more: Any) -> Digit:
        self._state.step_count += 1
        said = str(action.text)[:1]
        right = said.isdigit() and int(said) > self._digit
        return Digit(digit=self._digit, done=self._state.step_count == 2, reward=float(right))

    @property
    def state(self) -> State:
        return self._state


if __name__ == "__main__":
    with socket.create_server(("127.0.0.1", 0)) as listening:
        print(f"http://127.0.0.1:{listening.getsockname()[1]}", flush=True)
        application = create_app(Digits, Said, Digit, env_name="digits", max_concurrent_envs=64)
        server = uvicorn.Server(uvicorn.Config(application, log_level="warning"))
        server.run(sockets=[listening])
