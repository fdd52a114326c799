"""The output of a launch: one line per change on stderr, or one JSON object on stdout, and always one in the
run's events.jsonl.
"""

import contextlib
import os
import select
import time
from pathlib import Path
from typing import Any

import msgspec


class Events:
    """Reports events; a closed terminal or pipe never ends a run.

    Args:
        path: file that gets a JSON line per event.
        as_json: JSON on stdout instead of text on stderr.
    """

    def __init__(self, path: Path, *, as_json: bool) -> None:
        self._file = path.open("ab", buffering=0)
        self._as_json = as_json
        self._began = time.monotonic()
        self._in_place = not as_json and os.isatty(2)
        self._drawn = False

    def say(self, event: str, text: str, **facts: Any) -> None:
        """Reports one event: its kind, the text for a reader, and facts for a program."""
        line = msgspec.json.encode({"event": event, "time": time.time(), **facts, "text": text}) + b"\n"
        with contextlib.suppress(OSError):
            self._file.write(line)
        if self._as_json:
            _write(1, line)
        else:
            clear = "\r\x1b[K" if self._drawn else ""
            self._drawn = False
            _write(2, f"{clear}{self._line(text)}\n".encode())

    def step(self, text: str, *, is_due: bool, **facts: Any) -> None:
        """Shows the newest step: on a terminal in one line, drawn over the last step's; else reports it if a
        line `is_due`.
        """
        if self._in_place:
            self._drawn = True
            _write(2, f"\r{self._line(text)}\x1b[K".encode())
        elif is_due:
            self.say("step", text, **facts)

    def _line(self, text: str) -> str:
        return f"[{time.monotonic() - self._began:7.1f} s] {text}"


def _write(descriptor: int, data: bytes) -> None:
    """Writes as much as the reader takes; a stopped terminal or a full pipe costs a moment and the rest of
    the line, but does not stop the run.
    """
    with contextlib.suppress(OSError):
        for begin in range(0, len(data), select.PIPE_BUF):
            if not select.select([], [descriptor], [], 0.2)[1]:
                return
            os.write(descriptor, data[begin : begin + select.PIPE_BUF])
