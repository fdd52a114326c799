from typing import Any

from shmbridge._ext.mapping import Mapping

def copy_in(
    mapping: Mapping,
    at: int,
    source: Any,
    going_round: int,
    number: tuple[int, int, int] | None = None,
    first: int = 0,
) -> bool: ...
def are_finite(source: Any, number: tuple[int, int, int] | None = None) -> bool: ...
