"""Begins the environments of one group in the same state: `begin_alike`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from shmbridge.producers.gem.errors import EnvFailed, GroupNotAlike
from shmbridge.producers.gem.process_random import PROCESS_RANDOM

Alike = Literal["auto", "spawn", "reset"]

T = TypeVar("T")

_HINT = "its row is left out; fix the environment"


@dataclass(frozen=True)
class Begun:
    """An environment at the beginning of an episode."""

    env: Any
    observation: Any
    info: dict[str, Any]


def begin_alike(
    make: Callable[[], Any],
    size: int,
    seed: int,
    how: Alike = "auto",
    allow_unequal: bool = False,
    like: Begun | None = None,
) -> list[Begun]:
    """Returns `size` environments that begin alike. Blocks while they are made and reset; any thread.

    Args:
        make: returns an environment that may be reset.
        seed: of `reset`.
        how: "spawn": the first is reset, the others are `spawn(same_state=True)` of it; "reset": each is
            reset with the seed; "auto": spawned if the environment can.
        allow_unequal: take environments whose first observations differ.
        like: one that began before, with the same seed; None: these are the first of the group.

    Raises:
        GroupNotAlike: the first observations differ.
        EnvFailed: `reset` returned something else.
        Exception: what the environment raises; those begun so far are closed.
    """
    begun: list[Begun] = []
    try:
        begun.append(_reset(make(), seed))
        while True:
            first, other = (like or begun[0]).observation, begun[-1].observation
            if first != other and not allow_unequal:
                raise GroupNotAlike(
                    f"seed {seed} begins with {first!r:.300}, and with {other!r:.300}",
                    hint="the environment must begin alike for the same seed, or have spawn(same_state=True)",
                )
            if len(begun) == size:
                return begun
            begun.append(_another(make, begun[0], seed, how))
    except BaseException:
        for each in begun:
            close(each.env)
        raise


def contained(name: str, call: Callable[[], T]) -> T:
    """Returns what a call of an environment gives; makes an EnvFailed of what an event loop would not
    survive: SystemExit, StopIteration and the like.
    """
    try:
        return call()
    except BaseException as error:
        if isinstance(error, Exception) and not isinstance(error, StopIteration):
            raise
        raise EnvFailed(f"{name} of the environment ended with {error!r}", hint=_HINT) from error


@contextmanager
def turn_to_draw(env: Any, seeds: bool = False) -> Iterator[None]:
    """Within the block the environment may draw from the process's random numbers, or seed them."""
    if not getattr(type(env), "uses_process_random", True):
        turn: Any = nullcontext()
    else:
        turn = PROCESS_RANDOM.alone() if seeds else PROCESS_RANDOM.shared()
    with turn:
        yield


def close(env: Any) -> None:
    """Closes an environment that can be closed; what it raises then is lost."""
    with suppress(Exception):
        getattr(env, "close", lambda: None)()


def _reset(env: Any, seed: int) -> Begun:
    try:
        with turn_to_draw(env, seeds=True):
            said = env.reset(seed=seed)
        if not isinstance(said, (tuple, list)) or len(said) != 2:
            raise EnvFailed(f"reset returned {said!r:.120}, not an observation and a dict", hint=_HINT)
        return Begun(env, said[0], said[1] or {})
    except BaseException:
        close(env)
        raise


def _another(make: Callable[[], Any], first: Begun, seed: int, how: Alike) -> Begun:
    if how != "reset":
        try:
            with turn_to_draw(first.env, seeds=True):
                return Begun(first.env.spawn(same_state=True), first.observation, dict(first.info))
        except NotImplementedError:
            if how == "spawn":
                raise
    return _reset(make(), seed)
