"""What the ends of a bridge's weights share, writer, part and reader: each takes part in the bridge until it
is closed.

Knows nothing of slots and tensors.
"""

from typing import ClassVar, Self

from shmbridge._ext.header import Control
from shmbridge._ext.versions import Versions
from shmbridge.config import check_bridge_name
from shmbridge.errors import Closed
from shmbridge.segments import membership
from shmbridge.segments.at_exit import at_exit
from shmbridge.segments.one_process import OneProcess


class WeightsEnd(OneProcess):
    """One end; a context manager.

    Its process' death, at any line, is its leaving: the kernel lets its locks go.
    """

    _called: ClassVar[str]  # in messages

    def __init__(self, bridge: str) -> None:
        self.bridge = check_bridge_name(bridge)
        self._control: Control | None = membership.open_control(bridge)
        self._versions: Versions | None = None  # the segment that is mapped
        self._no_exit_call = at_exit(self.close)

    def _require_open(self) -> None:
        if self._control is None or self._control.mapping.forked:
            raise Closed(f"this {self._called} is closed, or belongs to the parent process")

    @property
    def memory(self) -> memoryview | None:
        """All of the weights segment that is mapped, read-only, to register it with a device; None before
        there is one.

        Never blocks.

        Another segment may take its place: at a first version, and when another model is published.
        BufferError in a child of fork.
        """
        self._require_open()
        return None if self._versions is None else memoryview(self._versions.mapping).toreadonly()

    def _before_leaving(self) -> None:
        """What an end does before it leaves."""
        self._versions = None

    def close(self) -> None:
        """Leaves; the last version stays readable as long as anybody takes part in the bridge.

        Idempotent; nothing in a child of fork.
        """
        if self._control is None or self._control.mapping.forked:
            return
        self._before_leaving()
        self._no_exit_call()
        control, self._control = self._control, None
        membership.leave(control.mapping.fd, self.bridge)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
