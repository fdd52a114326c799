"""Groups at which steps failed: counted, tried in halves, and set aside once the one at fault is found.

A step that fails is tried again whole. Once each of its groups has failed often enough, it is tried in
halves, and these in halves, until a single group fails: that one is set aside. What failed, and what a step
has begun, stands in a file, so that it outlives the process. Of a process that ended in the middle of a step
only a crash counts (SIGABRT, SIGSEGV, SIGBUS, SIGFPE, SIGILL): a handler marks it. SIGKILL, SIGTERM and
Ctrl-C do not.

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
from typing import Any, Self

from shmbridge._ext import crash_mark
from shmbridge.archive.recorder import Recorder
from shmbridge.record.record import Record

log = logging.getLogger(__name__)

_MOST_KNOWN = 4096  # groups whose failures are remembered; the oldest are forgotten first

Key = str


class Failures:
    """The failed attempts at groups, kept in a folder. A context manager; for one thread at a time.

    Args:
        folder: made when something fails or begins; `failures.json` and what was set aside lie in it.
        after: failures of a group after which it is not tried beside others any more, and then set aside.
    """

    def __init__(self, folder: Path, after: int) -> None:
        self.folder, self.after = folder, after
        self.counts: dict[Key, int] = {}  # failures so far
        self._apart: list[list[Key]] = []  # groups to try by themselves, set after set
        self._at_fault: set[Key] = set()  # to be set aside as soon as they are here
        self._begun: dict[Key, None] = {}  # of steps whose end is not known yet
        self._crash = -1
        self._made_run_folder = False
        self._load()

    def _load(self) -> None:
        """Reads what an earlier process left; what it had begun has failed if it crashed."""
        try:
            said: dict[str, Any] = json.loads((self.folder / "failures.json").read_bytes())
            self.counts = {str(key): int(count) for key, count in said["counts"].items()}
            self._apart = [[str(key) for key in keys] for keys in said["apart"]]
            self._at_fault = set(map(str, said["at_fault"]))
            begun = [str(key) for key in said["begun"]]
        except FileNotFoundError:
            return
        except (ValueError, KeyError, TypeError, AttributeError) as wrong:
            log.warning("%s is not readable and begins anew: %s", self.folder / "failures.json", wrong)
            return
        mark = self.folder / "crash"
        how = mark.read_bytes()[-1:] if mark.exists() else b""
        if begun and how:
            log.warning(
                "the process before ended by %s in the middle of a step of %d groups: counted as a failure",
                signal.Signals(how[0]).name if how[0] in set(signal.Signals) else f"signal {how[0]}",
                len(begun),
            )
            self.failed(begun)

    def begin(self, keys: Iterable[Key]) -> None:
        """Notes that a step with these groups begins. Blocks for one small write."""
        if self._crash < 0:
            self._made_run_folder = not self.folder.parent.exists()
            self.folder.mkdir(parents=True, exist_ok=True)
            self._crash = os.open(self.folder / "crash", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            crash_mark.begin(self._crash)
        self._begun |= dict.fromkeys(keys)
        self._save()

    def over(self, keys: Iterable[Key]) -> None:
        """Notes that a step with these groups is trained, or was given back unread."""
        for key in keys:
            self._begun.pop(key, None)

    def trained(self, keys: Iterable[Key]) -> None:
        """Forgets the failures of groups that are trained. Blocks for one small write if there were any."""
        keys = set(keys)
        self.over(keys)
        if self.counts.keys() & keys:
            self._forget(keys)
            self._save()

    def failed(self, keys: Sequence[Key]) -> bool:
        """Counts a failure of a step; returns whether its one group is at fault, and so to be set aside.

        Otherwise `apart` says how to try its groups again. Blocks for one small write.
        """
        self.over(keys)
        for key in keys:
            self.counts[key] = self.counts.pop(key, 0) + 1
        for key in list(self.counts)[: max(0, len(self.counts) - _MOST_KNOWN)]:
            del self.counts[key]
        over = all(self.counts.get(key, 0) >= self.after for key in keys)
        if over and len(keys) > 1:
            half = len(keys) // 2
            self._apart = [
                each for each in ([key for key in kept if key not in keys] for kept in self._apart) if each
            ]
            self._apart = [list(keys[:half]), list(keys[half:]), *self._apart]
        if over and len(keys) == 1:
            self._at_fault.add(keys[0])
        self._save()
        return over and len(keys) == 1

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
        """Returns the groups of a batch as steps: those without failures first, then sets to try apart."""
        sets = [[key for key in kept if key in keys] for kept in self._apart]
        tried = {key for kept in sets for key in kept}
        return [kept for kept in ([key for key in keys if key not in tried], *sets) if kept]

    def _forget(self, keys: set[Key]) -> None:
        for key in keys:
            self.counts.pop(key, None)
        self._at_fault -= keys
        kept = ([key for key in each if key not in keys] for each in self._apart)
        self._apart = [each for each in kept if each]

    def _save(self) -> None:
        if not self.folder.is_dir():
            self.folder.mkdir(parents=True, exist_ok=True)
        said = {
            "counts": self.counts,
            "apart": self._apart,
            "at_fault": sorted(self._at_fault),
            "begun": list(self._begun),
        }
        new = self.folder / "failures.json.new"
        new.write_text(json.dumps(said))
        new.replace(self.folder / "failures.json")

    def close(self) -> None:
        """Ends the marks of crashes; what is begun and not over counts as interrupted. Idempotent.

        Removes its files, and the folders that it made, if nothing has failed.
        """
        if self._crash < 0:
            return
        crash_mark.end(self._crash)
        os.close(self._crash)
        self._crash = -1
        if not (self.counts or self._at_fault):
            for name in ("crash", "failures.json"):
                (self.folder / name).unlink(missing_ok=True)
            with contextlib.suppress(OSError):  # something else lies there
                self.folder.rmdir()
                if self._made_run_folder:
                    self.folder.parent.rmdir()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
