"""One source as its destination sees it: the asks that are on their way, and what it last said."""

import secrets
import time
from collections import Counter, deque
from dataclasses import dataclass, field

from shmbridge.relay.wire import Ask, State

TOTALS = ("relayed_total", "duplicates_total", "bytes_total")
_BLOCKED_S = 0.25  # a node whose lanes are full is asked again after that, or when one has room
_IDLE_WAIT_S = 2.0  # of a source that had nothing for some time
_MOST_IDLE = 8


@dataclass(slots=True, eq=False)
class AskedNode:
    """A node with a source. `brought` are the bytes of its last parcel; `idle` counts answers in a row after
    which it held nothing; `refused` is what its next ask says.
    """

    name: str
    session: str = field(default_factory=lambda: secrets.token_hex(8))
    asked: int = 0
    asks: deque[Ask] = field(default_factory=deque)
    refused: dict[str, list[tuple[int, str]]] = field(default_factory=dict)
    state: State | None = None
    heard_s: float = 0.0
    brought: int = 0
    idle: int = 0
    nudged: bool = False
    blocked_until: float = 0.0
    blocked_free: int = 0
    counts: Counter[str] = field(default_factory=Counter)

    def is_ready(self) -> bool:
        """Whether one more ask may be on its way: two at most, one if the last answer brought nothing."""
        return len(self.asks) < (2 if self.brought and self.state is not None else 1)

    def wait_s(self, wait_s: float) -> float:
        """Returns how long its source waits for a first record: longer where nothing came for some time."""
        return min(wait_s * (1 << self.idle), _IDLE_WAIT_S)

    def is_asked(self, ask: Ask) -> None:
        """Notes an ask that is on its way."""
        self.asked += 1
        self.nudged = False
        self.asks.append(ask)

    def to_nudge(self, says: tuple[object, ...]) -> tuple[str, int] | None:
        """Returns session and number of its newest ask, once, if that says something else of the learner."""
        if self.nudged or not self.asks:
            return None
        ask = self.asks[-1]
        if (ask.version, ask.paused, ask.draining, ask.run, ask.step) == says:
            return None
        self.nudged = True
        return self.session, ask.number

    def answers(self, state: State) -> bool:
        """Takes what it says of itself; returns False if that does not answer its oldest ask."""
        if state.session != self.session or not self.asks or self.asks[0].number != state.number:
            return False
        ask = self.asks.popleft()
        self.state, self.heard_s = state, time.monotonic()
        for producer_id, refused in ask.refused.items():  # it has heard of these
            left = [each for each in self.refused.pop(producer_id, ()) if each not in refused]
            if left:
                self.refused[producer_id] = left
        return True

    def has_brought(self, size: int, state: State, free: int) -> None:
        """Notes the bytes of an answer; `free` bytes are in its lanes here."""
        self.brought = size
        # What it holds has to be acknowledged soon.
        self.idle = 0 if size or state.counters.get("held") else min(self.idle + 1, _MOST_IDLE)
        self.counts["bytes_total"] += size
        if state.blocked and not size:
            self.blocked_until, self.blocked_free = time.monotonic() + _BLOCKED_S, free
        else:
            self.blocked_until = 0.0

    def lost(self) -> None:
        """Begins another session: no ask is on its way."""
        self.session, self.asked, self.idle = secrets.token_hex(8), 0, 0
        self.asks.clear()
        self.brought = 0

    def about(self) -> dict[str, float]:
        """Returns the counters here, its own by its last word, and the seconds since then. Any thread."""
        about: dict[str, float] = {**dict.fromkeys(TOTALS, 0), **self.counts}
        if self.state is not None:
            about |= {f"source_{key}": value for key, value in self.state.counters.items()}
            about |= {"pid": self.state.pid, "backlog": self.state.backlog}
            about["heard_s"] = time.monotonic() - self.heard_s
        return about
