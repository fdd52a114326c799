"""CPU time of this process and of all that it started."""

import contextlib

import psutil


def cpu_of(process: psutil.Process) -> float:
    """Returns the CPU seconds that a process has used."""
    spent = process.cpu_times()
    return float(spent.user + spent.system)


def cpu_s() -> dict[int, float]:
    """Returns the CPU seconds that this process and all below it have used, by pid."""
    found: dict[int, float] = {}
    for process in (psutil.Process(), *psutil.Process().children(recursive=True)):
        with contextlib.suppress(psutil.NoSuchProcess):
            found[process.pid] = cpu_of(process)
    return found
