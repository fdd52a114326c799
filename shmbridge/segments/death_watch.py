"""A thread that learns of producers' deaths: at once where a pidfd can tell, by probing their locks
otherwise.

The pidfd only says when to look; the free lock is the proof. Knows descriptors; knows nothing of lanes'
contents. Owned by the consumer.
"""

import logging
import os
import select
from collections.abc import Callable

from shmbridge._ext.mapping import Mapping
from shmbridge.segments import locks
from shmbridge.segments.helper_threads import Joined
from shmbridge.segments.locks import LockByte

log = logging.getLogger(__name__)

_PROBE_MS = 500
_BUSY_MS = 50  # while something dead still waits to be removed


class DeathWatch:
    """Calls `on_death(name)` once per watched lane whose producer is gone, and `on_tick() -> bool` (is
    anything left to remove?) regularly.

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
        """Begins to watch a lane. Idempotent.

        The mapping is kept until the producer's death has been told.
        """
        if name not in self._lanes:
            self._lanes[name] = (lane, locks.open_pidfd(pid, namespace))
        os.eventfd_write(self._wake, 1)

    def nudge(self) -> None:
        """Makes the next tick come now."""
        os.eventfd_write(self._wake, 1)

    def stop(self) -> None:
        """Ends the thread; blocks until it has ended. Does nothing in a child of fork."""
        if self._wake < 0 or os.getpid() != self._pid:
            return
        self._stopping = True
        os.eventfd_write(self._wake, 1)
        self._thread.join()
        # called again after an interrupt, it closes none twice: the number is another's by then
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
                # such as no descriptor left: it may be better next time, and nobody else watches
                log.exception("the death watch could not look round")
                busy = True
            timeout_ms = _BUSY_MS if busy else _PROBE_MS

    def _look(self, fired: set[int]) -> bool:
        """One round over all lanes; whether to look again soon: something dead is left to be removed, or a
        pidfd was wrong.
        """
        wrong = False
        for name, (lane, pidfd) in list(self._lanes.items()):
            dead = not locks.is_locked(lane.fd, LockByte.PRODUCER)
            if dead:
                del self._lanes[name]
            elif pidfd in fired:  # of another process than the lock's holder: it would fire for ever
                self._lanes[name] = (lane, -1)
                wrong = True
            if pidfd >= 0 and (dead or pidfd in fired):
                os.close(pidfd)
            if dead:
                self._on_death(name)
            del lane
        return self._on_tick() or wrong

    def _sleep(self, timeout_ms: int) -> set[int]:
        """Waits for a death or a nudge; the pidfds that fired."""
        poll = select.poll()
        poll.register(self._wake, select.POLLIN)
        for _, pidfd in list(self._lanes.values()):
            if pidfd >= 0:
                poll.register(pidfd, select.POLLIN)
        fired = {fd for fd, _ in poll.poll(timeout_ms)}
        if self._wake in fired:
            os.eventfd_read(self._wake)
        return fired
