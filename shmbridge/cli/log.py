"""The one format of our programs' logs: time, level, role, text.

    2026-11-23 12:00:01.123 INFO learner: bridge run1: step 0 of 400, version 0, waiting

With SHMBRIDGE_LOG=json, or --json of a program, each line is an object of the same: time, name, level, text.

The library only logs, to loggers under "shmbridge"; a program chooses where that goes, here.
"""

import io
import json
import logging
import os
import re
import stat
import sys
import threading
import time
from datetime import datetime
from typing import Any, TextIO

_LEVEL = re.compile(r"\b(DEBUG|INFO|WARNING|ERROR|CRITICAL)\b")
_STAMP = re.compile(
    r"(?P<time>\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{3}) "
    r"(?P<level>DEBUG|INFO|WARNING|ERROR|CRITICAL) (?P<role>[^ :]+): "
)
_MOST_LINE = 2**20  # characters; a longer line is cut
LOG_NAME = "SHMBRIDGE_LOG_NAME"  # role of this process, given by what started it
LOG_FORMAT = "SHMBRIDGE_LOG"  # "json": an object per line
_role = ""  # of the program that this process is, once it runs


def role_of(role: str) -> str:
    """Returns the name of this process in its log: SHMBRIDGE_LOG_NAME, else `role`."""
    return os.environ.get(LOG_NAME) or role


def lines(role: str, text: str, level: str = "INFO", at: float | None = None) -> str:
    """Returns each line of `text` with time, level and role before it.

    `at`: seconds since 1970; None: now.
    """
    moment = datetime.fromtimestamp(time.time() if at is None else at)
    stamp = f"{moment:%Y-%m-%d %H:%M:%S}.{moment.microsecond // 1000:03}"
    if logs_json():
        about = {"time": stamp, "name": role, "level": level}
        return "\n".join(json.dumps(about | {"text": line}) for line in text.splitlines() or [""])
    return "\n".join(f"{stamp} {level} {role}: {line}" for line in text.splitlines() or [""])


def logs_json() -> bool:
    """Returns whether each line of the log is a JSON object."""
    return os.environ.get(LOG_FORMAT) == "json"


def use_json() -> None:
    """Makes each line that this process and its children print from now on a JSON object."""
    os.environ[LOG_FORMAT] = "json"
    if _role and not isinstance(sys.stdout, StampedLines):
        _stamp(_role)


def stamp_of(line: str) -> re.Match[str] | None:
    """Returns the groups `time`, `level` and `role` of a line of this format; None for another one."""
    return _STAMP.match(line)


class LogFormat(logging.Formatter):
    """Log records in this format; every line of a traceback has it, too."""

    def __init__(self, role: str) -> None:
        super().__init__()
        self._role = role

    def format(self, record: logging.LogRecord) -> str:
        """Returns the lines of one log record."""
        return lines(self._role, super().format(record), record.levelname, record.created)


class _ToStderr(logging.StreamHandler[TextIO]):
    """Writes to what is standard error at that moment, past its StampedLines."""

    def emit(self, record: logging.LogRecord) -> None:
        stream = sys.stderr
        self.stream = stream.inner if isinstance(stream, StampedLines) else stream
        super().emit(record)


def log_to_stderr(role: str, *, others: bool = True) -> None:
    """Sends what shmbridge logs, from INFO on, to standard error. A second call is ignored.

    Args:
        role: see `role_of`.
        others: also what other packages log, and Python's warnings, from WARNING on.
    """
    target, ours = logging.getLogger("" if others else "shmbridge"), logging.getLogger("shmbridge")
    if any(isinstance(each, _ToStderr) for each in target.handlers):
        return
    handler = _ToStderr(sys.stderr)
    handler.setFormatter(LogFormat(role_of(role)))
    target.addHandler(handler)
    ours.setLevel(logging.INFO)
    ours.propagate = others
    if others:
        logging.captureWarnings(True)


class StampedLines:
    """A text stream that puts time, level and role before each line; all else is the inner stream's.

    A line is written once it is complete. Of what a progress bar draws over itself, the last is kept. Any
    thread.
    """

    def __init__(self, inner: TextIO, role: str) -> None:
        self.inner, self._role = inner, role
        self._rest: list[str] = []  # of a line without an end yet
        self._held = 0  # its characters
        self._lock = threading.RLock()  # a signal handler may print within a print

    def write(self, text: str) -> int:
        """Takes text; writes the lines that are complete with it."""
        with self._lock:
            if "\n" not in text and "\r" not in text:  # no more of the line is looked at than is new
                self._keep(text)
                return len(text)
            *complete, rest = ("".join(self._rest) + text).split("\n")
            self._rest, self._held = [], 0
            for line in complete:
                self._write(line)
            self._keep(rest[rest.rfind("\r", 0, -1) + 1 :])
        return len(text)

    def _keep(self, text: str) -> None:
        self._rest.append(text)
        self._held += len(text)
        if self._held > _MOST_LINE:
            self.end_line()

    def writelines(self, rows: list[str]) -> None:
        """Takes several texts."""
        self.write("".join(rows))

    def say(self, level: str, text: str) -> None:
        """Writes lines of a known level."""
        with self._lock:
            self.end_line()
            self.inner.write(lines(self._role, text, level) + "\n")
            self.inner.flush()

    def end_line(self) -> None:
        """Writes what was begun and has no end yet."""
        with self._lock:
            rest = "".join(self._rest)
            self._rest, self._held = [], 0
            if rest:
                self._write(rest)

    def _write(self, line: str) -> None:
        line = line.rstrip("\r").rpartition("\r")[2]
        if not (stamp_of(line) or (logs_json() and line.startswith('{"time": '))):
            line = lines(self._role, line, _guess(line))
        self.inner.write(line + "\n")
        self.inner.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


def _guess(line: str) -> str:
    if level := _LEVEL.search(line[:80]):
        return level[1]
    if "Warning: " in line:
        return "WARNING"
    return "ERROR" if line.startswith("Traceback (most recent") else "INFO"


def stamp_files(role: str) -> None:
    """Puts StampedLines over standard output and standard error if both go to one log, or if logs are JSON.

    A log is a file, or the pipe of a launch. What goes elsewhere may be meant for a program, and stays as it
    is.
    """
    global _role
    _role = role
    streams = [sys.stdout, sys.stderr]
    one_log = all(map(_is_log, streams)) and os.path.sameopenfile(*(each.fileno() for each in streams))
    if one_log or logs_json():
        _stamp(role)


def _stamp(role: str) -> None:
    streams = [sys.stdout, sys.stderr]
    for each in streams:
        if isinstance(each, io.TextIOWrapper):  # no text is to end the program
            each.reconfigure(errors="backslashreplace")
    stamped = [StampedLines(each, role_of(role)) for each in streams]
    sys.stdout, sys.stderr = stamped
    for logger in [logging.getLogger(), *logging.root.manager.loggerDict.values()]:
        for handler in getattr(logger, "handlers", ()):  # of packages that were imported before
            for before, after in zip(streams, stamped, strict=True):
                if getattr(handler, "stream", None) is before:
                    handler.setStream(after)


def end_lines() -> None:
    """Writes what was printed without the end of its line; for the end of a process."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, StampedLines):
            stream.end_line()


def _is_log(stream: TextIO | None) -> bool:
    try:
        mode = os.fstat(stream.fileno()).st_mode if stream is not None else 0
        return stat.S_ISREG(mode) or (stat.S_ISFIFO(mode) and LOG_NAME in os.environ)
    except (OSError, ValueError, io.UnsupportedOperation):
        return False
