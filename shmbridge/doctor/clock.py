"""The clock by which ages, tickets and waits are told: resolution, cost, time namespace."""

import time
from pathlib import Path

from shmbridge.doctor.check import Check

_CALLS, _ROUNDS = 2000, 5
_COARSE_NS = 1000
_SOURCE = "sys/devices/system/clocksource/clocksource0/current_clocksource"


def monotonic(root: Path = Path("/")) -> Check:
    """The resolution of CLOCK_MONOTONIC, and what one look at it costs from Python."""
    resolution = time.clock_getres(time.CLOCK_MONOTONIC) * 1e9
    cost = _cost_ns()
    source = _source(root)
    text = (
        f"CLOCK_MONOTONIC counts {resolution:.0f} ns, a look costs {cost:.0f} ns{source and f' ({source})'}"
    )
    if resolution > _COARSE_NS or cost > _COARSE_NS:
        fix = "a clock source that needs no system call: kernel parameter clocksource=tsc, where it is stable"
        return Check("clock", "warn", text, fix)
    return Check("clock", "ok", text)


def _cost_ns() -> float:
    """Returns the least of some rounds: others use the machine too."""
    look, rounds = time.monotonic_ns, []
    for _ in range(_ROUNDS):
        began = look()
        for _ in range(_CALLS):
            look()
        rounds.append((look() - began) / _CALLS)
    return min(rounds)


def _source(root: Path) -> str:
    try:
        return (root / _SOURCE).read_text().strip()
    except OSError:
        return ""


def time_namespace(root: Path = Path("/")) -> Check:
    """Whether this process' monotonic clock is the machine's."""
    try:
        lines = (root / "proc/self/timens_offsets").read_text().splitlines()
    except OSError:
        return Check("time namespace", "ok", "the kernel has none: one clock for all")
    offsets = {name: int(seconds) + int(part) / 1e9 for name, seconds, part in map(str.split, lines)}
    ahead = offsets.get("monotonic", 0.0)
    if not ahead:
        return Check("time namespace", "ok", "the machine's own clock")
    return Check(
        "time namespace",
        "warn",
        f"this process' clock is {abs(ahead):g} s {'ahead of' if ahead > 0 else 'behind'} the machine's",
        "run all processes of a bridge in one time namespace: tickets and ages need one clock",
    )
