"""Since when each process has been stopped or dead, as far as this view has seen it."""

from shmbridge.watch.diagnosis import in_words
from shmbridge.watch.processes import State
from shmbridge.watch.rows import Row
from shmbridge.watch.snapshot import BridgeLook

_TIMED = (State.STOPPED, State.DEAD)


class Since:
    """Remembers the state of each lane, and when it was first seen in it."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[str, float, bool]] = {}  # lane: state, since, whether its begin was seen

    def see(self, now: BridgeLook) -> None:
        """Takes note of a look."""
        known = {}
        for lane in now.lanes:
            earlier = self._known.get(lane.name)
            if earlier is not None and earlier[0] == lane.state:
                known[lane.name] = earlier
            else:
                known[lane.name] = (str(lane.state), now.at_s, earlier is not None)
        self._known = known

    def words(self, row: Row, at_s: float) -> str:
        """Returns a row's state with its time: `stopped 12 s`, `stopped >12 s` if it began before."""
        known = self._known.get(row.lane or "")
        if known is None or row.state not in _TIMED or row.state != known[0]:
            return row.state
        _, since_s, begin_seen = known
        age_s = at_s - since_s
        if not begin_seen and age_s <= 0:
            return row.state
        return f"{row.state} {'' if begin_seen else '>'}{in_words(age_s)}"
