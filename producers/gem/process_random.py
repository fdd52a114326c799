"""Keeps the seeds of `random` and NumPy, which are the whole process's, from other episodes' draws."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np


class ProcessRandom:
    """Lets environments draw side by side, or one alone that seeds. Any thread; calls wait for their turn."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._drawing, self._alone, self._waiting = 0, False, 0

    @contextmanager
    def shared(self) -> Iterator[None]:
        """Within the block others may draw, nobody seeds."""
        with self._changed:
            self._changed.wait_for(lambda: not self._alone and not self._waiting)
            self._drawing += 1
        try:
            yield
        finally:
            with self._changed:
                self._drawing -= 1
                self._changed.notify_all()

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Within the block nobody else draws; after it, draws go on as if it had not been."""
        with self._changed:
            self._waiting += 1
            self._changed.wait_for(lambda: not self._alone and not self._drawing)
            self._waiting -= 1
            self._alone = True
        before, before_numpy = random.getstate(), np.random.get_state()
        try:
            yield
        finally:
            random.setstate(before)
            np.random.set_state(before_numpy)
            with self._changed:
                self._alone = False
                self._changed.notify_all()


PROCESS_RANDOM = ProcessRandom()
