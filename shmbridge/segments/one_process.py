"""A base for objects bound to the process that made them: they hold locks and mappings, which cannot be
copied.
"""

from typing import NoReturn


class OneProcess:
    """Refuses to be pickled, with a hint what to pass to another process instead."""

    __slots__ = ()
    _instead = "pass the bridge's name, and open a new one in that process"

    def __reduce_ex__(self, _: object) -> NoReturn:
        raise TypeError(
            f"a {type(self).__name__} cannot be pickled: it belongs to this process -> {self._instead}"
        )
