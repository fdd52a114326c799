"""The errors of shmbridge, except those of the control plane: a code, a message with numbers, a hint with one
next action.

Each class also inherits the nearest builtin, so that `except TimeoutError` works as expected. A row per code:
docs/errors/README.md.
"""


class ShmBridgeError(Exception):
    """Base of all errors of shmbridge. `code` is stable; `hint` is one next action."""

    code = "SB000"

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"[{self.code}] {self.message}" + (f" -> {self.hint}" if self.hint else "")


class BadBridgeName(ShmBridgeError, ValueError):
    """A bridge name is not `[A-Za-z0-9_-]{1,48}`."""

    code = "SB100"


class ShmTooSmall(ShmBridgeError, MemoryError):
    """The shm mount or the memory cgroup cannot hold the requested size; nothing was left behind."""

    code = "SB101"


class ShmPermission(ShmBridgeError, PermissionError):
    """A segment belongs to another user."""

    code = "SB102"


class ProcessLimit(ShmBridgeError, OSError):
    """A limit of this process is too low: descriptors, address space, file size or threads."""

    code = "SB103"


class ShmUnavailable(ShmBridgeError, OSError):
    """The shm mount is not there, or this process may not write to it."""

    code = "SB104"


class NotReady(ShmBridgeError, TimeoutError):
    """A living process has been initialising a segment for too long."""

    code = "SB105"


class BadArgument(ShmBridgeError, ValueError, TypeError):
    """An argument has the wrong type or an unusable value; nothing was begun."""

    code = "SB106"


class LayoutMismatch(ShmBridgeError, ValueError):
    """The peer's segment has another layout version."""

    code = "SB201"


class SchemaMismatch(ShmBridgeError, ValueError):
    """A column has two types, a type that no lane can carry, or a name that stands for something else."""

    code = "SB202"


class RecordTooBig(ShmBridgeError, ValueError):
    """A record can never fit the lane; nothing was committed."""

    code = "SB203"


class InvalidRecord(ShmBridgeError, ValueError):
    """A record's values cannot be carried; nothing was committed.

    `column`, `row` and `position` say where.
    """

    code = "SB204"

    def __init__(
        self, message: str, *, hint: str = "", column: str = "", row: int = -1, position: int = -1
    ) -> None:
        super().__init__(message, hint=hint)
        self.column, self.row, self.position = column, row, position


class RecordUnreadable(ShmBridgeError, ValueError):
    """A committed record's column does not hold its type: text that is not UTF-8, or JSON that is none."""

    code = "SB205"


class LaneQuarantined(ShmBridgeError, RuntimeError):
    """The consumer no longer reads this lane, because its words cannot be true."""

    code = "SB206"


class LaneRemoved(ShmBridgeError, RuntimeError):
    """A lane or its control segment was removed by force; nothing was committed, no consumer can find it."""

    code = "SB207"


class NoColumn(ShmBridgeError, KeyError, AttributeError):
    """A column was asked for that a record, a batch or a claim does not have."""

    code = "SB208"


class LaneFull(ShmBridgeError, TimeoutError):
    """The lane had no room within the time allowed; nothing was committed."""

    code = "SB301"


class ConsumerEmpty(ShmBridgeError, TimeoutError):
    """No record came, or no batch could be formed, within the time allowed."""

    code = "SB302"


class LeaseReleased(ShmBridgeError, RuntimeError):
    """A record was read after release()."""

    code = "SB303"


class BatchTooBig(ShmBridgeError, ValueError):
    """A batch can never be filled, as its groups fill the lanes, or has more tokens than int32 can count."""

    code = "SB304"


class NotAdmitted(ShmBridgeError, TimeoutError):
    """A producer asked to begin a group while the most groups allowed were under way."""

    code = "SB305"


class ConsumerTaken(ShmBridgeError, RuntimeError):
    """The bridge has a living consumer."""

    code = "SB401"


class NoConsumer(ShmBridgeError, TimeoutError):
    """No consumer answered on the control plane within the time allowed."""

    code = "SB402"


class BridgeDraining(ShmBridgeError, RuntimeError):
    """The consumer is draining the bridge and takes no new records; nothing was committed."""

    code = "SB403"


class ClaimOpen(ShmBridgeError, RuntimeError):
    """A producer was used while its claim is open, or a claim after it was over."""

    code = "SB404"


class Closed(ShmBridgeError, RuntimeError):
    """The object was closed, or belongs to the process before a fork."""

    code = "SB405"


class RankTaken(ShmBridgeError, RuntimeError):
    """A living process is that rank of the bridge already."""

    code = "SB408"


class ServesRanks(ShmBridgeError, RuntimeError):
    """A consumer that deals batches out to learner ranks was asked for records itself."""

    code = "SB409"


class UnknownEnvironment(ShmBridgeError, ValueError):
    """An environment was named that has not registered."""

    code = "SB410"


class NoWeight(ShmBridgeError, ValueError):
    """An environment asked for its part of the weight, and no connected environment has any."""

    code = "SB411"


class UsedByTwoThreads(ShmBridgeError, RuntimeError):
    """A producer or a consumer was used by two threads at once; only looked for under SHMBRIDGE_DEBUG=1."""

    code = "SB413"


class IterationOver(ShmBridgeError, RuntimeError):
    """Another iteration, or take_groups, has taken over the batches of the same consumer: this one ended."""

    code = "SB414"


class QueueTaken(ShmBridgeError, RuntimeError):
    """The bridge keeps the values of a living TransferQueue."""

    code = "SB415"


class RelayTaken(ShmBridgeError, RuntimeError):
    """A living relay puts records of other nodes into the bridge."""

    code = "SB416"


class LaneRefused(ShmBridgeError, RuntimeError):
    """The consumer will not read this lane; it has said why."""

    code = "SB417"


class WeightsMismatch(ShmBridgeError, ValueError):
    """The tensors do not have the names, types or shapes of the weights segment; or a value is not finite."""

    code = "SB501"


class WeightsBusy(ShmBridgeError, TimeoutError):
    """A reader held the slot to write for too long, or a shard of an earlier filling is being written."""

    code = "SB502"


class FillingOver(ShmBridgeError, RuntimeError):
    """A tensor was written for a filling of the weights that is over, whose writer is dead or was reused."""

    code = "SB503"


class BadConfig(ShmBridgeError, ValueError):
    """A file of `shmbridge launch`, a reward config or a server's setting asks for what cannot be; nothing
    started.
    """

    code = "SB601"


class LaunchFailed(ShmBridgeError, RuntimeError):
    """A launched run cannot start, or cannot go on; the message names the process and its log."""

    code = "SB602"


class ArchiveFull(ShmBridgeError, OSError):
    """The disk of an archive has no room; the records that were to be written stay un-released."""

    code = "SB701"


class ArchiveTaken(ShmBridgeError, RuntimeError):
    """A living recorder writes to the folder."""

    code = "SB702"


class ArchiveUnreadable(ShmBridgeError, ValueError):
    """A folder holds no archive, or a file in it is none of ours."""

    code = "SB703"


class ArchiveUnwritable(ShmBridgeError, OSError):
    """A file or folder of an archive cannot be written, or was removed while it was written."""

    code = "SB704"
