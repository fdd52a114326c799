"""Groups at which steps failed: counted, tried in halves, and set aside once the one at fault is found.

A step that fails is tried again whole. Once each of its groups has failed often enough, it is tried in
halves, and these in halves, until a single group fails: that one is set aside. What failed stands in a file,
so that it outlives the process. Of a process that ended in the middle of a step only a crash counts (SIGABRT,
SIGSEGV, SIGBUS, SIGFPE, SIGILL): a signal handler writes the step's groups into a second file. SIGKILL,
SIGTERM and Ctrl-C do not count.

Knows groups by their keys only, and neither leases nor trainers.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from shmbridge._ext.lane import CrashNote
from shmbridge.archive.recorder import Recorder
from shmbridge.record import Record

log = logging.getLogger(__name__)

_MOST_KNOWN = 4096  # groups whose failures are remembered; the oldest are forgotten first

Key = str
_UNREADABLE = OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError


class Failures:
    """The failed attempts at groups, kept in a folder. For one thread at a time.

    Args:
        folder: made when something fails; `failures.json`, `crash` and what was set aside lie in it.
        after: failures of a group after which it is not tried beside others any more, and then set aside.
    """

    def __init__(self, folder: Path, after: int) -> None:
        self.folder, self.after = folder.absolute(), after  # a trainer may change its directory
        self.counts: dict[Key, int] = {}  # failures so far
        self._apart: list[list[Key]] = []  # groups to try by themselves, set after set
        self._at_fault: set[Key] = set()  # to be set aside as soon as they are here
        # of a group tried apart by itself: the groups that were in all of its failed steps
        self._beside: dict[Key, list[Key]] = {}
        self._begun: dict[Key, None] = {}  # of steps whose end is not known yet
        self._crash: CrashNote | None = None
        self._load()

    def _load(self) -> None:
        """Reads what an earlier process left; what it had begun has failed if it crashed."""
        try:
            read: Any = json.loads((self.folder / "failures.json").read_bytes())
            counts = {str(key): int(count) for key, count in read["counts"].items()}
            apart, at_fault = [_keys(each) for each in read["apart"]], _keys(read["at_fault"])
            beside = {str(key): _keys(others) for key, others in read.get("beside", {}).items()}
        except FileNotFoundError:
            pass
        except _UNREADABLE as wrong:
            log.warning(
                "%s cannot be read, so failures are counted from zero: %s",
                self.folder / "failures.json",
                wrong,
            )
        else:
            self.counts, self._apart, self._at_fault, self._beside = counts, apart, set(at_fault), beside
        crash = self.folder / "crash"
        try:
            lines = [line.split(b" ", 1) for line in crash.read_bytes().splitlines()]
            begun = [(int(how), _keys(json.loads(keys))) for how, keys in lines]
        except FileNotFoundError:
            return
        except _UNREADABLE as wrong:
            log.warning("%s cannot be read, so its crash is not counted: %s", crash, wrong)
            begun = []
        for how, keys in begun:
            log.warning(
                "the process before ended by %s in the middle of a step of %d groups: counted as a failure",
                signal.Signals(how).name if how in set(signal.Signals) else f"signal {how}",
                len(keys),
            )
            self.failed(keys)
        with contextlib.suppress(OSError):
            crash.unlink()

    def begin(self, keys: Iterable[Key]) -> None:
        """Notes that a step with these groups begins. Never blocks."""
        if self._crash is None:
            self._crash = CrashNote(os.fsencode(self.folder / "crash"))
        self._begun |= dict.fromkeys(keys)
        self._note()

    def _note(self) -> None:
        if self._crash is not None:
            self._crash.set(json.dumps(list(self._begun)).encode() if self._begun else b"")

    def over(self, keys: Iterable[Key]) -> None:
        """Notes that a step with these groups is trained, or was given back unread."""
        for key in keys:
            self._begun.pop(key, None)
        self._note()

    def trained(self, keys: Iterable[Key]) -> None:
        """Forgets the failures of groups that are trained, or discarded. Blocks for one small write if there
        were any.
        """
        keys = set(keys)
        self.over(keys)
        if self.counts.keys() & keys:
            self._forget(keys)
            self._save()

    def failed(self, keys: Sequence[Key]) -> Key | None:
        """Counts a failure of a step; returns the one group at fault, to be set aside, once it is known.

        Groups that are tried apart may stand beside others, which may be at fault themselves: these are
        counted, too, and become a set of their own. A single group is at fault once no other one was beside
        it in each of its failures. `apart` says how to try the groups again. Blocks for one small write.
        """
        self.over(keys)
        suspects = [key for key in keys if self.set_of(key) is not None] or list(keys)
        others = [key for key in keys if key not in set(suspects)]
        for key in keys:
            self.counts[key] = self.counts.pop(key, 0) + 1
        self._forget(set(list(self.counts)[: max(0, len(self.counts) - max(_MOST_KNOWN, len(keys)))]))
        found, late = None, [key for key in others if self.counts.get(key, 0) >= max(self.after, 2)]
        if all(self.counts.get(key, 0) >= self.after for key in suspects):
            kept = ([key for key in each if key not in suspects] for each in self._apart)
            self._apart = [each for each in kept if each]
            if len(suspects) > 1:
                half = len(suspects) // 2
                self._apart = [suspects[:half], suspects[half:], *self._apart]
            else:
                beside = self._beside.get(suspects[0], others)
                self._beside[suspects[0]] = [key for key in others if key in set(beside)]
                if self._beside[suspects[0]]:
                    self._apart, late = [suspects, *self._apart], others  # others stand beside it next time
                else:
                    found = suspects[0]
                    self._at_fault.add(found)
                    self.counts.update({key: self.counts[key] - 1 for key in others})
                    late = []
        if late:
            self._apart.append(late)
        self._save()
        return found

    def set_of(self, key: Key) -> int | None:
        """Returns the number of the set that the group is to be tried apart with; None: with any others."""
        return next((number for number, each in enumerate(self._apart) if key in each), None)

    def is_at_fault(self, key: Key) -> bool:
        """Returns whether the group is to be set aside, untried."""
        return key in self._at_fault

    def set_aside(self, key: Key, records: Sequence[Record]) -> None:
        """Writes a group into the folder, in the format of recordings, and forgets it. Blocks for the disk.

        Raises ArchiveFull, ArchiveUnwritable, ArchiveTaken: the group is to be kept.
        """
        with Recorder(self.folder, fsync=True) as recorder:
            recorder.take(records)
        self._forget({key})
        self._save()

    def apart(self, keys: Sequence[Key]) -> list[list[Key]]:
        """Returns groups as steps: one at fault each, those not suspected, then sets to try apart."""
        alone = [[key] for key in keys if key in self._at_fault]
        others, sets = dict.fromkeys(key for key in keys if key not in self._at_fault), []
        for kept in self._apart:
            sets.append([key for key in dict.fromkeys(kept) if key in others])
            others = {key: None for key in others if key not in kept}
        return [*alone, *(each for each in (list(others), *sets) if each)]

    def _forget(self, keys: set[Key]) -> None:
        for key in keys:
            self.counts.pop(key, None)
            self._beside.pop(key, None)
        self._at_fault -= keys
        kept = ([key for key in each if key not in keys] for each in self._apart)
        self._apart = [each for each in kept if each]

    def _save(self) -> None:
        known = {
            "counts": {key: count for key, count in self.counts.items() if count},
            "apart": self._apart,
            "at_fault": sorted(self._at_fault),
            "beside": self._beside,
        }
        file = self.folder / "failures.json"
        try:
            if any(known.values()):
                self.folder.mkdir(parents=True, exist_ok=True)
                new = file.with_suffix(".json.new")
                new.write_text(json.dumps(known))
                new.replace(file)
            elif self.folder.is_dir():
                file.unlink(missing_ok=True)
                if not any(self.folder.iterdir()):
                    self.folder.rmdir()
        except OSError as wrong:  # the run goes on, as it would without a failure
            log.warning("failures of steps are not written, and end with this process: %s", wrong)

    def close(self) -> None:
        """Ends the notes for crashes; what is begun and not over counts as interrupted. Idempotent."""
        if self._crash is not None:
            self._crash.end()
        self._crash = None


def _keys(read: object) -> list[Key]:
    if not isinstance(read, list):
        raise TypeError(f"not a list: {str(read)[:80]}")
    return [str(key) for key in read]
