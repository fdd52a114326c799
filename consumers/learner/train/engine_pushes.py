"""A thread that loads each version into the learner's engines while the learner waits for its next batch.

At most one push is in flight, and it ends before the segment changes again. So versions never go back, and an
engine finds the version it is asked to load. An engine's failure is printed and counted; training continues,
and ends if the failures last.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from shmbridge.consumers.engines.engine import Engine, EngineFailed, Pause, Update
from shmbridge.consumers.engines.fleet import Fleet
from shmbridge.consumers.learner.config.options import WeightsConfig
from shmbridge.consumers.learner.types import Metrics
from shmbridge.consumers.learner.world import World, say

_AT_LEAST = 2  # consecutive failures before training ends
_SHORTEST_S, _LONGEST_S = 10.0, 300.0  # timeout of one push
_GOODBYE_S = 1.0  # wait for a push in flight when the learner is stopped


@dataclass
class _Trouble:
    """Consecutive failures of one engine."""

    since: float
    count: int = 0
    said: str = ""


class EnginePushes:
    """Pushes versions one after the other. One thread calls it, and it owns its engines.

    Args:
        engines: may be empty; then every method does nothing.
        bridge: whose weights segment they read.
        pause: how to treat requests in flight.
        patience_s: how long an engine may fail, over consecutive pushes.
        say: prints a line for the user.
    """

    def __init__(
        self,
        engines: Sequence[Engine] = (),
        bridge: str = "",
        pause: Pause = "keep",
        patience_s: float = 600.0,
        say: Callable[[str], None] = say,
    ) -> None:
        self._fleet = Fleet(engines)
        self._bridge, self._pause, self._patience_s, self._say = bridge, pause, patience_s, say
        self._at: dict[str, int] = {}  # the last version each engine loaded
        self._trouble: dict[str, _Trouble] = {}
        self._failures_total = 0
        self._push_s = self._waited_s = 0.0
        self._thread: threading.Thread | None = None

    def begin(self, version: int) -> None:
        """Starts loading a version into the engines. Never blocks; call `settled` between two calls."""
        if self._fleet.engines:
            assert self._thread is None, "the push before is not settled"
            update = Update(
                self._bridge,
                version,
                self._pause,
                timeout_s=min(max(self._patience_s, _SHORTEST_S), _LONGEST_S),
            )
            self._thread = threading.Thread(
                target=self._push, args=(update,), name="engine-push", daemon=True
            )
            self._thread.start()

    def settled(self) -> None:
        """Waits for the push in flight. Raises `EngineFailed` if an engine has failed for too long."""
        if self._thread is None:
            return
        begun = time.monotonic()
        self._thread.join()
        self._thread = None
        self._waited_s += time.monotonic() - begun
        for address, trouble in self._trouble.items():
            lasted = time.monotonic() - trouble.since
            if trouble.count >= _AT_LEAST and lasted >= self._patience_s:
                raise EngineFailed(
                    f"{address} has taken none of the last {trouble.count} versions, in {lasted:.0f} s: "
                    f"{trouble.said}",
                    hint="start it again, then --resume; or raise --engine-patience",
                )

    def metrics(self) -> Metrics:
        """Returns metrics of the finished pushes; empty without engines. Never blocks."""
        if not self._fleet.engines:
            return {}
        waited, self._waited_s = self._waited_s, 0.0
        reached = [self._at.get(engine.address, -1) for engine in self._fleet.engines]
        return {
            "engines/version": min(reached),
            "engines/push_s": self._push_s,
            "engines/wait_s": waited,
            "engines/failures_total": self._failures_total,
        }

    def close(self, *, at_once: bool = False) -> None:
        """Closes the engines after the push in flight; `at_once` leaves it to other processes. Idempotent."""
        if self._thread is not None:
            self._thread.join(_GOODBYE_S if at_once else None)
            if self._thread.is_alive():
                return  # a daemon thread: it ends with the process
        self._fleet.close()

    def _push(self, update: Update) -> None:
        begun = time.monotonic()
        failed = self._fleet.update(update)
        self._push_s = time.monotonic() - begun
        for engine in self._fleet.engines:
            if (error := failed.get(engine.address)) is not None:
                self._note(engine.address, error, begun)
                continue
            self._at[engine.address] = update.version
            if (trouble := self._trouble.pop(engine.address, None)) is not None:
                self._say(
                    f"{engine.address} is at version {update.version}, after {trouble.count} that it did "
                    "not take"
                )

    def _note(self, address: str, error: EngineFailed, since: float) -> None:
        self._failures_total += 1
        trouble = self._trouble.setdefault(address, _Trouble(since))
        trouble.count += 1
        if (words := str(error)) != trouble.said:
            trouble.said = words
            self._say(f"an engine has old weights, training goes on: {words}")


@contextmanager
def engine_pushes(bridge: str, weights: WeightsConfig, world: World) -> Iterator[EnginePushes]:
    """Yields the pushes to the configured engines; only rank 0 has any."""
    engines = [AtUrl(url) for url in dict.fromkeys(weights.engine)] if world.is_main else []
    pushes = EnginePushes(engines, bridge, weights.pause, weights.engine_patience)
    try:
        yield pushes
    except BaseException:
        pushes.close(at_once=True)
        raise
    pushes.close()
