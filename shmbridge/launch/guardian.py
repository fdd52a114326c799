"""Runs one program, and kills every process it started when it ends.

A script that uses the standard library alone.

    python -I -S guardian.py PARENT DEATH_SIGNAL FOLDER LABEL PROGRAM [ARGUMENT ...]

Three facts of the kernel: a process that asks for it becomes the parent of its descendants' orphans, in any
session (PR_SET_CHILD_SUBREAPER); a process can be signalled when its parent dies (PR_SET_PDEATHSIG); a child
that has ended keeps its pid until its parent has waited for it, so that killing children hits no other
process. From these:

- the program ends: its remaining processes become children of the guardian and are killed, all of them;
  but if the program was told to end, the processes of its group, which were told the same, end by themselves
  first (a shell ends before the program it has started);
- the guardian is killed: the program gets DEATH_SIGNAL, and the other processes go to the guardian's own
  guardian;
- PARENT dies (0: the guardian outlives it): the guardian kills the program at once, then sweeps as above.

SIGINT, SIGTERM and SIGHUP are passed on to the program's process group. LABEL is shown in a list of
processes. Exit status: that of the program, 128 + signal if one killed it; 127 if it could not be started.
"""

import contextlib
import ctypes
import os
import signal
import sys
import time
from collections.abc import Collection, Sequence

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_libc = ctypes.CDLL(None, use_errno=True)

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def command(parent: int, death_signal: int, folder: str, label: str, program: Sequence[str]) -> list[str]:
    """Returns the command line of a guardian of a program.

    Isolated and without site: it does not depend on the run's Python environment, and starts fast.
    """
    words = (parent, int(death_signal), folder, label, *program)
    return [sys.executable, "-I", "-S", os.path.abspath(__file__), *map(str, words)]


def adopt_orphans() -> None:
    """Makes this process, instead of init, the parent of its descendants' orphans."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def children() -> dict[int, int]:
    """Returns the children of this process, zombies included: pid -> process group."""
    me, found = str(os.getpid()).encode(), {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                # A name is any bytes, and may be cut off within a character.
                with open(f"/proc/{name}/stat", "rb") as file:
                    after_name = file.read().rpartition(b")")[2].split()
            except OSError:  # it has ended, or is another user's and hidden
                continue
            if after_name[1] == me:
                found[int(name)] = int(after_name[2])
    return found


def sweep(spared: Collection[int] = ()) -> None:
    """Kills the children of this process, and theirs as they become its own, until there is none.

    Blocks until it is done.
    """
    beyond = set(spared)
    while remaining := children().keys() - beyond:
        for pid in remaining:
            try:
                os.kill(pid, signal.SIGKILL)
            except PermissionError:  # it became another user's: we may not signal it
                beyond.add(pid)
        for pid in remaining - beyond:
            os.waitpid(pid, 0)


def block_signals() -> set[signal.Signals]:
    """Blocks the ending signals and SIGCHLD for `sigwait`; SIGINT and SIGHUP stay ignored if they were at the
    start (nohup, a shell's `&`).
    """
    # The caller may ignore them, but they report ends and the parent's death.
    for signum in (signal.SIGCHLD, signal.SIGTERM):
        signal.signal(signum, signal.SIG_DFL)
    wanted = {signum for signum in ENDING if signal.getsignal(signum) != signal.SIG_IGN} | {signal.SIGCHLD}
    signal.pthread_sigmask(signal.SIG_SETMASK, wanted)
    return wanted


def main(argv: list[str]) -> int:
    """Runs the program; returns its exit status. Blocks until it and all processes it started are gone."""
    parent, death_signal, folder, label, *command = argv
    adopt_orphans()
    awaited = block_signals()
    if parent != "0":
        _prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != int(parent):  # the parent died before the line above
            return 1
    spared = children()  # children that this process had before exec
    program = _start(command, folder, int(death_signal))
    status = 127
    if program:
        wait_status, told = _wait(program, int(parent), awaited)
        status = _status(wait_status)
        if told:
            _wait_for_group(program, int(parent), awaited)
    sweep(spared)
    if parent == "0" and status == 128 + signal.SIGKILL:
        with contextlib.suppress(OSError):  # the reader is gone
            print(
                f"{label}: its supervisor was killed; all that it ran has been ended",
                file=sys.stderr,
                flush=True,
            )
    return status


def _start(command: list[str], folder: str, death_signal: int) -> int:
    """Starts the program in a session of its own; returns its pid, or 0, with the reason on stderr, if it
    cannot run.
    """
    me = os.getpid()
    running, failed = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.setsid()
            # Python ignores these signals; a program should start with the defaults.
            for signum in (signal.SIGPIPE, signal.SIGXFSZ):
                signal.signal(signum, signal.SIG_DFL)
            _prctl(_PR_SET_PDEATHSIG, death_signal)
            if os.getppid() == me:
                signal.pthread_sigmask(signal.SIG_SETMASK, ())
                os.chdir(folder)
                os.execvp(command[0], command)
        except OSError as error:
            os.write(failed, f"cannot run {command[0]} in {folder}: {error}\n".encode())
        finally:
            os._exit(127)
    os.close(failed)
    with os.fdopen(running) as pipe:
        if why := pipe.read():  # a successful exec closes the pipe
            os.waitpid(pid, 0)
            print(f"{time.strftime('%Y-%m-%d %H:%M:%S')}.000 ERROR launch: {why}", end="", file=sys.stderr)
            return 0
    return pid


def _wait(program: int, parent: int, awaited: set[signal.Signals]) -> tuple[int, bool]:
    """Returns the wait status of the program, and whether it was told to end.

    Passes signals on; kills the program if the parent dies.
    """
    told = False
    while True:
        signum = signal.sigwait(awaited)
        if signum != signal.SIGCHLD:
            told = not _orphaned(parent)
            _signal_group(program, signum if told else signal.SIGKILL)
            continue
        while (ended := _ended())[0]:
            if ended[0] == program:
                return ended[1], told


def _wait_for_group(program: int, parent: int, awaited: set[signal.Signals]) -> None:
    """Waits until no process of the group is left.

    To stop waiting, the caller kills this guardian; the parent's death also ends the wait.
    """
    while True:
        while _ended()[0]:
            pass
        if program not in children().values() or _orphaned(parent):
            return
        signum = signal.sigwait(awaited)
        if signum != signal.SIGCHLD:
            _signal_group(program, signum)


def _orphaned(parent: int) -> bool:
    return parent != 0 and os.getppid() != parent


def _ended() -> tuple[int, int]:
    try:
        return os.waitpid(-1, os.WNOHANG)
    except ChildProcessError:
        return 0, 0


def _signal_group(program: int, signum: int) -> None:
    with contextlib.suppress(ProcessLookupError):  # it has ended, and SIGCHLD is pending
        os.killpg(program, signum)


def _status(wait_status: int) -> int:
    code = os.waitstatus_to_exitcode(wait_status)
    return code if code >= 0 else 128 - code


def _prctl(option: int, value: int) -> None:
    if _libc.prctl(option, value, 0, 0, 0):
        raise OSError(ctypes.get_errno(), f"prctl({option}, {value})")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
