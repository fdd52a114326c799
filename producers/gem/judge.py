"""Tells a judge's completions from the policy's turns: `tell_apart`, and the `Judge` that answers them."""

from __future__ import annotations

import contextvars
import functools
import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from shmbridge.errors import BadArgument

# Whether a completion that is asked for now is a judge's; tasks that an environment makes inherit it.
JUDGING: contextvars.ContextVar[str | None] = contextvars.ContextVar("shmbridge_gem_judging", default=None)

HINT = "judge={'base_url': URL, 'model_name': NAME} answers it"


def tell_apart(env: Any, names: Sequence[str] | None) -> None:
    """Marks what the methods of one environment object ask as a judge's. Never blocks.

    Args:
        env: the environment; its class is not changed.
        names: of the methods; None: `score`, and each of the environment's own whose name has "judge" in it.

    Raises:
        BadArgument: it has no such method.
    """
    for name in _judges(type(env)) if names is None else names:
        method = getattr(env, name, None)
        if not inspect.iscoroutinefunction(method):
            raise BadArgument(
                f"{type(env).__name__} has no coroutine method {name}", hint="judge_calls=(method names)"
            )
        setattr(env, name, _judging(method, name))


def _judges(kind: type[Any]) -> list[str]:
    from atroposlib.envs.base import BaseEnv

    own = {
        name for each in kind.__mro__ if each not in BaseEnv.__mro__ for name, value in vars(each).items()
        if inspect.iscoroutinefunction(value)
    }  # fmt: skip
    return sorted(name for name in own if name == "score" or "judge" in name.lower())


def _judging(method: Any, name: str) -> Any:
    @functools.wraps(method)
    async def asked(*args: Any, **kwargs: Any) -> Any:
        before = JUDGING.set(name)
        try:
            return await method(*args, **kwargs)
        finally:
            JUDGING.reset(before)

    return asked


class Judge:
    """A model that answers a judge's completions: any server of Atropos' own client.

    Args:
        config: fields of atroposlib's `APIServerConfig`: `base_url`, `model_name`, `api_key` and others.

    Raises:
        BadArgument: no such field.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        from atroposlib.envs.server_handling.server_baseline import APIServerConfig

        unknown = sorted(set(config) - set(APIServerConfig.model_fields))
        if unknown or not config.get("base_url") or not config.get("model_name"):
            raise BadArgument(
                f"judge={dict(config)!r} is no server: "
                + (f"no field {unknown}" if unknown else "no address"),
                hint="judge={'base_url': 'http://127.0.0.1:8000/v1', 'model_name': NAME}",
            )
        self._config = APIServerConfig(**{"api_key": "x", "health_check": False, **config})
        self._server: Any = None

    @property
    def server(self) -> Any:
        """Atropos' own client of it; made at first use, in the event loop where it is used."""
        if self._server is None:
            from atroposlib.envs.server_handling.server_manager import ServerManager

            self._server = ServerManager([self._config], slurm=False, testing=False)
        return self._server
