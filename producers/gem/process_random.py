"""Keeps the seeds of `random` and NumPy, which are the whole process's, from other episodes' draws."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np


class ProcessRandom:
    """Lets environments draw side by side, or one alone that seeds. Any thread; calls wait for their turn."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        # Turns, each with its thread: those that wait and those that have begun.
        self._to_draw: dict[object, int] = {}
        self._to_seed: dict[object, int] = {}
        self._drawing: dict[object, int] = {}
        self._alone: dict[object, int] = {}  # one at most

    @contextmanager
    def shared(self) -> Iterator[None]:
        """Within the block others may draw, nobody seeds."""
        turn = self._turn(self._to_draw, self._drawing, lambda: not self._alone and not self._to_seed)
        try:
            yield
        finally:
            with self._changed:
                self._drawing.pop(turn, None)
                self._changed.notify_all()

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Within the block nobody else draws; after it, draws go on as if it had not been."""
        turn = self._turn(self._to_seed, self._alone, lambda: not self._alone and not self._drawing)
        before, before_numpy = random.getstate(), np.random.get_state()
        try:
            yield
        finally:
            with self._changed:
                if self._alone.pop(turn, None) is not None:
                    random.setstate(before)
                    np.random.set_state(before_numpy)
                self._changed.notify_all()

    def give_up(self, thread: int) -> None:
        """Ends the turns of a thread whose call takes too long; one that waits raises there."""
        with self._changed:
            for turns in (self._to_draw, self._to_seed, self._drawing, self._alone):
                for turn in [turn for turn, owner in turns.items() if owner == thread]:
                    del turns[turn]
            self._changed.notify_all()

    def _turn(self, waiting: dict[object, int], begun: dict[object, int], may: Callable[[], bool]) -> object:
        turn = object()
        with self._changed:
            waiting[turn] = threading.get_ident()
            try:
                self._changed.wait_for(lambda: turn not in waiting or may())
                if turn not in waiting:
                    raise TimeoutError("its episode ended before its turn to draw at random")
                begun[turn] = waiting[turn]
            finally:
                waiting.pop(turn, None)
        return turn


PROCESS_RANDOM = ProcessRandom()
