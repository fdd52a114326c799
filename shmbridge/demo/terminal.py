"""The demo's terminal: shows progress, and notices Ctrl-C. Knows nothing of the content shown. Called by
`demo.py`.
"""

from __future__ import annotations

import shutil
import signal
import time
from typing import TextIO


class Stopping:
    """SIGINT and SIGTERM as flags to check: no work is interrupted half-way."""

    def __init__(self) -> None:
        self.signum = 0
        self.count = 0
        for signum in (signal.SIGINT, signal.SIGTERM):
            signal.signal(signum, self._note)

    def _note(self, signum: int, frame: object) -> None:
        self.signum = self.signum or signum
        self.count += 1

    @property
    def asked(self) -> bool:
        """Whether the demo is to end."""
        return self.count > 0

    @property
    def hurry(self) -> bool:
        """Whether a signal came twice."""
        return self.count > 1


class Screen:
    """Progress on the terminal: one line that changes, or a line now and then where the output is a file."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._live = out.isatty()
        self._shown = 0.0
        self._text = ""

    def show(self, text: str) -> None:
        """Shows the progress of the run."""
        if self._live:
            room = shutil.get_terminal_size().columns - 1
            print(f"\r\x1b[K{text[:room]}", end="", flush=True, file=self._out)
        elif text != self._text and time.monotonic() - self._shown > 5:
            print(text, flush=True, file=self._out)
            self._shown = time.monotonic()
        self._text = text

    def say(self, text: str) -> None:
        """Prints a line that stays."""
        print(("\r\x1b[K" if self._live else "") + text, flush=True, file=self._out)
