"""When a dead process may start again. Pure arithmetic over a clock that the caller reads."""

from collections import deque

from shmbridge.launch.config import Restart


class Backoff:
    """The restart delays of one process: they double, and the number of restarts is limited.

    Args:
        rule: the config's restart rule.
    """

    def __init__(self, rule: Restart) -> None:
        self._rule = rule
        self._next_delay = rule.first_delay
        self._restarts: deque[float] = deque()

    def after(self, *, started: float, ended: float) -> float | None:
        """Returns the seconds until it may start again; None: it has been restarted `max_restarts` times
        within the window.
        """
        rule = self._rule
        while self._restarts and self._restarts[0] <= ended - rule.window:
            self._restarts.popleft()
        if len(self._restarts) >= rule.max_restarts:
            return None
        self._restarts.append(ended)
        if ended - started >= rule.reset_after:
            self._next_delay = rule.first_delay
        delay = min(self._next_delay, rule.max_delay)
        self._next_delay = min(2 * delay, rule.max_delay)
        return delay
