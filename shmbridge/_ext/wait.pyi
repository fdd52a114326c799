from shmbridge._ext.mapping import Mapping
from shmbridge._ext.ring import LaneReader

class HubWait:
    late_wakes: int
    sleeps: int
    def __init__(self, control: Mapping) -> None: ...
    def wait(self, readers: list[LaneReader], timeout_ns: int, arrivals: int, spin: bool = True) -> bool: ...
