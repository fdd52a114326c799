"""The thread of an actor: one step after another until it is stopped; and what it tells the directory."""

import threading
import time
from collections.abc import Callable
from typing import Any, Protocol

from shmbridge.relay.ray.directory import NAMESPACE, Placed, decode_placed, names

REPORT_S = 1.0


class Steps(Protocol):
    """What such an actor does. All but `report` run in its thread."""

    def step(self) -> None:
        """Does what there is to do; blocks a little while there is nothing."""

    def failed(self, wrong: Exception) -> None:
        """Notes that a step failed; the next one comes a second later."""

    def place(self, sources: dict[str, Placed]) -> None:
        """Takes where the sources are from now on."""

    def report(self) -> bytes:
        """Returns what is said to the directory."""

    def close(self) -> None:
        """Leaves the bridge."""


class ActorThread:
    """Runs the steps of an actor. Once a second it reports to the directory, and hears where the sources are.

    Args:
        name: of the thread.
        bridge: whose directory it is.
        exchange: the directory's method that takes the report.
        steps: the actor's.
    """

    def __init__(self, name: str, bridge: str, exchange: str, steps: Steps) -> None:
        self._bridge, self._exchange_by, self._steps = bridge, exchange, steps
        self._directory: Any = None
        self._exchange: Any = None
        self._reported_s = 0.0
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Begins: once the actor has all that its steps need."""
        self._thread.start()

    @property
    def stopping(self) -> bool:
        """Whether it is to end."""
        return self._ending.is_set()

    def wait(self, timeout_s: float) -> None:
        """Sleeps so long, or until it is to end. For its own thread."""
        self._ending.wait(timeout_s)

    def stop(self) -> None:
        """Ends the thread, which leaves the bridge; blocks until it has."""
        self._ending.set()
        self._thread.join()

    def _run(self) -> None:
        while not self.stopping:
            try:
                self._talk_to_directory()
                self._steps.step()
            except Exception as wrong:
                self._steps.failed(wrong)
                self.wait(REPORT_S)
        self._steps.close()

    def _talk_to_directory(self) -> None:
        """Reports once a second, and hears where the sources are; never waits for an answer."""
        import ray

        if self._exchange is not None:
            if not ray.wait([self._exchange], timeout=0)[0]:
                return
            answer, self._exchange = self._exchange, None
            try:
                raw = ray.get(answer)
                if raw is not None:
                    self._steps.place(decode_placed(raw))
            except ray.exceptions.RayError:
                self._directory = None
        now = time.monotonic()
        if now - self._reported_s < REPORT_S:
            return
        self._reported_s = now
        try:
            if self._directory is None:
                self._directory = ray.get_actor(names(self._bridge)[0], namespace=NAMESPACE)
        except ValueError:
            return
        call: Callable[[bytes], Any] = getattr(self._directory, self._exchange_by).remote
        self._exchange = call(self._steps.report())
