"""A thread that notices producers' deaths: at once through a pidfd, otherwise by probing their locks.

The pidfd only says when to check; the free lock is the proof. Owned by the consumer's lanes.
"""

import logging
import os
import select
from collections.abc import Callable

from shmbridge._ext.header import Mapping
from shmbridge.segments import locks
from shmbridge.segments.helper_threads import Joined
from shmbridge.segments.locks import LockByte

log = logging.getLogger(__name__)

_PROBE_MS = 500
_BUSY_MS = 50  # while a dead lane still waits to be removed


class DeathWatch:
    """Calls `on_death(name)` once per watched lane whose producer is gone, and `on_tick() -> bool` (returns
    whether anything is left to remove) regularly.

    Both run in the watch's own daemon thread. Methods may be called from any thread.
    """

    def __init__(self, on_death: Callable[[str], None], on_tick: Callable[[], bool]) -> None:
        self._on_death, self._on_tick = on_death, on_tick
        self._lanes: dict[str, tuple[Mapping, int]] = {}
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._stopping = False
        self._pid = os.getpid()
        self._thread = Joined(self._run, "shmbridge-deathwatch")
        try:
            self._thread.start()
        except BaseException:
            self.stop()
            raise

    def watch(self, name: str, lane: Mapping, pid: int, namespace: int) -> None:
        """Starts to watch a lane. Idempotent.

        Keeps the mapping until the producer's death was reported.
        """
        if name not in self._lanes:
            self._lanes[name] = (lane, locks.open_pidfd(pid, namespace))
        os.eventfd_write(self._wake, 1)

    def nudge(self) -> None:
        """Triggers the next tick now."""
        os.eventfd_write(self._wake, 1)

    def stop(self) -> None:
        """Ends the thread; blocks until it has ended. Does nothing in a child of fork."""
        if self._wake < 0 or os.getpid() != self._pid:
            return
        self._stopping = True
        os.eventfd_write(self._wake, 1)
        self._thread.join()
        # A repeat after an interrupt closes no descriptor twice: its number may be another file's by then.
        while self._lanes:
            _, (_, pidfd) = self._lanes.popitem()
            if pidfd >= 0:
                os.close(pidfd)
        wake, self._wake = self._wake, -1
        os.close(wake)

    def _run(self) -> None:
        timeout_ms = _PROBE_MS
        while not self._stopping:
            fired = self._sleep(timeout_ms)
            if self._stopping:
                return
            try:
                busy = self._look(fired)
            except Exception:
                # For example no descriptor left: it may work next time, and this is the only watch.
                log.exception("the death watch could not look round")
                busy = True
            timeout_ms = _BUSY_MS if busy else _PROBE_MS

    def _look(self, fired: set[int]) -> bool:
        """Checks all lanes once; returns whether to check again soon: a dead lane is left to be removed, or a
        pidfd was wrong.
        """
        wrong = False
        for name, (lane, pidfd) in list(self._lanes.items()):
            dead = not locks.is_locked(lane.fd, LockByte.PRODUCER)
            if dead:
                del self._lanes[name]
            elif pidfd in fired:  # a pidfd of another process than the lock's holder would fire for ever
                self._lanes[name] = (lane, -1)
                wrong = True
            if pidfd >= 0 and (dead or pidfd in fired):
                os.close(pidfd)
            if dead:
                self._on_death(name)
            del lane
        return self._on_tick() or wrong

    def _sleep(self, timeout_ms: int) -> set[int]:
        """Waits for a death or a nudge; returns the pidfds that fired."""
        poll = select.poll()
        poll.register(self._wake, select.POLLIN)
        for _, pidfd in list(self._lanes.values()):
            if pidfd >= 0:
                poll.register(pidfd, select.POLLIN)
        fired = {fd for fd, _ in poll.poll(timeout_ms)}
        if self._wake in fired:
            os.eventfd_read(self._wake)
        return fired
