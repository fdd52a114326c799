"""Runs any environment written for Atropos 0.4 on a bridge, unedited.

    python -m shmbridge.producers.atropos --bridge run1 path/to/env.py serve --env.group_size 8

The script runs as `python path/to/env.py serve ...` would; `BaseEnv`'s traffic with the rollout server takes
the bridge instead: scored groups go into a lane, registration and status over the control plane. All else in
BaseEnv (filters, throttling, evaluation, checkpoints, when to end) is untouched. The policy versions in
inference servers' responses are recorded, too.

`attach` is for programs that make their environments themselves; __main__.py is the command line. patches.py
replaces methods of BaseEnv, control_link.py connects one environment to the bridge, lane.py puts its groups,
with their rewards. versions.py records responses, and matches them with groups.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shmbridge.config import check_bridge_name, parse_size
from shmbridge.producers.atropos.lane import LinkOptions, OnFull, Rewards, checked_rewards
from shmbridge.producers.atropos.patches import Attachments, Departure

_attachments: Attachments | None = None


def attach(
    env: Any = None,
    *,
    bridge: str,
    lane_bytes: int | str = "64M",
    on_full: OnFull = "block",
    step_rewards: bool = False,
    stop_after_refusals: int = 20,
    tickets: bool = False,
    rewards: Rewards | Mapping[str, Any] | str | Path | None = None,
) -> None:
    """Sends the traffic of environments over a bridge, from now until `detach`.

    Blocks while atroposlib is imported. Call it before the environment runs. One class at a time, and any
    number of instances, each with a bridge of its own choice; an instance's wins over its class'.

    Args:
        env: an environment; or a subclass of `BaseEnv`, for all of its kind; None: all environments.
        bridge: name of the bridge.
        lane_bytes: size of each environment's lane.
        on_full: what happens to a group when the lane is full: "block" waits, "raise" and "drop" count it.
        step_rewards: fill the columns step_rewards and step_ends from what groups and their messages say.
        stop_after_refusals: so many groups refused in a row for one reason end the environment, with
            GroupsRefused; 0: never.
        tickets: a worker begins only once the consumer has room for its group: see
            Consumer(max_off_policy_steps=).
        rewards: what groups' scores become, a `RewardConfig`, a mapping, or a YAML file; or a `Stage`, such
            as `StepRewards`: see `shmbridge.producers.rewards`. The environment's tokenizer decodes text.

    Raises:
        ImportError: atroposlib is missing or broken.
        RuntimeError: a class, or this instance, is attached already.
        TypeError: `env` is not an environment.
        BadBridgeName, BadConfig, ValueError: an argument is not what it should be.
    """
    options = LinkOptions(
        check_bridge_name(bridge),
        parse_size(lane_bytes),
        on_full,
        step_rewards,
        stop_after_refusals,
        tickets,
        checked_rewards(rewards),
    )
    attachments = _all()
    if env is None or isinstance(env, type):
        attachments.attach_class(env, options)
    elif hasattr(env, "env_manager"):
        attachments.attach_instance(env, options)
    else:
        raise TypeError(
            f"a {type(env).__name__} is no environment: pass a BaseEnv, a subclass of it, or None"
        )


def detach(env: Any = None) -> Departure:
    """Undoes `attach`: the environment behaves as upstream again, at once. Never blocks.

    Detach a running instance in its own event loop: then its lane gets the groups it has handed over, and is
    left; await the result to know when. Environments of a detached class, those that run and those to come,
    ask the rollout server from now on; the lane of one that runs is left when it ends. Detaching an
    environment that is not attached does nothing.

    Args:
        env: the attached environment or class; None: everything.

    Raises:
        RuntimeError: the environment's event loop runs, and in another thread.
    """
    if _attachments is None:
        return Departure()
    if env is None:
        return _attachments.detach_all()
    if isinstance(env, type):
        if env is _attachments.attached_class:
            _attachments.detach_class()
        return Departure()
    return _attachments.detach_instance(env)


def _all() -> Attachments:
    global _attachments
    if _attachments is None:
        from atroposlib.envs import base  # seconds of imports

        _attachments = Attachments(base)
    return _attachments
