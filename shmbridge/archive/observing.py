"""Records a bridge from outside, beside its consumer: slows nobody, and says what it came too late for."""

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from shmbridge.archive.recorder import Recorder
from shmbridge.errors import BadArgument
from shmbridge.watch import spare_cpu
from shmbridge.watch.observer import Observer

_LOOK_S = 0.2


@dataclass
class Observed:
    """What became of the records of a bridge while it was observed."""

    recorded: int = 0
    missed: int = 0  # released before their copy was whole
    missed_lanes: int = 0  # that came and went before they could be opened
    skipped: int = 0  # for want of room on the disk
    again: int = 0  # in the folder already
    unreadable: int = 0
    reached: dict[str, int] = field(default_factory=dict)  # last sequence of each producer in the folder
    unreadable_lanes: dict[str, str] = field(default_factory=dict)  # and why
    finished_left: list[str] = field(default_factory=list)  # parts that a killed recorder had left


def observe(
    bridge: str,
    recorder: Recorder,
    *,
    limit: int | None = None,
    stopped: Callable[[], bool] = lambda: False,
    seconds: float | None = None,
) -> Observed:
    """Records copies of a bridge's records until `stopped()`, and closes the recorder.

    Waits for a bridge that does not exist yet. Copies in a thread that gives way to other processes once it
    has recorded what there is at first; the end of it all does not.

    Args:
        bridge: name of the bridge.
        recorder: where they are written; closed at the end.
        limit: end after so many records; None: no limit.
        stopped: asked several times a second.
        seconds: end after this time.

    Raises:
        BadArgument: no record or no time. BadBridgeName; as Recorder.take.
    """
    with recorder:
        if limit is not None and limit < 1:
            raise BadArgument(f"limit={limit} records are none", hint="give a number from 1, or no limit")
        if seconds is not None and not seconds >= 0:
            raise BadArgument(f"seconds={seconds} is no time", hint="give seconds from 0, or none")
        until_s = float("inf") if seconds is None else time.monotonic() + seconds
        over = threading.Event()

        def copy() -> None:
            has_given_way = False
            while not (over.is_set() or stopped()) and time.monotonic() < until_s:
                left = 256 if limit is None else min(256, limit - int(recorder.stats()["recorded_total"]))
                if left <= 0:
                    break
                records = observer.poll(left)
                if records:
                    recorder.take(records)
                    for record in records:
                        record.release()
                else:
                    observer.wait(min(_LOOK_S, max(until_s - time.monotonic(), 0.0)))
                del records
                if not has_given_way:
                    has_given_way = True
                    spare_cpu.give_way()

        with Observer(bridge) as observer, ThreadPoolExecutor(1, "shmbridge-record") as apart:
            try:
                apart.submit(copy).result()
            finally:
                over.set()
            stats, missed, missed_lanes = recorder.stats(), observer.missed, observer.missed_lanes
            unreadable_lanes = dict(observer.unreadable)
    return Observed(
        int(stats["recorded_total"]),
        missed,
        missed_lanes,
        int(stats["skipped_total"]),
        int(stats["again_total"]),
        int(stats["unreadable_total"]),
        recorder.reached,
        unreadable_lanes,
        [str(path) for path in map(Path, recorder.finished_left)],
    )
