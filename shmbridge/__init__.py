"""Rollouts from reinforcement-learning environments to a GPU learner on one node, through shared memory.

A `Producer` puts trajectory groups into its lane; the one `Consumer` of a bridge leases them in place,
batches them, and announces policy versions. Names are resolved on first use, so that importing the package
imports neither pyarrow nor zmq.
"""

import sys
from typing import TYPE_CHECKING, Any

from shmbridge.errors import ArchiveFull as ArchiveFull
from shmbridge.errors import ArchiveTaken as ArchiveTaken
from shmbridge.errors import ArchiveUnreadable as ArchiveUnreadable
from shmbridge.errors import ArchiveUnwritable as ArchiveUnwritable
from shmbridge.errors import BadArgument as BadArgument
from shmbridge.errors import BadBridgeName as BadBridgeName
from shmbridge.errors import BadConfig as BadConfig
from shmbridge.errors import BatchTooBig as BatchTooBig
from shmbridge.errors import BridgeDraining as BridgeDraining
from shmbridge.errors import ClaimOpen as ClaimOpen
from shmbridge.errors import Closed as Closed
from shmbridge.errors import ConsumerEmpty as ConsumerEmpty
from shmbridge.errors import ConsumerTaken as ConsumerTaken
from shmbridge.errors import FillingOver as FillingOver
from shmbridge.errors import InvalidRecord as InvalidRecord
from shmbridge.errors import IterationOver as IterationOver
from shmbridge.errors import LaneFull as LaneFull
from shmbridge.errors import LaneQuarantined as LaneQuarantined
from shmbridge.errors import LaneRefused as LaneRefused
from shmbridge.errors import LaneRemoved as LaneRemoved
from shmbridge.errors import LaunchFailed as LaunchFailed
from shmbridge.errors import LayoutMismatch as LayoutMismatch
from shmbridge.errors import LeaseReleased as LeaseReleased
from shmbridge.errors import NoColumn as NoColumn
from shmbridge.errors import NoConsumer as NoConsumer
from shmbridge.errors import NotAdmitted as NotAdmitted
from shmbridge.errors import NotReady as NotReady
from shmbridge.errors import NoWeight as NoWeight
from shmbridge.errors import ProcessLimit as ProcessLimit
from shmbridge.errors import QueueTaken as QueueTaken
from shmbridge.errors import RankTaken as RankTaken
from shmbridge.errors import RecordTooBig as RecordTooBig
from shmbridge.errors import RecordUnreadable as RecordUnreadable
from shmbridge.errors import RelayTaken as RelayTaken
from shmbridge.errors import SchemaMismatch as SchemaMismatch
from shmbridge.errors import ServesRanks as ServesRanks
from shmbridge.errors import ShmBridgeError as ShmBridgeError
from shmbridge.errors import ShmPermission as ShmPermission
from shmbridge.errors import ShmTooSmall as ShmTooSmall
from shmbridge.errors import ShmUnavailable as ShmUnavailable
from shmbridge.errors import UnknownEnvironment as UnknownEnvironment
from shmbridge.errors import UsedByTwoThreads as UsedByTwoThreads
from shmbridge.errors import WeightsBusy as WeightsBusy
from shmbridge.errors import WeightsMismatch as WeightsMismatch

if not sys.platform.startswith("linux"):
    raise ImportError(
        "shmbridge needs Linux: it waits on futexes and proves life by open-file-description locks"
    )

__version__ = "0.1.0"

if TYPE_CHECKING:
    import pyarrow as pa

    from shmbridge.batch import Batch as Batch
    from shmbridge.config import Run as Run
    from shmbridge.consumer import Consumer as Consumer
    from shmbridge.hub import Rank as Rank
    from shmbridge.producer import Producer as Producer
    from shmbridge.put import Ticket as Ticket
    from shmbridge.record import Record as Record
    from shmbridge.segments import BridgeInfo as BridgeInfo
    from shmbridge.segments import CleanReport as CleanReport
    from shmbridge.segments import clean as clean
    from shmbridge.segments import list_bridges as list_bridges

    TRAJECTORY_SCHEMA: pa.Schema

_HOMES = {
    "Batch": "batch",
    "BridgeInfo": "segments",
    "CleanReport": "segments",
    "Consumer": "consumer",
    "Producer": "producer",
    "Rank": "hub",
    "Record": "record",
    "Run": "config",
    "Ticket": "put",
    "clean": "segments",
    "list_bridges": "segments",
}
_ERRORS = [
    name for name, each in vars().items() if isinstance(each, type) and issubclass(each, ShmBridgeError)
]
__all__ = sorted([*_HOMES, *_ERRORS, "TRAJECTORY_SCHEMA"])


def __getattr__(name: str) -> Any:
    from importlib import import_module

    if name == "TRAJECTORY_SCHEMA":
        from shmbridge.schema import trajectory_schema

        value: Any = trajectory_schema()
    elif name in _HOMES:
        value = getattr(import_module(f"shmbridge.{_HOMES[name]}"), name)
    else:
        here = sys.modules[__name__]
        raise AttributeError(f"module 'shmbridge' has no attribute {name!r}", name=name, obj=here)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
