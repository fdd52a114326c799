"""The limit of open files, against the lanes that a consumer maps."""

import resource

from shmbridge.doctor.check import Check
from shmbridge.segments import descriptors_at_most, lanes_within

_FEWEST = 64  # a consumer takes about 15, and wants 32 free at its start
_ENOUGH = 4096


def descriptors() -> Check:
    """How many lanes a consumer of this process' limits maps: it raises the soft limit to the hard one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = descriptors_at_most()
    lanes = lanes_within(most)
    text = (
        f"RLIMIT_NOFILE is {_number(soft)}, at most {_number(hard)}: a consumer maps up to {lanes:,} "
        f"lane{'' if lanes == 1 else 's'}"
    )
    if most >= _ENOUGH:
        return Check("open files", "ok", text)
    return Check(
        "open files",
        "warn" if most >= _FEWEST else "fail",
        text,
        f"ulimit -Hn {_ENOUGH} (docker run --ulimit nofile={_ENOUGH})",
    )


def _number(limit: int) -> str:
    return "unlimited" if limit == resource.RLIM_INFINITY else f"{limit:,}"
