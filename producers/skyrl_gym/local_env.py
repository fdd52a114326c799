"""Makes SkyRL-Gym environments in this process: `made_here`, and what must be there before."""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Mapping
from typing import Any

from shmbridge.producers.skyrl_gym.errors import BadTask


def made_here(env_class: str, extras: dict[str, Any], env_config: Mapping[str, Any] | None = None) -> Any:
    """Returns an environment that `skyrl_gym` knows. Blocks as long as it takes to be made.

    Args:
        env_class: name that it is registered under.
        extras: of its task.
        env_config: settings of the environment class, which reads them as attributes.
    """
    import skyrl_gym

    config: Any = {}
    if env_config:
        from omegaconf import OmegaConf

        config = OmegaConf.create(dict(env_config))
    return skyrl_gym.make(env_class, env_config=config, extras=extras)


def check_registered(env_classes: Iterable[str], modules: Iterable[str] = ()) -> None:
    """Imports modules that register environments, and checks that all of `env_classes` are known then.

    Raises:
        BadTask: a module cannot be imported, or an environment is not registered.
    """
    wanted = [*modules, "skyrl_gym"]
    for name in wanted:
        try:
            importlib.import_module(name)
        except ImportError as error:
            raise BadTask(f"{name} cannot be imported: {error}", hint=_hint(error)) from error
    from skyrl_gym.envs.registration import registry

    for name in sorted(set(env_classes) - set(registry)):
        raise BadTask(
            f"no environment {name!r} is registered; there are {', '.join(sorted(registry))}",
            hint="import the module that registers it: --import",
        )


def _hint(error: ImportError) -> str:
    return "pip install 'shmbridge[skyrl-gym]'" if error.name == "skyrl_gym" else "is it on PYTHONPATH?"
