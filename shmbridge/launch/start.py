"""Starts a plan: the run directory, and the process that becomes its guardian. Also prints a plan."""

import fcntl
import os
import shlex
import signal
import sys
from pathlib import Path
from typing import NoReturn

import msgspec

from shmbridge.errors import LaunchFailed
from shmbridge.launch import guardian
from shmbridge.launch.config import Config
from shmbridge.launch.plan import Check, Plan, write_private


def become_guardian(config: Config, plan: Plan, *, label: str, as_json: bool) -> NoReturn:
    """Writes the run directory and becomes the guardian of a supervisor; raises LaunchFailed if the directory
    is in use or cannot be written.
    """
    _open_standard_descriptors()
    run_dir = Path(plan.run_dir)
    try:
        (run_dir / "logs").mkdir(parents=True, exist_ok=True)
        lock = _lock(run_dir / "launch.lock")
        write_private(run_dir / "config.json", msgspec.json.format(msgspec.json.encode(config)))
        plan.save(run_dir / "plan.json")
    except OSError as error:
        raise LaunchFailed(
            f"run directory {run_dir}: {error.strerror}", hint="set a run_dir that this user can write to"
        ) from error
    supervisor = [sys.executable, "-m", "shmbridge.launch.supervisor", str(run_dir / "plan.json")]
    supervisor += [str(lock), "json" if as_json else "text"]
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:  # None if the descriptor was closed at the start
            stream.flush()
    # From here on the user's shell, terminal and `kill` see a small process with one thread, which can hardly
    # fail.
    os.execv(sys.executable, guardian.command(0, signal.SIGTERM, os.getcwd(), label, supervisor))


def _open_standard_descriptors() -> None:
    """Opens closed standard descriptors (`2>&-`) on /dev/null; else the lock or a log would get their
    numbers, and the output written to them.
    """
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # takes the lowest free number: this one


def _lock(path: Path) -> int:
    """Takes a lock that lasts as long as the guardian or the supervisor lives; returns its descriptor."""
    lock = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.pread(lock, 32, 0).decode(errors="replace").strip()
        os.close(lock)
        raise LaunchFailed(
            f"{path.parent} is in use by a launch, pid {holder}", hint="stop that one, or set another run_dir"
        ) from None
    os.truncate(lock, 0)
    os.pwrite(lock, f"{os.getpid()}\n".encode(), 0)
    os.set_inheritable(lock, True)
    return lock


def as_json(plan: Plan) -> str:
    """Returns the plan for programs."""
    return msgspec.json.format(msgspec.json.encode(plan)).decode()


def as_text(plan: Plan) -> str:
    """Returns the plan for people: services in the order of their starts, each with a command for a shell."""
    lines = [f"bridge {plan.bridge}, run directory {plan.run_dir}", *(f"note: {note}" for note in plan.notes)]
    for place, stage in enumerate(plan.stages, 1):
        for service in stage:
            variables = [f"{name}={shlex.quote(value)}" for name, value in service.env.items()]
            folder = [f"cd {shlex.quote(service.folder)} &&"] if service.folder else []
            lines += [
                "",
                f"{place}. {service.name}: {_when_up(service.check)}; log {plan.log(service)}",
                "   " + " ".join([*folder, *variables, shlex.join(service.command)]),
            ]
    return "\n".join(lines)


def _when_up(check: Check) -> str:
    if check.kind == "alive":
        return f"started once it has lived for {check.within_s:g} s"
    what = f"{check.url} answers" if check.kind == "http" else "the bridge has a consumer"
    return f"up when {what}, within {check.within_s:g} s"
