"""The base of writer, shard writer and reader of a bridge's weights: each is a participant until it is
closed.
"""

from typing import ClassVar, Self

from shmbridge._ext.header import Control
from shmbridge._ext.weights import Versions
from shmbridge.config import check_bridge_name
from shmbridge.errors import Closed
from shmbridge.segments import OneProcess, at_exit, leave_bridge, open_control


class WeightsEnd(OneProcess):
    """One end; a context manager.

    If its process dies, at any line, the end has left: the kernel drops its locks.
    """

    _called: ClassVar[str]  # in messages

    def __init__(self, bridge: str) -> None:
        self.bridge = check_bridge_name(bridge)
        self._control: Control | None = open_control(bridge)
        self._versions: Versions | None = None  # the segment that is mapped
        self._no_exit_call = at_exit(self.close)

    def _require_open(self) -> None:
        if self._control is None or self._control.mapping.forked:
            raise Closed(f"this {self._called} is closed, or belongs to the parent process")

    @property
    def memory(self) -> memoryview | None:
        """Returns the mapped weights segment, whole and read-only, to register it with a device; None before
        there is one.

        Never blocks.

        Another segment may replace it: at a first version, and when another model is published.
        BufferError in a child of fork.
        """
        self._require_open()
        return None if self._versions is None else memoryview(self._versions.mapping).toreadonly()

    @property
    def policy_version(self) -> int:
        """The bridge's published policy version; -1 before the first. Never blocks."""
        self._require_open()
        assert self._control is not None
        return int(self._control.policy_version)

    def __repr__(self) -> str:
        if self._control is None:
            state = "closed"
        elif self._control.mapping.forked:
            state = "of the process before fork"
        else:
            latest = self._versions.latest if self._versions is not None else None
            state = "no version yet" if latest is None else f"version {int(latest[0])}"
        return f"<{type(self).__name__} of {self.bridge!r}: {state}>"

    def _before_leaving(self) -> None:
        """Does an end's own work before it leaves."""
        self._versions = None

    def close(self) -> None:
        """Leaves; the last version stays readable while the bridge has a participant.

        Idempotent; does nothing in a child of fork.
        """
        if self._control is None or self._control.mapping.forked:
            return
        self._before_leaving()
        self._no_exit_call()
        control, self._control = self._control, None
        leave_bridge(control.mapping.fd, self.bridge)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
