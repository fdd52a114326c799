from typing import Any

from shmbridge._ext.mapping import Mapping

def copy_in(mapping: Mapping, at: int, source: Any, going_round: int) -> None: ...
